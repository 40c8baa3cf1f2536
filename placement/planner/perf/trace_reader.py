"""Reads request traces, Mooncake JSON lines and Azure CSV, into a `Workload`. Errors name file and line.

It is given lines of text, not paths.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime

import numpy as np

from afserve.errors import ConfigError
from afserve.placement.planner.perf.workload import Workload, from_samples

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LONGEST, _LATEST = 1e8, 1e12  # tokens of a request; seconds
_PLAIN = ("arrival_s", "input_tokens", "output_tokens")
Request = tuple[float, float, float]


def read_trace(source: str, lines: Sequence[str], decode_only: bool = False) -> Workload:
    """`source` is the file's name, for errors. JSON when the first line starts with a brace, else CSV with a header."""
    table = np.array(read_requests(source, lines), dtype=np.float64)
    means = f"input {table[:, 1].mean():,.0f} and output {table[:, 2].mean():,.0f} on average"
    name = f"{len(table):,} requests of {source.replace(chr(92), '/').rsplit('/', 1)[-1]}, {means}"
    return from_samples(name, table[:, 1], table[:, 2], table[:, 0], decode_only)


def read_requests(source: str, lines: Sequence[str], longest: float = _LONGEST) -> list[Request]:
    """One or more, by time: seconds from the first one, and two lengths of 1 to `longest` tokens."""
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ConfigError(f"{source}: the trace is empty", param="trace")
    read = _mooncake if first.lstrip().startswith("{") else _csv
    found = sorted(_checked(source, number, row, longest) for number, row in read(source, lines))
    if not found:
        raise ConfigError(f"{source}: the trace holds a header and no request", param="trace")
    return [(at - found[0][0], prompt, answer) for at, prompt, answer in found]


def _mooncake(source: str, lines: Sequence[str]) -> Iterator[tuple[int, Request]]:
    """{"timestamp": ms, "input_length": n, "output_length": n} a line. With the number of the line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            row = (
                float(found["timestamp"]) / 1e3,
                float(found["input_length"]),
                float(found["output_length"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{source}:{number}: not a request with timestamp, input_length and output_length ({error})",
                param="trace",
            ) from error
        yield number, row


def _csv(source: str, lines: Sequence[str]) -> Iterator[tuple[int, Request]]:
    header = [name.strip() for name in lines[0].split(",")]
    names = _AZURE if _AZURE[0] in header else _PLAIN
    missing = [name for name in names if name not in header]
    if missing:
        raise ConfigError(
            f"{source}:1: the header lacks {', '.join(missing)}; expected {','.join(_AZURE)} or {','.join(_PLAIN)}",
            param="trace",
        )
    places = [header.index(name) for name in names]
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.split(",")
        try:
            row = (_seconds(cells[places[0]]), float(cells[places[1]]), float(cells[places[2]]))
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"{source}:{number}: cannot read {line.strip()!r} ({error})", param="trace"
            ) from error
        yield number, row


def _seconds(cell: str) -> float:
    """A plain number, or Azure's '2023-11-16 18:15:46.6805900' (seven digits of a second)."""
    text = cell.strip()
    if "-" not in text[1:]:
        return float(text)
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole).timestamp() + (float("0." + fraction) if fraction else 0.0)


def _checked(source: str, number: int, row: Request, longest: float) -> Request:
    arrival, prompt, answer = row
    if not (0 <= prompt <= longest and 0 <= answer <= longest and 0 <= arrival <= _LATEST):
        raise ConfigError(
            f"{source}:{number}: {row} is not a time of 0 to {_LATEST:g} s and two lengths of 0 to {longest:g} tokens",
            param="trace",
        )
    return arrival, max(prompt, 1.0), max(answer, 1.0)
