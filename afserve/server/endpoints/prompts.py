"""Endpoints that compute prompts and say something of each, without an answer that is read token by token."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from afserve.engine.scheduling.request import TokenEvent
from afserve.errors import AfserveError, ProtocolError
from afserve.server.access.accounts import account_of
from afserve.server.answers.answering import Watched, within
from afserve.server.answers.generation import Task
from afserve.server.answers.hosted import Hosted
from afserve.server.answers.writer import Whole
from afserve.server.bodies.prepared import Prepared
from afserve.server.endpoints.service import Service
from afserve.server.http.body import until_gone
from afserve.server.metrics.spans import origin_of
from afserve.server.replies.choice import raise_failure
from afserve.server.text.kinds import BodyKind

T = TypeVar("T")


class PromptsEndpoint(ABC, Generic[T]):
    """An ASGI application: a body of this kind, its prompts computed side by side, a T of each, one JSON body.

    `reason` is why a prompt has ended, in /metrics.
    """

    reason: str

    def __init__(self, service: Service, kind: BodyKind) -> None:
        self._service, self._kind = service, kind

    @abstractmethod
    def take_event(self, event: TokenEvent, task: Task) -> T | None:
        """What is said of the prompt, once this event tells it."""

    @abstractmethod
    def draw_body(self, task: Task, results: list[T], seconds: float) -> bytes:
        """On a thread of its own. It took `seconds`."""

    def computed(self, model: Hosted, asked: Prepared) -> None:
        """All of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with await service.bodies.read_body(Request(scope, receive)) as body, service.answering.enter():
            arrived = service.http.clock.now()
            service.check_serving()
            asked = await service.text.prepare(self._kind, body.data)
            body.release_bytes()
            assert isinstance(asked, Prepared)
            account = account_of(scope)
            model, asked = service.admitted(asked, account.scheduled(asked.scheduling))
            id, choices = uuid.uuid4().hex, len(asked.prompts)
            sizes = sum(map(len, asked.prompts))
            watched = Watched(
                id, account.owner, int(time.time()), asked.model, choices, stream=False, prompt_tokens=sizes
            )
            task = Task(id, asked, arrived, account, origin=origin_of(scope), watched=watched)
            service.answering.watch_request(watched, scope)
            results = await until_gone(receive, self._results(model, task))
            seconds = service.http.clock.now() - arrived
            data = await asyncio.to_thread(self.draw_body, task, results, seconds)
            self.computed(model, asked)
            send = service.ignored.naming(send, asked.ignored)
            await Whole([data], service.settings.write_deadline)(scope, receive, send)

    async def _results(self, model: Hosted, task: Task) -> list[T]:
        """In the order of the prompts. The first failure ends all."""
        model.metrics.prompt_tokens.add(task.prompt_tokens)
        task.account.spend(task.prompt_tokens)
        async with within(task.asked.scheduling.deadline, watched=task.watched):
            try:
                async with asyncio.TaskGroup() as group:
                    ones = [
                        group.create_task(self._one(model, task, number)) for number in range(task.choices)
                    ]
            except BaseExceptionGroup as failed:
                known, others = failed.split(AfserveError)
                if known is None or others is not None:
                    raise
                raise known.exceptions[0] from None
        return [one.result() for one in ones]

    async def _one(self, model: Hosted, task: Task, number: int) -> T:
        metrics, reason = model.metrics, "abort"
        began = task.arrived
        try:
            async with aclosing(model.backend.open(task.request(number)).events()) as events:
                async for event in events:
                    raise_failure(event)
                    metrics.cached_tokens.add(event.cached_tokens)
                    if (said := self.take_event(event, task)) is not None:
                        reason = self.reason
                        return said
            raise ProtocolError(f"{task.request_id}-{number}: the engine ended it without a word of it")
        finally:
            metrics.finished.add(1, reason)
            metrics.request.observe(metrics.clock.now() - began)
