"""What survives: processes of one host lost alone, together and during changes, or stopped, one case after another.

Each case has a few greedy streams that begin anew as they end. Busy loops beside it stand for other work of the host.
A run that has ended is started again for the next case.
"""

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from afserve.doors.client import Client
from afserve.errors import AfserveError
from bench.busy import busy_loops
from bench.faults_deployment import CONTROLLER, Deployment
from bench.faults_load import PROMPTS, Load, altered, failed
from bench.faults_nodes import Row
from bench.served import served

TRANSPORTS = ("shm", "tcp", "dist", "pairs")
NODES = ("--prefill", "1", "--decode", "2", "--experts", "3", "--gateways", "2", "--kv-copies", "1")
STREAMS, TOKENS = 6, 96
FORK_SERVER, ALL = "fork-server", "*"
BEGUN_S, WHOLE_S, AFTER_S = 60.0, 300.0, 1.0
Change = Callable[[Client], object]


@dataclass(frozen=True, slots=True)
class Survived:
    """`lost` gets the signal at once, while `change` is under way; a stopped one goes on after `stopped` seconds.

    Names are those of nodes, controller, fork server, or ALL. `resumes`: connections of clients break with it.
    """

    name: str
    lost: tuple[str, ...]
    number: signal.Signals = signal.SIGKILL
    stopped: float = 0.0
    change: Change | None = None
    resumes: bool = False


def _stops(name: str, lost: tuple[str, ...], seconds: float) -> Survived:
    return Survived(f"{name} stopped for {seconds:g} s", lost, signal.SIGSTOP, seconds)


EXPERTS, ATTENTION = ("expert-0", "expert-1", "expert-2"), ("attention-0", "attention-1", "attention-2")
CASES = (
    Survived("expert killed", ("expert-0",)),
    Survived("decode node killed", ("attention-1",)),
    Survived("prefill node killed", ("attention-0",)),
    Survived("expert ended by SIGTERM", ("expert-1",), signal.SIGTERM),
    Survived("decode node ended by SIGTERM", ("attention-2",), signal.SIGTERM),
    _stops("expert", ("expert-0",), 0.5),
    _stops("expert", ("expert-1",), 3.0),
    _stops("decode node", ("attention-1",), 3.0),
    _stops("controller", (CONTROLLER,), 3.2),
    _stops("everything", (ALL,), 2.5),
    _stops("expert", ("expert-2",), 30.0),
    _stops("decode node", ("attention-2",), 30.0),
    Survived("controller killed", (CONTROLLER,)),
    Survived("controller ended by SIGTERM", (CONTROLLER,), signal.SIGTERM),
    Survived("two experts killed", EXPERTS[:2]),
    Survived("all experts killed", EXPERTS),
    Survived("expert and decode node killed", ("expert-0", "attention-1")),
    Survived("both decode nodes killed", ATTENTION[1:]),
    Survived("all attention nodes killed", ATTENTION),
    Survived("controller and expert killed", (CONTROLLER, "expert-1")),
    Survived("fork server killed", (FORK_SERVER,)),
    Survived("fork server ended by SIGTERM", (FORK_SERVER,), signal.SIGTERM),
    Survived("fork server and expert killed", (FORK_SERVER, "expert-0")),
    Survived("fork server and controller killed", (FORK_SERVER, CONTROLLER)),
    Survived("fork server, controller and decode node killed", (FORK_SERVER, CONTROLLER, "attention-1")),
    _stops("fork server", (FORK_SERVER,), 10.0),
    Survived("gateway killed, clients resume", ("gateway-0",), resumes=True),
    Survived("expert killed during scale +1", ("expert-1",), change=lambda c: c.scale(experts="+1")),
    Survived("fork server killed during scale -1", (FORK_SERVER,), change=lambda c: c.scale(experts="-1")),
    Survived("controller killed after both", (CONTROLLER,)),
    Survived("controller killed during a drain", (CONTROLLER,), change=lambda c: c.drain("attention-2")),
    Survived("decode node comes back", (), change=lambda c: c.scale(decode="+1")),
    Survived("expert killed during restart of all", ("expert-2",), change=lambda c: c.restart()),
)  # fmt: skip


