"""What clients notice when nodes are killed and stopped, in a real deployment under a steady load.

    python -m bench.faults [--quick] [--json] [--save]

nano on 2 attention and 3 expert nodes as real processes; greedy streams begin at a fixed rate. Each case breaks one
node after another, and between two faults looks at a moment in which nothing happens: the undisturbed stall beside it.
A stall is the longest wait for a token of a stream that was open at the moment. Every stream is compared with an
undisturbed one.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.faults_deployment import FOR_EVER, Deployment
from bench.faults_load import Load, altered, failed, milliseconds, percentile
from bench.origin import ROOT, origin
from bench.served import served

RESULTS = ROOT / "bench" / "results" / "faults.jsonl"
NODES = ("--attention", "2", "--experts", "3")
COPIES = ("--expert-copies", "2")
AROUND_S = 3.0  # throughput is counted over so long before a fault, and from BACK_S after it
BACK_S = 5.0
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of fault. `stopped` in seconds: None kills, FOR_EVER lasts longer than the case."""

    name: str
    role: str
    flags: tuple[str, ...]
    stopped: float | None = None
    rare: bool = False  # takes long: fewer of them


CASES = (
    Case("expert node killed, two copies", "expert", COPIES),
    Case("attention node killed", "attention", COPIES),
    Case("expert node killed, experts reloaded", "expert", ()),
    Case("expert node stopped for 1 s", "expert", COPIES, 1.0, rare=True),
    Case("expert node stopped for 10 s", "expert", COPIES, 10.0, rare=True),
    Case("expert node stopped for ever", "expert", COPIES, FOR_EVER, rare=True),
    Case("attention node stopped for 1 s", "attention", COPIES, 1.0, rare=True),
    Case("attention node stopped for 10 s", "attention", COPIES, 10.0, rare=True),
    Case("attention node stopped for ever", "attention", COPIES, FOR_EVER, rare=True),
)


@dataclass(slots=True)
class Seen:
    """Of all faults of a case: seconds, and tokens per second before and after."""

    stalls: list[float] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


async def play(case: Case, here: Deployment, faults: int, rate: float, tokens: int) -> Row:
    """All faults of one case under one load."""
    seen, load = Seen(), Load(here.url, rate, tokens)
    reference = await load.reference()
    async with load:
        await asyncio.sleep(AROUND_S)
        for turn in range(faults):
            quiet = time.monotonic()
            await asyncio.sleep(AROUND_S)
            at = time.monotonic()
            await _break_one(case, here, turn, seen)
            await asyncio.sleep(max(0.0, at + BACK_S + AROUND_S - time.monotonic()))
            seen.undisturbed += load.stalls(quiet)
            seen.stalls += load.stalls(at)
            seen.before.append(load.rate(at - AROUND_S, at))
            seen.after.append(load.rate(at + BACK_S, at + BACK_S + AROUND_S))
    status = here.status()
    return {
        "bench": "faults",
        "case": case.name,
        "faults": faults,
        "requests": len(load.answers),
        "tokens": tokens,
        "rate": rate,
        "failed": failed(load.answers),
        "altered": altered(load.answers, reference),
        "stall_p50_ms": milliseconds(percentile(seen.stalls, 0.5)),
        "stall_p99_ms": milliseconds(percentile(seen.stalls, 0.99)),
        "undisturbed_p50_ms": milliseconds(percentile(seen.undisturbed, 0.5)),
        "undisturbed_p99_ms": milliseconds(percentile(seen.undisturbed, 0.99)),
        "back_ms": milliseconds(statistics.median(seen.back)),
        "tokens_per_second": round(statistics.median(seen.before)),
        "throughput_after": round(sum(seen.after) / max(1e-9, sum(seen.before)), 3),
        "lost": sum(sum(causes.values()) for causes in status["lost"].values()),
    }


async def _break_one(case: Case, here: Deployment, turn: int, seen: Seen) -> None:
    """Returns when all nodes serve, in the process that was broken where that may go on."""
    nodes = {name: pid for name, pid in here.serving().items() if name.startswith(case.role)}
    name = sorted(nodes)[turn % len(nodes)]
    pid, began = nodes[name], time.monotonic()
    here.break_one(name, case.stopped)
    goes_on = case.stopped is not None and case.stopped < FOR_EVER
    if goes_on:
        await asyncio.sleep(case.stopped or 0.0)
    await here.wait_whole(None if goes_on else pid)
    seen.back.append(time.monotonic() - began)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for case in CASES:
        faults = max(1, options.faults // 4) if case.rare else options.faults
        if options.only and options.only not in case.name:
            continue
        with served(*NODES, *case.flags) as up:
            row = asyncio.run(play(case, Deployment(up), faults, options.rate, options.tokens))
        yield {**row, **origin()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--faults", type=int, default=20, help="of each case; a quarter where a node is stopped"
    )
    parser.add_argument("--quick", action="store_true", help="three faults of each case")
    parser.add_argument("--rate", type=float, default=4.0, help="requests that begin per second")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--json", action="store_true", help="rows instead of a table")
    parser.add_argument("--save", nargs="?", const=str(RESULTS), help="append rows to this file")
    options = parser.parse_args()
    if options.quick:
        options.faults = 3
    if not options.json:
        print(HEAD)
    for row in measure(options):
        print(json.dumps(row) if options.json else line_of(row), flush=True)
        if options.save:
            with open(options.save, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


HEAD = (
    f"{'case':<38} {'faults':>6} {'requests':>8} {'failed':>6} {'altered':>7} {'stall ms p50, p99':>18} "
    f"{'undisturbed':>14} {'back ms':>8} {'tokens/s':>8} {'after':>6}"
)


def line_of(row: Row) -> str:
    stall = f"{row['stall_p50_ms']:,} {row['stall_p99_ms']:,}"
    quiet = f"{row['undisturbed_p50_ms']:,} {row['undisturbed_p99_ms']:,}"
    return (
        f"{row['case']:<38} {row['faults']:>6} {row['requests']:>8} {row['failed']:>6} {row['altered']:>7} "
        f"{stall:>18} {quiet:>14} {row['back_ms']:>8} {row['tokens_per_second']:>8} {row['throughput_after']:>6}"
    )


if __name__ == "__main__":
    main()
