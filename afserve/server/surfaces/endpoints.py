"""The endpoints of other APIs on the one chat request: who translates a body, and in whose words it is answered."""

import json
import uuid
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afserve.server.access.accounts import Account, account_of
from afserve.server.body import Body
from afserve.server.generation import Task
from afserve.server.prepare import Kind
from afserve.server.prepared import Prepared
from afserve.server.refusal import json_response
from afserve.server.service import Service
from afserve.server.surfaces.anthropic_events import MessageSurface
from afserve.server.surfaces.ollama_lines import OllamaSurface
from afserve.server.surfaces.response_events import ResponseSurface
from afserve.server.surfaces.response_store import ResponseStore
from afserve.server.surfaces.surface import Surface, SurfaceAnswer
from afserve.server.wording import Usage, encode

Make = Callable[[Prepared, Service], Surface]


class Spoken:
    """One such endpoint, as an ASGI application."""

    def __init__(self, service: Service, kind: Kind, make: Make) -> None:
        self._service, self._kind, self._make = service, kind, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with await service.bodies.read(Request(scope, receive)) as body, service.inflight.enter():
            arrived = service.metrics.clock.now()
            service.check()
            asked = await self._prepare(body)
            body.release()
            await self._answer(asked, arrived, account_of(scope))(scope, receive, send)

    async def _prepare(self, body: Body) -> Prepared:
        asked = await self._service.text.prepare(self._kind, body.data)
        assert isinstance(asked, Prepared)
        return asked

    def _answer(self, asked: Prepared, arrived: float, account: Account) -> SurfaceAnswer:
        service = self._service
        task = Task(
            uuid.uuid4().hex,
            asked.prompts,
            asked.params,
            arrived,
            asked.skip_special_tokens,
            account.scheduled(asked.scheduling),
            account,
        )
        surface = self._make(asked, service)
        return SurfaceAnswer(
            service.generator, service.inflight, task, surface, asked.stream is not None, service.settings
        )


def message(asked: Prepared, service: Service) -> Surface:
    return MessageSurface(
        f"msg_{uuid.uuid4().hex}", service.backend.model.name, len(asked.prompts[0]), asked.reading
    )


def ollama_chat(asked: Prepared, service: Service) -> Surface:
    return OllamaSurface(service.backend.model.name, asked.reading, service.metrics.clock.now, chat=True)


def ollama_generate(asked: Prepared, service: Service) -> Surface:
    return OllamaSurface(service.backend.model.name, asked.reading, service.metrics.clock.now, chat=False)


class Responses(Spoken):
    """POST /v1/responses, and what is kept of its answers."""

    def __init__(self, service: Service) -> None:
        limits = service.settings
        self._store = ResponseStore(
            service.metrics.clock, limits.max_responses, limits.max_responses_bytes, limits.response_seconds
        )
        super().__init__(service, Kind.RESPONSE, self._surface)

    async def _prepare(self, body: Body) -> Prepared:
        """A body that follows a response is prepared together with what was said up to that one."""
        text = self._service.text
        asked = await text.prepare(Kind.RESPONSE, body.data)
        if isinstance(asked, bytes):
            before = self._store.get(json.loads(asked)).items
            asked = await text.prepare(
                Kind.FOLLOWING, b'{"before":' + before + b',"asked":' + body.data + b"}"
            )
        assert isinstance(asked, Prepared)
        return asked

    def _surface(self, asked: Prepared, service: Service) -> Surface:
        response_id = f"resp_{uuid.uuid4().hex}"
        name = service.backend.model.name
        if not asked.kept:
            return ResponseSurface(response_id, name, asked.facts, asked.reading)
        return _Keeping(
            ResponseSurface(response_id, name, asked.facts, asked.reading), asked.kept, self._store
        )

    async def get(self, request: Request) -> Response:
        stored = self._store.get(request.path_params["response_id"])
        return Response(stored.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        asked = self._store.get(request.path_params["response_id"]).asked
        body = b'{"object":"list","has_more":false,"first_id":null,"last_id":null,"data":' + asked + b"}"
        return Response(body, media_type="application/json")


class _Keeping:
    """A response that is stored at its end. `kept` is the JSON array of the items before it."""

    def __init__(self, surface: ResponseSurface, kept: bytes, store: ResponseStore) -> None:
        self._surface, self._kept, self._store = surface, kept, store
        self.media, self.comment = surface.media, surface.comment
        self.begin, self.take, self.failed, self.body = (
            surface.begin,
            surface.take,
            surface.failed,
            surface.body,
        )

    def end(self, usage: Usage) -> bytes:
        said, own = self._surface.end(usage), encode(self._surface.items).encode()
        items = self._kept[:-1] + b"," + own[1:] if self._surface.items else self._kept
        self._store.put(self._surface.id, self._surface.body(usage), items, self._kept)
        return said