class SteadyLoad(Load):
    """So many streams at a time."""

    def __init__(self, url: str, streams: int, tokens: int, *, resumes: bool = False) -> None:
        super().__init__(url, 0.0, tokens, resumes=resumes)
        self._places = asyncio.Semaphore(streams)

    async def _ask(self) -> None:
        for prompt in itertools.cycle(PROMPTS):
            await self._places.acquire()
            self._begin(prompt).add_done_callback(lambda _: self._places.release())


def table(transports: Sequence[str], loops: int, only: str) -> Iterator[Row]:
    """Every case on every transport."""
    for transport in transports:
        left = [case for case in CASES if only in case.name]
        while left:
            try:
                yield from _rows(transport, loops, left)
            except RuntimeError as error:
                print(f"{transport}: {error}", file=sys.stderr, flush=True)
                left = left[1:]


def _rows(transport: str, loops: int, left: list[Survived]) -> Iterator[Row]:
    """Until the run ends; cases that were played are taken out of `left`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (*NODES, "--transport", transport, "--rebalance", "auto", "--kv-ssd", f"{folder}/kv")
        with (
            served(*flags, "--state-dir", f"{folder}/state") as up,
            Deployment(up) as here,
            busy_loops(loops),
        ):
            while left and up.process.poll() is None:
                found = asyncio.run(play(left[0], here))
                yield {"bench": "faults_survival", "transport": transport, "busy": loops, **found}
                left.pop(0)


async def play(case: Survived, here: Deployment) -> Row:
    load = SteadyLoad(here.url, STREAMS, TOKENS, resumes=case.resumes)
    reference = await load.reference()
    async with load:
        await _until(lambda: sum(len(answer.times) > 2 for answer in load.answers) >= STREAMS, BEGUN_S)
        at, before = time.monotonic(), here.serving()
        change = _begun(case.change, here.client)
        lost = await _break(case, here)
        if change is not None:
            await asyncio.wait([change], timeout=WHOLE_S)
        whole = await _until(lambda: _is_whole(here, lost), WHOLE_S)
        done = time.monotonic()
        await asyncio.sleep(AFTER_S)
    gaps = load.stalls(at, done + AFTER_S - at)
    return {
        "case": case.name,
        "requests": len(load.answers),
        "failed": failed(load.answers),
        "errors": Counter(a.error for a in load.answers if a.error).most_common(3),
        "altered": altered(load.answers, reference),
        "longest_gap_s": round(max(gaps, default=0.0), 2),
        "whole_s": round(done - at, 2) if whole else None,
        "missing": [] if whole else sorted(set(before) - set(_serving(here))),
        "load": round(os.getloadavg()[0], 1),
    }


def _begun(change: Change | None, client: Client) -> "asyncio.Future[object] | None":
    """A change may be refused because of what is lost meanwhile; that is no failure of a stream."""

    def make() -> object:
        with suppress(AfserveError):
            return change(client) if change is not None else None
        return None

    return None if change is None else asyncio.ensure_future(asyncio.to_thread(make))


async def _break(case: Survived, here: Deployment) -> set[int]:
    """The pids that are to be followed by others."""
    serving = {**here.serving(), FORK_SERVER: here.fork_server()}
    family = [process.pid for process in psutil.Process(here.up.process.pid).children(recursive=True)]
    pids = family if case.lost == (ALL,) else [serving[name] for name in case.lost]
    _signal(pids, case.number)
    if case.number is not signal.SIGSTOP:
        return {pid for pid in pids if pid != serving[FORK_SERVER]}
    await asyncio.sleep(case.stopped)
    _signal(pids, signal.SIGCONT)
    return set()


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_whole(here: Deployment, lost: set[int]) -> bool:
    found = here.whole()
    return found is not None and not lost & set(found) and here.fork_server() != 0


def _serving(here: Deployment) -> dict[str, int]:
    try:
        return here.serving()
    except (AfserveError, StopIteration, psutil.Error):
        return {}


async def _until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it held within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if await asyncio.to_thread(holds):
            return True
        await asyncio.sleep(0.05)
    return False


def line_of(row: Row) -> str:
    missing = f"; MISSING {row['missing']}" if row["whole_s"] is None else f"; whole after {row['whole_s']} s"
    return (
        f"{row['transport']:<6} load {row['load']:>5}: {row['case']:<48} {row['requests']:>4} requests: "
        f"{row['failed']} failed, {row['altered']} altered, longest gap {row['longest_gap_s']} s{missing}"
    )
