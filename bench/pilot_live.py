"""A pilot that acts on real processes while the load grows, falls and changes its kind, and nodes are killed.

    python -m bench.pilot_live [--seconds 20] [--rounds 1] [--hold 6] [--kills] [--hosts] [--json] [--save]
    python -m bench.pilot_live --rounds 6 --seconds 9.2 --hold 3 --save       about 20 advices compared in 6 minutes
    python -m bench.pilot_live --hosts --kills --rounds 3 --seconds 11 --save       about 20 advices in 4 minutes

nano on nodes that read prompts, that decode and that hold experts; `--hosts`: on two network namespaces as hosts, whose
attention nodes do both. `--rounds`: all cases so often, one after the other. Two open loads of greedy streams run all
the time, one of long prompts and short answers, one the other way round; a case says how many requests a second each
begins. A change is followed once as many nodes serve as the pilot said. `--kills`: soon after each case
begins a node is killed, in one the controller, in which the pilot is. Every stream is compared with an undisturbed one.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from afserve.errors import AfserveError
from bench.cable import possible
from bench.faults_deployment import CONTROLLER, Deployment
from bench.faults_load import PROMPTS, Load, altered, failed, milliseconds, percentile
from bench.faults_networks import two_hosts
from bench.faults_nodes import Row
from bench.origin import ROOT, origin
from bench.served import served

OUT = ROOT / "bench" / "results" / "pilot_live.jsonl"
PILOT = ("--pilot", "act", "--expert-copies", "2", "--gateways", "1")
POOLS = ("--prefill", "1", "--decode", "1", "--experts", "2", "--most-attention", "8")
LONGEST = 100  # lines that a long prompt repeats
READ_TOKENS, ANSWER_TOKENS = 4, 128
POLL_S = 0.1
KILL_AT = 0.1  # of a case: in what is left of it pools follow, and what came of that is measured


@dataclass(frozen=True, slots=True)
class LoadCase:
    """Requests a second: with long prompts, and with long answers. `killed`: whose process, with --kills."""

    name: str
    prompts: float
    answers: float
    killed: str


CASES = (
    LoadCase("at first", 2.0, 4.0, "expert"),
    LoadCase("three times as many", 6.0, 12.0, "attention"),
    LoadCase("as at first", 2.0, 4.0, "expert"),
    LoadCase("mostly prompts", 16.0, 0.5, CONTROLLER),
    LoadCase("mostly answers", 0.5, 16.0, "attention"),
    LoadCase("as at first again", 2.0, 4.0, "expert"),
)
_POOLS = ("prefill", "decode", "attention", "experts")


@dataclass(frozen=True, slots=True)
class Moment:
    """What /status said: how often the pilot acted, the sizes it said last, those that serve."""

    at: float
    counts: Mapping[str, int]
    advised: Mapping[str, int]
    serving: Mapping[str, int]


@dataclass(slots=True)
class Watch:
    """Looks at the deployment all the time."""

    here: Deployment
    seen: list[Moment] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            with suppress(AfserveError):  # while a controller is being replaced nobody can say
                self.seen.append(moment(await asyncio.to_thread(self.here.status)))
            await asyncio.sleep(POLL_S)

    def changes(self, since: float, until: float) -> list[float | None]:
        """Of each change that was decided in that time, seconds until as many nodes served; None where they never did
        before the next one."""
        found: list[float | None] = []
        for number, (before, now) in enumerate(zip(self.seen, self.seen[1:], strict=False)):
            if since <= now.at < until and now.counts["acted"] > before.counts["acted"]:
                found.append(self._followed(number + 1))
        return found

    def _followed(self, number: int) -> float | None:
        decided = self.seen[number]
        for one in self.seen[number:]:
            if one.counts["acted"] != decided.counts["acted"]:
                return None
            if one.serving == decided.advised:
                return one.at - decided.at
        return None

    def advised(self) -> int:
        """Advices of all controllers."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return sum(max(0, now.counts["advised"] - before.counts["advised"]) for before, now in pairs)

    def compared(self) -> list[tuple[int, int]]:
        """(measurements that were compared with an interval, that lay in it) of each controller that compared any: each
        counts anew."""
        found, last = list[tuple[int, int]](), (0, 0)
        for one in self.seen:
            counts = one.counts["compared"], one.counts["held"]
            if counts[0] < last[0]:
                found.append(last)
            last = counts
        return [*found, last]


def moment(status: Mapping[str, Any]) -> Moment:
    """Raises AfserveError while no controller says anything of a pilot."""
    pilot = status["pilot"]
    if pilot is None:
        raise AfserveError("nobody says anything of a pilot")
    found = [
        pool_of(node["role"], node["phase"])
        for node in status["nodes"]
        if node["state"] == "ready" and node["role"] in ("attention", "expert")
    ]
    serving = {pool: found.count(pool) for pool in _POOLS if pool in found}
    return Moment(time.monotonic(), pilot["counts"], pilot["advised"], serving)


def pool_of(role: str, phase: str) -> str:
    if role == "expert":
        return "experts"
    return phase if phase in ("prefill", "decode") else "attention"


