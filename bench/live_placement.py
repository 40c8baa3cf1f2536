"""Placements that change under load: what clients notice, and how soon a switch of domain is balanced again.

    python -m bench.live_placement [--quick] [--json] [--save]

nano on 2 attention and 3 expert nodes with redundant experts; source code is asked for, then prose. Runs without
rebalancing, with a new placement every second and with the rebalancer's own judgement take turns.
"""

import argparse
import asyncio
import json
import math
import statistics
import time
from dataclasses import dataclass, field

import httpx

from afserve.placement.rebalance.rebalancer import RebalanceRules
from bench.live_load import Answers, domains, steady
from bench.origin import ROOT, origin
from bench.placement import table_of
from bench.served import Served, served

RESULTS = ROOT / "bench" / "results" / "live_placement.jsonl"
UP = ("--attention", "2", "--experts", "3", "--redundant-experts", "6")
MODES = ("off", "1", "auto")
TOP_K, EXPERT_NODES, WINDOW_S = 4, 3, 1.44  # a half-life of 1 s remembers 1.44 s of rows
HELD_S = 1.0  # balance counts as recovered when it is within the limit for so long
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """Seconds of each domain, runs per mode, and the load: streams and tokens of each answer."""

    phase_s: float
    repeats: int
    streams: int = 8
    tokens: int = 64


@dataclass(slots=True)
class Played:
    """One run. `balance`: (seconds since the switch, mean over layers of max / mean)."""

    heard: Answers = field(default_factory=Answers)
    balance: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    epochs: int = 0
    moves: int = 0

    @property
    def limit(self) -> float:
        """From where the rebalancer acts, with as many rows as its fastest window held."""
        rules = RebalanceRules()
        rows = self.heard.tokens / self.seconds * WINDOW_S * TOP_K / EXPERT_NODES / rules.burst
        return rules.enter + math.sqrt(2 * math.log(EXPERT_NODES) / rows)

    def recovered(self) -> float:
        """Seconds from the switch to balance that holds, 0 if it never left; the whole phase if it never came."""
        after = [(t, value) for t, value in self.balance if t > 0]
        for begin, _ in [(0.0, 0.0), *after]:
            window = [value for t, value in after if begin <= t <= begin + HELD_S]
            if window and statistics.fmean(window) <= self.limit:
                return begin
        return after[-1][0]

    def mean_balance(self) -> float:
        """Over the second half of the phase after the switch."""
        last = self.balance[-1][0]
        return statistics.fmean(value for t, value in self.balance if t > last / 2)


async def play(here: Served, case: Case, pools: dict[str, list[str]]) -> Played:
    """Some seconds that do not count, then one domain, then the other."""
    played, (first, second), url = Played(), pools.values(), here.url
    await steady(url, first[:8], case.phase_s / 4, case.streams, case.tokens, Answers())
    start = time.monotonic()
    watching = asyncio.create_task(_watch(here, start + case.phase_s, played))
    for prompts in (first, second):
        await steady(url, prompts, case.phase_s, case.streams, case.tokens, played.heard)
    played.seconds = time.monotonic() - start
    watching.cancel()
    return played


async def _watch(here: Served, switch: float, played: Played) -> None:
    async with httpx.AsyncClient(base_url=here.url, headers=here.admin) as client:
        while True:
            status = (await client.get("/status")).json()
            played.balance.append((time.monotonic() - switch, statistics.fmean(status["balance"])))
            played.epochs, played.moves = status["epoch"], status["moves"]
            await asyncio.sleep(0.25)


def measure(case: Case) -> list[Row]:
    pools = domains()
    runs: dict[str, list[Played]] = {mode: [] for mode in MODES}
    for repeat in range(case.repeats):
        for mode in MODES if repeat % 2 == 0 else reversed(MODES):
            with served(*UP, "--rebalance", mode) as here:
                runs[mode].append(asyncio.run(play(here, case, pools)))
    return [_row(mode, runs[mode], runs["off"]) for mode in MODES]


def _row(mode: str, runs: list[Played], off: list[Played]) -> Row:
    p99 = [
        run.heard.percentile(0.99) / peer.heard.percentile(0.99) for run, peer in zip(runs, off, strict=True)
    ]
    p50 = [
        run.heard.percentile(0.5) / peer.heard.percentile(0.5) for run, peer in zip(runs, off, strict=True)
    ]
    rate = [run.heard.tokens / run.seconds for run in runs]
    same, compared = _alike(runs, off)
    return {
        "bench": "live", "rebalance": mode, "repeats": len(runs), "phase_s": round(runs[0].balance[-1][0], 1),
        "tok_s": statistics.median(rate), "tok_s_spread": max(rate) - min(rate),
        "itl_p50_ms": 1e3 * statistics.median(run.heard.percentile(0.5) for run in runs),
        "itl_p99_ms": 1e3 * statistics.median(run.heard.percentile(0.99) for run in runs),
        "p50_ratio": statistics.median(p50), "p99_ratio": statistics.median(p99),
        "p99_ratio_min": min(p99), "p99_ratio_max": max(p99),
        "failed": sum(run.heard.failed for run in runs), "texts_alike": same, "texts": compared,
        "epochs": statistics.median(run.epochs for run in runs), "moves": statistics.median(run.moves for run in runs),
        "balance": statistics.median(run.mean_balance() for run in runs),
        "peak": max(value for run in runs for t, value in run.balance if t > 0),
        "limit": statistics.median(run.limit for run in runs),
        "recovered_s": statistics.median(run.recovered() for run in runs),
        "recovered_s_max": max(run.recovered() for run in runs),
    }  # fmt: skip


def _alike(runs: list[Played], off: list[Played]) -> tuple[int, int]:
    """(prompts whose every answer in every run was that of the runs without rebalancing, prompts compared)."""
    said: dict[str, set[str]] = {}
    for run in [*runs, *off]:
        for prompt, answers in run.heard.texts.items():
            said.setdefault(prompt, set()).update(answers)
    return sum(len(answers) == 1 for answers in said.values()), len(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.live_placement", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short run of each: works, proves little")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    case = Case(phase_s=8.0, repeats=1) if options.quick else Case(phase_s=20.0, repeats=5)
    rows = [row | origin() for row in measure(case)]
    print("\n".join(map(json.dumps, rows)) if options.json else table_of(rows))
    if options.save:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
