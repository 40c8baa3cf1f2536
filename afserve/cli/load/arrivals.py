"""When the requests of an open loop go out, in seconds from its start: values only, no clock.

An open loop sends what is due whether or not earlier answers have come, as independent users do.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from afserve.cli.options import read_given_text
from afserve.placement.planner.perf.trace_reader import read_requests

POISSON, CONSTANT, BURSTS = "poisson", "constant", "bursts"
ARRIVALS = (POISSON, CONSTANT, BURSTS)
_MOST_TOKENS = 1 << 24


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
    """The first `most` requests of a trace, by time: a file that `afserve plan --trace` reads. Raises ConfigError
    naming the line."""
    where = f"--trace {path}"
    found = read_requests(where, read_given_text(path, where).splitlines(), _MOST_TOKENS)[:most]
    return [TracedRequest(at, int(prompt), int(answer)) for at, prompt, answer in found]
