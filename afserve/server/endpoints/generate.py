"""POST /v1/completions and POST /v1/chat/completions: from a body to an Answer, counted while it is answered."""

import time

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from afserve.server.access.accounts import account_of
from afserve.server.answers.asked import Asked, owner_of
from afserve.server.answers.openai_surface import surface_of
from afserve.server.bodies.prepared import Prepared
from afserve.server.endpoints.requests import answer_of
from afserve.server.endpoints.service import Service
from afserve.server.metrics.spans import origin_of, span_of
from afserve.server.text.prepare import BodyKind


class Generate:
    """One of the two endpoints that make text, as an ASGI application. A body on its way is no request yet."""

    def __init__(self, service: Service, kind: BodyKind) -> None:
        self._service = service
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, request = self._service, Request(scope, receive)
        with await service.bodies.read_body(request) as body, service.answering.enter():
            arrived = service.http.clock.now()
            service.check_serving()
            prepared = await service.text.prepare(self._kind, body.data)
            body.release_bytes()
            assert isinstance(prepared, Prepared)
            account = account_of(scope)
            model, prepared = service.admitted(prepared, service.scheduled(account, prepared.scheduling))
            send = service.ignored.naming(send, prepared.ignored)
            owner = owner_of(request.headers.get("authorization", ""))
            asked = Asked.new(self._kind, prepared, int(time.time()), owner)
            if prepared.resume is None:
                watched = asked.watched(account.owner)
                service.answering.watch_request(watched)
                task = asked.task(arrived, account, span_of(scope), origin_of(scope), watched)
                surface = surface_of(asked.reply(model.tokenizer), prepared.stream, asked.choices)
                await service.answer_now(model, task, surface)(scope, receive, send)
                return
            one = service.resumables.open_kept(asked, arrived, account, origin_of(scope))
            model.metrics.prompt_tokens.add(one.task.prompt_tokens)
            account.spend(one.task.prompt_tokens)
            with service.resumables.reading(one):
                try:
                    await answer_of(service, one, prepared.stream)(scope, receive, send)
                finally:
                    service.accounts.goes_on(account, one.tasks)
