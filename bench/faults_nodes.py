"""What clients notice when nodes of one host are killed and stopped, one after another, under a steady load.

Each case looks at a moment in which nothing happens before each fault: the undisturbed stall beside it.
"""

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from bench.faults_deployment import CONTROLLER, FOR_EVER, Deployment
from bench.faults_load import Load, altered, failed, milliseconds, percentile

NODES = ("--attention", "2", "--experts", "3")
COPIES = ("--expert-copies", "2")
AROUND_S = 3.0  # throughput is counted over so long before a fault, and from BACK_S after it
BACK_S = 5.0
PROVEN_S = 31.0  # a controller that has served for so long has no earlier losses
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of fault. `stopped` in seconds: None kills, FOR_EVER lasts longer than the case.

    `rare`: it takes long, and happens a quarter as often. `rest` in seconds lies between two faults. `resumes`:
    connections of clients break with it, and they go on by themselves.
    """

    name: str
    role: str
    flags: tuple[str, ...]
    stopped: float | None = None
    rare: bool = False
    rest: float = 0.0
    resumes: bool = False


CASES = (
    Case("expert node killed, two copies", "expert", COPIES),
    Case("attention node killed", "attention", COPIES),
    Case("expert node killed, experts reloaded", "expert", ()),
    Case("controller killed", CONTROLLER, (*COPIES, "--gateways", "1"), rest=PROVEN_S),
    Case("gateway killed, clients resume", "gateway", (*COPIES, "--gateways", "2"), resumes=True),
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
    seen, load = Seen(), Load(here.url, rate, tokens, resumes=case.resumes)
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
            if turn + 1 < faults:
                await asyncio.sleep(max(0.0, at + case.rest - time.monotonic()))
    status = here.status()
    return {
        "bench": "faults",
        "case": case.name,
        "faults": faults,
        "requests": len(load.answers),
        "tokens": tokens,
        "rate": rate,
        "failed": failed(load.answers),
        "errors": Counter(a.error for a in load.answers if a.error).most_common(3),
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


def line_of(row: Row) -> str:
    return (
        f"{row['case']:<40} {row['faults']:>3} faults, {row['requests']:>5} requests: {row['failed']} failed, "
        f"{row['altered']} altered; stall {row['stall_p50_ms']} ms, p99 {row['stall_p99_ms']}, undisturbed "
        f"{row['undisturbed_p50_ms']} and {row['undisturbed_p99_ms']}; back after {row['back_ms']} ms, at "
        f"{row['throughput_after']} of {row['tokens_per_second']} tokens/s"
    )
