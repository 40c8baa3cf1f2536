"""What attention nodes keep, scripted: answers that any of several servers may go on with."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from afserve.control.questions import GivenAwayError
from afserve.control.wire.keeping import Keep
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.engine.scheduling.routed_experts import joined


class Answer:
    """One sequence at its node. `owner` is who has opened it last; what was said to it is in `said`."""

    def __init__(self, request: GenerationRequest, keep: Keep) -> None:
        self.request, self.keep = request, keep
        self.events: list[TokenEvent] = []
        self.owner: Opened | None = None
        self.halted = False


class Nodes:
    """By id and choice; shared by the servers of a test. `unheard`: what they say that no gateway was told."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], Answer] = {}
        self.unheard = 0


class Opened:
    def __init__(self, backend, answer: Answer) -> None:
        self.backend, self.answer = backend, answer
        answer.owner = self

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        answer = self.answer
        if answer.events:
            yield merged(answer.events)
            if answer.events[-1].finish_reason is not None:
                return
        while True:
            event = await self.next()
            yield event
            if event.finish_reason is not None:
                return

    async def next(self) -> TokenEvent:
        done = sum(len(event.token_ids) for event in self.answer.events)
        while self.backend.hold_at is not None and done >= self.backend.hold_at:
            self.backend.holding.set()
            if self.backend.release.is_set():
                break
            await self.check()
        await self.check()
        request = self.answer.request
        event = await self.backend.event_at(request, done, self.backend.answer_to(request))
        self.answer.events.append(event)
        return event

    async def check(self) -> None:
        await asyncio.sleep(0.002)
        if self.answer.owner is not self:
            raise GivenAwayError

    def halt(self) -> None:
        self.answer.halted = True

    def discard(self) -> None:
        if self.answer.owner is self:
            self.backend.nodes_kept.answers.pop((self.answer.keep.id, self.answer.keep.choice), None)
            self.backend.closed.append(self.answer.request)
            self.backend.ended.set()

    def leave(self) -> None:
        """It stays where it is."""


class Found:
    def __init__(self, backend, answer: Answer) -> None:
        self.backend, self.answer = backend, answer
        self.about, self.choice, self.choices = answer.keep.about, answer.keep.choice, answer.keep.choices
        self.prompt_ids = answer.request.prompt_ids
        self.count = sum(len(event.token_ids) for event in answer.events)
        self.unheard = self.backend.nodes_kept.unheard
        self.ended = answer.halted or bool(answer.events and answer.events[-1].finish_reason)

    def open(self, request: GenerationRequest) -> Opened:
        assert request.params == self.answer.request.params
        return Opened(self.backend, self.answer)


def merged(events: list[TokenEvent]) -> TokenEvent:
    """As a node tells it again."""
    return replace(
        events[-1],
        token_ids=tuple(token for event in events for token in event.token_ids),
        logprobs=tuple(score for event in events for score in event.logprobs),
        prompt_logprobs=events[0].prompt_logprobs,
        cached_tokens=events[0].cached_tokens,
        routed=joined(event.routed for event in events if event.routed is not None),
    )
