"""When the requests of an open loop go out, in seconds from its start: values only, no clock.

An open loop sends what is due whether or not earlier answers have come, as independent users do.
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from math import isfinite
from pathlib import Path

from afserve.errors import ConfigError

POISSON, CONSTANT, BURSTS = "poisson", "constant", "bursts"
ARRIVALS = (POISSON, CONSTANT, BURSTS)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace: `at` in seconds from its first one, lengths in tokens."""

    at: float
    input: int
    output: int


def arrivals(kind: str, rate: float, burst: int, seed: int) -> Iterator[float]:
    """Without end, at `rate` requests per second in the mean. Bursts are `burst` at once, burst after burst Poisson."""
    if kind == CONSTANT:
        yield from (number / rate for number in count())
    size = burst if kind == BURSTS else 1
    draw, now = random.Random(seed), 0.0
    while True:
        for _ in range(size):
            yield now
        now += draw.expovariate(rate / size)


def scaled(trace: Sequence[TracedRequest], rate: float | None) -> list[float]:
    """The times of a trace, its pauses stretched or shrunk to `rate` requests per second in the mean."""
    span = trace[-1].at
    factor = 1.0 if rate is None or not span else (len(trace) - 1) / span / rate
    return [one.at * factor for one in trace]


def read_trace(path: Path, most: int | None) -> list[TracedRequest]:
    """The first `most` requests of a trace, by time.

    JSON lines with `timestamp` (ms), `input_length` and `output_length` (Mooncake's), or CSV with TIMESTAMP,
    ContextTokens and GeneratedTokens (Azure's). Raises ConfigError naming the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = list(_csv(file) if path.suffix == ".csv" else _lines(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}") from error
    except _BadLine as error:
        raise ConfigError(f"--trace {path}: {error}") from error
    if not found:
        raise ConfigError(f"--trace {path}: holds no request")
    found = sorted(found, key=lambda one: one.at)[:most]
    return [TracedRequest(one.at - found[0].at, one.input, one.output) for one in found]


_MOST_TOKENS = 1 << 24
_MOST_WORDS = f", at most {_MOST_TOKENS:,} tokens of each"


class _BadLine(Exception):
    pass


def _lines(file: Iterator[str]) -> Iterator[TracedRequest]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                row = json.loads(line)
                yield _traced(row["timestamp"] / 1e3, row["input_length"], row["output_length"])
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
                raise _BadLine(
                    f"line {number}: needs the numbers timestamp (ms), input_length and output_length{_MOST_WORDS}"
                ) from error


def _csv(file: Iterator[str]) -> Iterator[TracedRequest]:
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            whole, _, part = row["TIMESTAMP"].partition(".")
            at = datetime.fromisoformat(whole).timestamp() + float(f"0.{part or 0}")
            yield _traced(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _BadLine(
                f"line {number}: needs TIMESTAMP, ContextTokens and GeneratedTokens{_MOST_WORDS}"
            ) from error


def _traced(at: float, input: int, output: int) -> TracedRequest:
    if not (isinstance(input, int) and isinstance(output, int)):
        raise TypeError
    if not isfinite(at) or max(input, output) > _MOST_TOKENS:
        raise ValueError
    return TracedRequest(float(at), max(1, input), max(1, output))
