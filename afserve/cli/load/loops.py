"""The two ways to put load on a server, and what the client itself costs meanwhile.

Closed: so many requests are always open; the next goes out when one ends. Open: requests go out when they are due.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

from afserve.cli.load.asks import PATHS, Ask, RequestForm
from afserve.cli.load.connection import ConnectionPool
from afserve.cli.load.heard import Heard

_TICK = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is run. `times` None: closed, with `streams` open at once. `most` None: until `seconds` have gone by.

    In both, no new request goes out after `seconds`; those that are open come to their end. `hears`: what keeps of an
    answer what the caller wants of it.
    """

    form: RequestForm
    asks: Iterator[Ask]
    streams: int = 1
    times: Iterable[float] | None = None
    most: int | None = None
    seconds: float | None = None
    timeout: float = 600.0
    hears: type[Heard] = Heard


@dataclass(slots=True)
class Ran:
    """What was heard, in the order of sending, and the client's own part in it.

    `cpu` are seconds of this process's CPU time. `lags` are how much later than asked for a timer of 20 ms came: so
    much later may the client have seen a piece than it arrived.
    """

    heard: list[Heard] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    lags: list[float] = field(default_factory=list)


Watch = Callable[[Ran], None]  # called now and then


async def run(plan: LoadPlan, connections: ConnectionPool, watch: Watch = lambda ran: None) -> Ran:
    """Every request that was sent has an outcome at the end."""
    ran, cpu, began = Ran(), time.process_time(), perf_counter()
    ticking = asyncio.create_task(_tick(ran, watch))
    try:
        if plan.times is None:
            await _closed(plan, connections, ran, began)
        else:
            await _open(plan, plan.times, connections, ran, began)
    finally:
        ticking.cancel()
    ran.seconds, ran.cpu = perf_counter() - began, time.process_time() - cpu
    return ran


async def _closed(plan: LoadPlan, connections: ConnectionPool, ran: Ran, began: float) -> None:
    asks = islice(plan.asks, plan.most)

    async def stream() -> None:
        for ask in asks:
            if plan.seconds is not None and perf_counter() - began >= plan.seconds:
                return
            await _one(plan, connections, ran, ask, perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.streams):
            group.create_task(stream())


async def _open(
    plan: LoadPlan, times: Iterable[float], connections: ConnectionPool, ran: Ran, began: float
) -> None:
    async with asyncio.TaskGroup() as group:
        for at, ask in islice(zip(times, plan.asks, strict=False), plan.most):
            if plan.seconds is not None and at >= plan.seconds:
                return
            due = began + at
            if (pause := due - perf_counter()) > 0:
                await asyncio.sleep(pause)
            group.create_task(_one(plan, connections, ran, ask, due))


async def _one(plan: LoadPlan, connections: ConnectionPool, ran: Ran, ask: Ask, due: float) -> None:
    heard = plan.hears(due, ask.output)
    ran.heard.append(heard)
    await connections.send_and_hear(
        PATHS[plan.form.endpoint], plan.form.request_body(ask), heard, plan.timeout
    )


async def _tick(ran: Ran, watch: Watch) -> None:
    last = perf_counter()
    while True:
        await asyncio.sleep(_TICK)
        now = perf_counter()
        ran.lags.append(max(0.0, now - last - _TICK))
        watch(ran)
        last = perf_counter()