def prompts() -> tuple[str, ...]:
    return tuple(head * LONGEST for head in PROMPTS)


async def play(here: Deployment, seconds: float, kills: bool, rounds: int = 1) -> list[Row]:
    loads = (Load(here.url, 0.0, READ_TOKENS, prompts(), salted=True), Load(here.url, 0.0, ANSWER_TOKENS))
    references = [await load.reference() for load in loads]
    watch, spans = Watch(here), list[tuple[LoadCase, float, float, str]]()
    async with watched(watch), loads[0], loads[1]:
        for case in CASES * rounds:
            began = time.monotonic()
            loads[0].per_second, loads[1].per_second = case.prompts, case.answers
            await asyncio.sleep(KILL_AT * seconds)
            killed = await asyncio.to_thread(kill, here, case.killed) if kills else ""
            await asyncio.sleep((1 - KILL_AT) * seconds)
            spans.append((case, began, time.monotonic(), killed))
        for load in loads:
            load.per_second = 0.0
        await asyncio.sleep(5.0)  # what was decided last is followed
    compared = watch.compared()
    whole: Row = {
        "bench": "pilot_live",
        "requests": sum(len(load.answers) for load in loads),
        "failed": sum(failed(load.answers) for load in loads),
        "altered": sum(altered(load.answers, known) for load, known in zip(loads, references, strict=True)),
        "compared": sum(count for count, _ in compared),
        "held": sum(held for _, held in compared),
        "by_controller": compared,
        "kills": kills,
        "advised": watch.advised(),
        "rounds": rounds,
    }
    return [
        {**whole, "round": number // len(CASES) + 1, **_row(watch, loads, *span)}
        for number, span in enumerate(spans)
    ]


def _row(watch: Watch, loads: Sequence[Load], case: LoadCase, since: float, until: float, killed: str) -> Row:
    took = watch.changes(since, until)
    inside = [one for one in watch.seen if since <= one.at < until]
    most = {pool: max(one.serving.get(pool, 0) for one in inside) for pool in inside[-1].serving}
    gaps = [gap for load in loads for gap in load.gaps(since, until)]
    return {
        "case": case.name,
        "prompts_per_s": case.prompts,
        "answers_per_s": case.answers,
        "killed": killed,
        "first": dict(inside[0].serving),
        "most": most,
        "last": dict(inside[-1].serving),
        "changes": len(took),
        "followed_s": [None if one is None else round(one, 2) for one in took],
        "gap_p50_ms": milliseconds(percentile(gaps, 0.5)),
        "gap_p99_ms": milliseconds(percentile(gaps, 0.99)),
    }


@asynccontextmanager
async def watched(watch: Watch) -> AsyncIterator[None]:
    looking = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        looking.cancel()


def kill(here: Deployment, what: str) -> str:
    """The newest node of that kind; its name."""
    if what == CONTROLLER:
        here.break_one(CONTROLLER, None)
        return CONTROLLER
    names = [name for name in here.model_nodes() if name.startswith(what)]
    return max(names) if here.fault(max(names), "kill", 0.0) else ""


def line_of(row: Row) -> str:
    killed = f"; {row['killed']} was killed" if row["killed"] else ""
    return (
        f"{row['case']:<20} {row['prompts_per_s']} + {row['answers_per_s']} a second: {row['first']} to {row['last']}, "
        f"at most {row['most']}; {row['changes']} changes, followed after {row['followed_s']} s; gap p50 "
        f"{row['gap_p50_ms']} ms, p99 {row['gap_p99_ms']}{killed}; in all {row['failed']} failed and {row['altered']} "
        f"altered of {row['requests']}, {row['held']} of {row['compared']} intervals held"
    )


@contextmanager
def deployment(hosts: bool, hold: float) -> Iterator[Deployment]:
    flags = (*PILOT, "--pilot-hold", f"{hold:g}")
    if hosts:
        with two_hosts(*flags) as (here, _):
            yield here
    else:
        with served(*flags, *POOLS) as up, Deployment(up) as here:
            yield here


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pilot_live", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--rounds", type=int, default=1, help="so often all cases")
    parser.add_argument("--hold", type=float, default=6.0, help="--pilot-hold, in seconds")
    parser.add_argument("--kills", action="store_true", help="a process is killed in each case")
    parser.add_argument("--hosts", action="store_true", help="on two network namespaces as hosts")
    parser.add_argument("--json", action="store_true", help="rows instead of lines")
    parser.add_argument("--save", action="store_true", help=f"append rows to {OUT.relative_to(ROOT)}")
    asked = parser.parse_args()
    if asked.hosts and not possible():
        parser.error("--hosts: needs Linux, root, ip(8) and /dev/net/tun")
    with deployment(asked.hosts, asked.hold) as here:
        rows = asyncio.run(play(here, asked.seconds, asked.kills, asked.rounds))
    for row in rows:
        row |= {"hosts": 2 if asked.hosts else 1, "hold": asked.hold}
        print(json.dumps(row) if asked.json else line_of(row), flush=True)
        if asked.save:
            with OUT.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **origin()}) + "\n")


if __name__ == "__main__":
    main()
