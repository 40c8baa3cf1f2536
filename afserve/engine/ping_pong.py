"""Whose turn it is: every micro-batch that can go on advances once; the others wait for expert nodes or for a device.

It knows neither requests nor blocks; what a micro-batch does in its turn is its own business.
"""

from collections.abc import Iterator, Sequence
from typing import Generic

from afserve.comm.m2n.link_contract import Link
from afserve.engine.draft.drafting import Drafting
from afserve.engine.micro_batch import MicroBatch
from afserve.engine.pace import Pace
from afserve.engine.scheduling.request import TokenEvent
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.step.host_reader import Fetch
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.meter import Meter
from afserve.engine.step.runner import T


class PingPong(Generic[T]):
    """Of `micro_batches`, whose `loops` yield what each waits for. `pace`: how many of them take turns, where that is
    found out."""

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch[T]],
        loops: Sequence[Iterator[T | Fetch | None]],
        link: Link[T],
        scheduler: Scheduler,
        meter: Meter,
        load: ExpertLoad,
        drafting: Drafting | None,
        pace: Pace | None,
    ) -> None:
        self._micro_batches, self._loops = micro_batches, loops
        self._link, self._scheduler, self._meter = link, scheduler, meter
        self._load, self._drafting, self._pace = load, drafting, pace
        self._tickets: list[T | Fetch | None] = [None] * len(micro_batches)

    def advance(self) -> bool:
        """Whether nothing came of it: none could go on, or what went on waits again."""
        stalled = True
        for index in filter(self._can_go_on, range(len(self._loops))):
            mine = self._micro_batches[index]
            before, start = mine.steps, self._meter.now()
            self._tickets[index] = next(self._loops[index])
            self._meter.ran(index, start)
            done = mine.steps > before
            if done:
                self._note(index, mine)
            stalled = stalled and not (done or mine.paused) and self._tickets[index] is None
        return stalled

    def _can_go_on(self, index: int) -> bool:
        ticket = self._tickets[index]
        if ticket is None:
            return self._scheduler.has_work(index)
        return ticket.copied.done() if isinstance(ticket, Fetch) else self._link.ready(ticket)

    def _note(self, index: int, mine: MicroBatch[T]) -> None:
        """A step has ended: drafts and pace go by what it took."""
        if self._drafting is not None and (ran := mine.ran) is not None:
            pool = ran.rows * self._link.called.take_others(index)
            ran = ran._replace(pool=pool, touched=self._load.touched(index))
            self._drafting.note_step(ran, self._meter.now)
        if self._pace is not None:
            tokens, running = sum(len(event.token_ids) for event in mine.events), self._scheduler.running
            self._pace.observe(self._meter.now(), tokens, running, decode_only=mine.decode_only)
            self._scheduler.active = self._pace.active

    def take_events(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for micro_batch in self._micro_batches:
            events += micro_batch.events
            micro_batch.events.clear()
        return events

    @property
    def steps(self) -> int:
        return sum(micro_batch.steps for micro_batch in self._micro_batches)

    @property
    def under_way(self) -> bool:
        """Whether rows are with the experts, or tokens on their way from a device."""
        return any(ticket is not None for ticket in self._tickets)

    def wait(self, timeout: float) -> bool:
        """Park until one can go on, at most `timeout` seconds; whether there was anything to wait for."""
        if fetch := next((t for t in self._tickets if isinstance(t, Fetch)), None):
            fetch.wait(timeout)
        elif tickets := [t for t in self._tickets if t is not None and not isinstance(t, Fetch)]:
            self._link.wait(tickets, timeout)
        else:
            return False
        return True
