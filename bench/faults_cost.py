"""What surviving losses costs while nothing is lost: the default beside `--on-loss end`, in alternating pairs.

Both servers run at once and take turns, so that a machine that is busy with something else is so for both. Two servers
with the same flags differ by some percent for as long as they live, so both are started anew every few pairs.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from bench.faults_nodes import NODES, Row
from bench.live_load import Answers, steady
from bench.served import served

PROMPTS = ["import os\n", "def main():\n", "class Stack:\n", "for i in range(3):\n"]
FLAGS = {"recover": (), "end": ("--on-loss", "end")}
RESAMPLED = 1000
MIDDLE = (0.025, 0.975)  # the interval holds this much of the resampled ratios


@dataclass(frozen=True, slots=True)
class CostCase:
    """`starts` of both servers with `pairs` turns of either each, `seconds` long, with so many streams at a time."""

    starts: int = 10
    pairs: int = 3
    seconds: float = 4.0
    streams: int = 8
    tokens: int = 64


def measure(case: CostCase) -> Row:
    turns: dict[str, list[tuple[Answers, float]]] = {"recover": [], "end": []}
    for start in range(case.starts):
        order = list(FLAGS) if start % 2 == 0 else list(FLAGS)[::-1]
        with served(*NODES, *FLAGS[order[0]]) as one, served(*NODES, *FLAGS[order[1]]) as other:
            urls = {order[0]: one.url, order[1]: other.url}
            for name in order:
                asyncio.run(_turn(urls[name], case))
            for pair in range(case.pairs):
                for name in order if pair % 2 == 0 else order[::-1]:
                    turns[name].append(asyncio.run(_turn(urls[name], case)))
    return row(case, turns["recover"], turns["end"])


async def _turn(url: str, case: CostCase) -> tuple[Answers, float]:
    """What was heard, and the seconds until the last stream had ended."""
    heard, began = Answers(), time.monotonic()
    await steady(url, PROMPTS, case.seconds, case.streams, case.tokens, heard)
    return heard, time.monotonic() - began


def row(case: CostCase, recover: list[tuple[Answers, float]], end: list[tuple[Answers, float]]) -> Row:
    rates = [(mine.tokens / a) / (theirs.tokens / b) for (mine, a), (theirs, b) in zip(recover, end)]
    pairs = [(np.array(mine.gaps), np.array(theirs.gaps)) for (mine, _), (theirs, _) in zip(recover, end)]
    low, high = interval(pairs)
    return {
        "bench": "faults_cost",
        "starts": case.starts,
        "pairs": len(pairs),
        "seconds": case.seconds,
        "streams": case.streams,
        "throughput_ratio": round(statistics.median(rates), 4),
        "throughput_ratio_spread": [round(min(rates), 3), round(max(rates), 3)],
        "p99_ratio": round(p99_ratio(pairs), 3),
        "p99_ratio_95": [round(low, 3), round(high, 3)],
        "itl_p99_ms": round(1e3 * _p99([mine for mine, _ in pairs]), 2),
        "failed": sum(heard.failed for heard, _ in (*recover, *end)),
    }


Gaps = np.ndarray[tuple[int], np.dtype[np.float64]]  # seconds between tokens, of all streams of one turn


def p99_ratio(pairs: Sequence[tuple[Gaps, Gaps]]) -> float:
    """Of the 99th percentiles over all gaps of either kind: with recovery, over without."""
    return _p99([mine for mine, _ in pairs]) / _p99([other for _, other in pairs])


def interval(pairs: Sequence[tuple[Gaps, Gaps]], seed: int = 1) -> tuple[float, float]:
    """A bootstrap interval of `p99_ratio`: pairs are drawn again, with replacement."""
    draw = random.Random(seed)
    ratios = sorted(p99_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLED))
    low, high = (ratios[min(int(share * RESAMPLED), RESAMPLED - 1)] for share in MIDDLE)
    return low, high


def _p99(turns: Sequence[Gaps]) -> float:
    return float(np.quantile(np.concatenate(turns), 0.99, method="lower"))


def line_of(found: Row) -> str:
    low, high = cast(tuple[float, float], found["p99_ratio_95"])
    return (
        f"{found['pairs']} pairs of {found['seconds']} s: throughput {found['throughput_ratio']} of that with "
        f"--on-loss end, p99 between tokens {found['p99_ratio']} of it ({low} to {high} in 95 of 100)"
    )
