"""What clients notice while nodes are added, removed, given another role and restarted, one change after another.

Each change begins once the one before is over. A stall is the longest wait for a token of a stream that ran during it.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from afserve.doors.client import Client
from bench.faults_deployment import WHOLE_S, Deployment
from bench.faults_load import Load, altered, failed, milliseconds, percentile
from bench.faults_nodes import Row

QUIET_S = 3.0
AFTER_S = 1.0  # of every change: what comes late still belongs to it
FLAGS = ("--redundant-experts", "32")
Change = Callable[[Client], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChangeCase:
    name: str
    begin: Change


CASES = (
    ChangeCase("attention node added", lambda client: client.scale(attention="+1")),
    ChangeCase("attention node removed", lambda client: client.drain("attention-0")),
    ChangeCase("expert node added", lambda client: client.scale(experts="+1")),
    ChangeCase("expert node removed", lambda client: client.scale(experts="-1")),
    ChangeCase("expert node becomes an attention node", lambda client: client.change_role("expert-2", "attention")),
    ChangeCase("attention node becomes an expert node", lambda client: client.change_role("attention-0", "expert")),
    ChangeCase("all nodes restarted, one after another", lambda client: client.restart()),
)  # fmt: skip


@dataclass(slots=True)
class Seen:
    """Of all changes of one kind, in seconds."""

    stalls: list[float] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)


async def play(here: Deployment, turns: int, rate: float, tokens: int) -> list[Row]:
    """All changes, `turns` times in a row; the last one leaves what the first one found."""
    load, seen = Load(here.url, rate, tokens), {case.name: Seen() for case in CASES}
    reference = await load.reference()
    async with load:
        await asyncio.sleep(QUIET_S)
        for _ in range(turns):
            for case in CASES:
                quiet = time.monotonic()
                await asyncio.sleep(QUIET_S)
                at, before = time.monotonic(), here.serving()
                begun = await asyncio.to_thread(case.begin, here.client)
                await _wait_done(here, begun, before)
                done = time.monotonic()
                await asyncio.sleep(AFTER_S)
                found = seen[case.name]
                found.took.append(done - at)
                found.undisturbed += load.stalls(quiet, QUIET_S)
                found.stalls += load.stalls(at, done + AFTER_S - at)
    return [_row(name, found, load, reference, turns) for name, found in seen.items()]


async def _wait_done(here: Deployment, begun: Mapping[str, Any], before: Mapping[str, int]) -> None:
    """Until all that come serve, in another process than `before`, and all that go are gone."""
    until = time.monotonic() + WHOLE_S
    while time.monotonic() < until:
        nodes = (await asyncio.to_thread(here.status))["nodes"]
        pids = {node["name"]: node["pid"] for node in nodes if node["state"] == "ready"}
        come = all(pids.get(name, before.get(name)) != before.get(name) for name in begun["coming"])
        going = {node["name"] for node in nodes} & set(begun["going"]) - set(begun["coming"])
        if come and not going:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"a change was not over within {WHOLE_S:.0f} s: {here.status()['nodes']}")


def _row(name: str, found: Seen, load: Load, reference: dict[str, str], turns: int) -> Row:
    return {
        "bench": "faults_changes",
        "case": name,
        "turns": turns,
        "requests": len(load.answers),
        "failed": failed(load.answers),
        "altered": altered(load.answers, reference),
        "stall_p50_ms": milliseconds(percentile(found.stalls, 0.5)),
        "stall_max_ms": milliseconds(max(found.stalls, default=0.0)),
        "undisturbed_p50_ms": milliseconds(percentile(found.undisturbed, 0.5)),
        "undisturbed_max_ms": milliseconds(max(found.undisturbed, default=0.0)),
        "took_ms": milliseconds(statistics.median(found.took)),
    }


def line_of(row: Row) -> str:
    return (
        f"{row['case']:<40} {row['turns']:>3} times, {row['requests']:>5} requests in all: {row['failed']} failed, "
        f"{row['altered']} altered; stall {row['stall_p50_ms']} ms, at most {row['stall_max_ms']}, undisturbed "
        f"{row['undisturbed_p50_ms']} and {row['undisturbed_max_ms']}; done after {row['took_ms']} ms"
    )
