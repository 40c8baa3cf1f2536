"""A model that sleeps: requests wait for it, no more and no longer than they may, and learn why it does not come."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import pytest

from afserve.clock import FakeClock
from afserve.control.admission import Objectives
from afserve.control.wire.change_values import ScaleTo
from afserve.engine.scheduling.request import AHEAD_PRIORITY, GenerationRequest, SamplingParams, TokenEvent
from afserve.errors import DoesNotFitError, OverloadedError, UnavailableError
from afserve.launch.run import sleeping
from afserve.launch.run.model_run import CurrentRun
from afserve.launch.run.sleeping import Sleep

ASKED = GenerationRequest(1, (1, 2, 3), SamplingParams())


@dataclass
class Answer:
    """Three tokens, and what was done with it."""

    done: list[str] = field(default_factory=list)

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        try:
            for token in (7, 8, 9):
                yield TokenEvent(1, (token,), finish_reason="stop" if token == 9 else None)
        finally:
            self.done.append("closed")

    def halt(self) -> None:
        self.done.append("halted")

    discard = leave = halt


@dataclass
class Nodes:
    """A frontend of a run that is ready."""

    model: object = None
    is_ready: bool = True
    requests: int = 0
    opened: list[Answer] = field(default_factory=list)

    def ready(self) -> bool:
        return self.is_ready

    def check(self) -> None:
        raise UnavailableError("the server is stopping")

    def open(self, request, keep=None, taker=None) -> Answer:
        self.opened.append(Answer())
        return self.opened[-1]


@dataclass
class Named:
    name: str = "small"


async def tokens(opened) -> list[int]:
    return [token async for event in opened.events() for token in event.token_ids]


def test_requests_wait_and_are_answered_by_the_next_run():
    async def play():
        before, after = Nodes(Named()), Nodes(Named())
        backend = CurrentRun(before)
        sleep = backend.sleep(0.0)
        assert backend.ready() and backend.check() is None, "it takes requests"
        assert not sleep.asked.is_set()
        waiting = [asyncio.create_task(tokens(backend.open(ASKED))) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert sleep.asked.is_set() and sleep.held == 3 and not any(one.done() for one in waiting)
        backend.follow(after)
        backend.wake()
        assert await asyncio.gather(*waiting) == [[7, 8, 9]] * 3
        assert not before.opened and [one.done for one in after.opened] == [["closed"]] * 3
        assert await tokens(backend.open(ASKED)) == [7, 8, 9], "and later ones at once"

    asyncio.run(play())


def test_a_client_that_leaves_leaves_nothing_behind():
    async def play():
        nodes = Nodes(Named())
        backend = CurrentRun(nodes)
        sleep = backend.sleep(0.0)
        opened = backend.open(ASKED)
        waiting = asyncio.create_task(tokens(opened))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        opened.discard()
        assert sleep.held == 0
        backend.wake()
        assert not nodes.opened

    asyncio.run(play())


def test_who_waits_learns_why_it_does_not_come():
    async def play():
        backend = CurrentRun(Nodes(Named()))
        backend.sleep(0.0)
        waiting = asyncio.create_task(tokens(backend.open(ASKED)))
        await asyncio.sleep(0.01)
        backend.wake(DoesNotFitError("small needs 40 GiB"))
        with pytest.raises(DoesNotFitError, match="40 GiB"):
            await waiting
        with pytest.raises(UnavailableError, match="stopping"):
            backend.check()

    asyncio.run(play())


def test_nobody_waits_for_ever_and_not_too_many_do(monkeypatch):
    monkeypatch.setattr(sleeping, "MOST_HELD", 2)

    async def play():
        sleep = Sleep("small", 4.0, limit=0.05)
        nodes = Nodes()
        waiting = [
            asyncio.create_task(tokens(sleep.hold(lambda frontend: frontend.open(ASKED)))) for _ in range(2)
        ]
        await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match="2 requests wait") as refused:
            sleep.hold(lambda frontend: frontend.open(ASKED))
        assert refused.value.retry_after == 4.0
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, UnavailableError) and "within 0.05 s" in one.message
        assert sleep.held == 0 and not nodes.opened

    asyncio.run(play())


@pytest.mark.parametrize(
    ("wanted", "refused"),
    [
        (Objectives(ttft=2.0), True),
        (Objectives(deadline=2.0), True),
        (Objectives(ttft=5.0, deadline=2.0), True),
        (Objectives(ttft=5.0), False),
        (Objectives(), False),
    ],
)
def test_what_would_be_too_late_is_refused_and_starts_it_nevertheless(wanted, refused):
    async def play():
        sleep = Sleep("small", 4.0)
        if refused:
            with pytest.raises(OverloadedError, match=r"took 4\.0 s"):
                sleep.admit(wanted)
        else:
            sleep.admit(wanted)
        assert sleep.asked.is_set()

    asyncio.run(play())


def test_it_may_sleep_only_where_nothing_runs_and_nobody_asked():
    clock = FakeClock(100.0)

    async def play():
        nodes = Nodes(Named())
        backend = CurrentRun(nodes, clock)
        clock.advance(30)
        assert backend.idle_seconds() == 30
        nodes.requests = 1
        assert backend.idle_seconds() == 0
        nodes.requests, nodes.is_ready = 0, False
        assert backend.idle_seconds() == 0
        nodes.is_ready = True
        backend.open(ASKED)
        assert backend.idle_seconds() == 0
        backend.sleep(0.0)
        clock.advance(30)
        assert backend.idle_seconds() == 0, "it sleeps already"
        with pytest.raises(UnavailableError, match="sleeps"):
            await backend.change(ScaleTo({"attention": "2"}))
        assert "sleeps" in (await backend.view()).absent[0] and not await backend.find("r", take=True)

    asyncio.run(play())


def test_what_is_computed_ahead_keeps_no_model_awake_and_wakes_none():
    clock, ahead = FakeClock(100.0), replace(ASKED, priority=AHEAD_PRIORITY)

    async def play():
        nodes = Nodes(Named())
        backend = CurrentRun(nodes, clock)
        clock.advance(30)
        backend.open(ahead)
        assert len(nodes.opened) == 1 and backend.idle_seconds() == 30
        sleep = backend.sleep(0.0)
        with pytest.raises(UnavailableError, match="small sleeps"):
            backend.open(ahead)
        assert not sleep.asked.is_set() and sleep.held == 0

    asyncio.run(play())
