"""POST /v1/completions and POST /v1/chat/completions: from a body to an Answer, counted while it is answered.

/v1/requests/{id} tells how far a request is, and ends it, by the id that its answer has. One that was asked for with
`resume` outlives its connection: `events` goes on with its stream behind `Last-Event-ID`, `answer` has the whole
answer. Others are known to the gateway that answers them, while it does. Each is for who knows the id and sends the API
key that the request came with; for everyone else there is no such request.
"""

import time
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afserve.server.access.accounts import account_of
from afserve.server.answers.answer import Answer
from afserve.server.answers.answering import Watched
from afserve.server.answers.asked import Asked, owner_of
from afserve.server.answers.openai_surface import surface_of
from afserve.server.answers.resumables import Resumable
from afserve.server.bodies.openai import StreamOptions
from afserve.server.bodies.prepared import Prepared
from afserve.server.endpoints.service import Service
from afserve.server.metrics.spans import origin_of, span_of
from afserve.server.replies.record import Position
from afserve.server.replies.refusal import json_response
from afserve.server.text.kinds import BodyKind


def answer_of(
    service: Service, one: Resumable, stream: StreamOptions | None, since: Position | None = None
) -> Answer:
    """Reads it from `since` on. A stream without usage options has those that were asked for at first."""
    since = since or Position.at_start(one.asked.choices)
    reply = one.asked.reply(service.models.named(one.asked.prepared.model).tokenizer)
    return Answer(
        lambda _: service.resumables.pieces(one, since),
        service.answering,
        one.task,
        surface_of(reply, stream, one.asked.choices, since),
        stream is not None,
        service.settings,
    )


class RequestEndpoints:
    """The endpoints. `events` and `answer` are ASGI applications, because they notice that the client has gone."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def find_kept(self, scope: Scope) -> Resumable:
        id, account = scope["path_params"]["id"], account_of(scope)
        return await self._service.resumables.find_kept(id, _owner(scope), account)

    def _running(self, request: Request) -> Watched | None:
        return self._service.answering.find_watched(
            request.path_params["id"], account_of(request.scope).owner
        )

    async def show_request(self, request: Request) -> Response:
        """One that is another gateway's stays there."""
        owner, id = _owner(request.scope), request.path_params["id"]
        if (watched := self._running(request)) is not None:
            return json_response(_watched_status(watched))
        resumables = self._service.resumables
        if (one := resumables.here(id, owner)) is not None:
            return json_response(status_of(one))
        asked, kept = await resumables.elsewhere(id, owner)
        choices = [{"index": k.choice, "tokens": k.count, "finish_reason": None} for k in kept]
        return json_response(
            _status(asked, "running" if any(not k.ended for k in kept) else "finished", choices)
        )

    async def end_request(self, request: Request) -> Response:
        if (watched := self._running(request)) is not None:
            watched.cancel_request()
            return json_response({"id": watched.id, "object": "request", "deleted": True})
        one = await self.find_kept(request.scope)
        self._service.resumables.forget_kept(one)
        return json_response({"id": one.asked.id, "object": "request", "deleted": True})


class Again:
    """GET .../events or .../answer."""

    def __init__(self, service: Service, *, stream: bool) -> None:
        self._service, self._stream = service, stream
        self._requests = RequestEndpoints(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with service.answering.enter():
            one = await self._requests.find_kept(scope)
            since = options = None
            if self._stream:
                since = Position.parse(Headers(scope=scope).get("last-event-id", ""), one.asked.choices)
                options = one.asked.prepared.stream or StreamOptions()
            with service.resumables.reading(one):
                send = service.ignored.naming(send, one.asked.prepared.ignored)
                await answer_of(service, one, options, since)(scope, receive, send)


def status_of(one: Resumable) -> dict[str, object]:
    failure = one.record.failure
    state = "failed" if failure is not None else "finished" if one.record.finished else "running"
    choices = [
        {"index": i, "tokens": len(told.tokens), "finish_reason": told.end and told.end.finish_reason}
        for i, told in enumerate(one.record.told)
    ]
    return _status(one.asked, state, choices)


def _status(asked: Asked, state: str, choices: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return _object(asked.watched(asked.owner), state, asked.kept_seconds, choices)


def _watched_status(one: Watched) -> dict[str, object]:
    choices = [
        {"index": i, "tokens": tokens, "finish_reason": reason}
        for i, (tokens, reason) in enumerate(zip(one.tokens, one.reasons, strict=True))
    ]
    return _object(one, "running", 0.0, choices)


def _object(
    one: Watched, state: str, resume: float, choices: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    return {
        "id": one.id,
        "object": "request",
        "created": one.created,
        "model": one.model,
        "status": state,
        "stream": one.stream,
        "resume": resume,
        "choices": choices,
    }


def _owner(scope: Scope) -> str:
    return owner_of(Headers(scope=scope).get("authorization", ""))


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
                service.answering.watch_request(watched, scope)
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
