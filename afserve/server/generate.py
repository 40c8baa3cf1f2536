"""POST /v1/completions and POST /v1/chat/completions: from a body to an Answer, counted while it is answered."""

import time
import uuid

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from afserve.server.answer import Answer
from afserve.server.chat_reply import ChatReply
from afserve.server.completion_reply import CompletionReply, Echo
from afserve.server.generation import Task
from afserve.server.prepare import Kind
from afserve.server.prepared import Prepared
from afserve.server.replies import Reply
from afserve.server.service import Service
from afserve.server.wording import Header

_PREFIX = {Kind.COMPLETION: "cmpl", Kind.CHAT: "chatcmpl"}


class Generate:
    """One of the two endpoints that make text, as an ASGI application. A body on its way is no request yet."""

    def __init__(self, service: Service, kind: Kind) -> None:
        self._service = service
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with await service.bodies.read(Request(scope, receive)) as body, service.inflight.enter():
            arrived = service.metrics.clock.now()
            service.check()
            prepared = await service.text.prepare(self._kind, body.data)
            body.release()
            assert isinstance(prepared, Prepared)
            await self._answer(prepared, arrived)(scope, receive, send)

    def _answer(self, asked: Prepared, arrived: float) -> Answer:
        service = self._service
        request_id = f"{_PREFIX[self._kind]}-{uuid.uuid4().hex}"
        task = Task(
            request_id, asked.prompts, asked.params, arrived, asked.skip_special_tokens, asked.scheduling
        )
        return Answer(
            service.generator,
            service.inflight,
            task,
            self._reply(asked, request_id),
            asked.stream,
            service.settings,
        )

    def _reply(self, asked: Prepared, request_id: str) -> Reply:
        tokenizer = self._service.tokenizer
        header = Header(request_id, int(time.time()), self._service.backend.model.name)
        if self._kind is Kind.CHAT:
            return ChatReply(header, tokenizer, asked.logprobs, asked.reading)
        return CompletionReply(
            header,
            tokenizer,
            asked.params.n,
            asked.logprobs,
            None if asked.echo is None else Echo(asked.echo, asked.prompts),
            skip_special_tokens=asked.skip_special_tokens,
        )
