"""The endpoints of other APIs on the one chat request: who translates a body, and in whose words it is answered."""

import asyncio
import json
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afserve.clock import Clock, WallClock
from afserve.errors import CapacityError, NotFoundError, shown
from afserve.server.access.accounts import account_of, owner_of
from afserve.server.answers.answer import Keep
from afserve.server.answers.answering import Watched
from afserve.server.answers.generation import Task
from afserve.server.answers.writer import Whole
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.prepared import Computed, Prepared
from afserve.server.bodies.unsupported import KnownField, refuse_known
from afserve.server.endpoints.service import Service
from afserve.server.http.body import CountedBody
from afserve.server.metrics.spans import origin_of, span_of
from afserve.server.replies.pages import page_of
from afserve.server.replies.refusal import json_response
from afserve.server.replies.surface import Surface
from afserve.server.replies.wording import Usage, encode
from afserve.server.state.database import Store, transaction
from afserve.server.surfaces.anthropic_events import MessageSurface
from afserve.server.surfaces.ollama import OllamaSurface
from afserve.server.surfaces.response_events import ResponseSurface
from afserve.server.surfaces.response_items import listed_items
from afserve.server.text.kinds import BodyKind


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` is the response, `items` the JSON array of everything that was said up to and with it, `asked` of it the
    items before its own output."""

    body: bytes
    items: bytes
    asked: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + len(self.asked)


@dataclass(frozen=True, slots=True)
class ResponseStore(Store):
    """Each response is its owner's: to everybody else it is not there."""

    most: int
    most_bytes: int
    seconds: float

    @transaction
    def put_response(
        self, db: sqlite3.Connection, owner: str, response_id: str, stored: StoredResponse
    ) -> None:
        """The oldest make room for it, of whoever has most; what alone is too large is not kept."""
        ends = self.clock.now() + self.seconds
        db.execute(
            "INSERT INTO responses(id, owner, ends, size, body, items, asked) VALUES(?,?,?,?,?,?,?)",
            (response_id, owner, ends, stored.size, stored.body, stored.items, stored.asked),
        )
        self._shrink(db)

    @transaction
    def get_response(self, db: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse:
        """Raises NotFoundError for one that is not here any more, or never was."""
        return self._row(db, owner, response_id)

    @transaction
    def delete_response(self, db: sqlite3.Connection, owner: str, response_id: str) -> None:
        self._row(db, owner, response_id)
        db.execute("DELETE FROM responses WHERE id=?", (response_id,))

    def _row(self, db: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse:
        self._shrink(db)
        sound = response_id.encode("utf-8", "replace").decode()
        row = db.execute(
            "SELECT body, items, asked FROM responses WHERE id=? AND owner=?", (sound, owner)
        ).fetchone()
        if row is None:
            raise NotFoundError(
                f"response {shown(response_id)} is not kept here: it never was, it is older than {self.seconds:g} s, "
                "or it made room for others; send the whole input",
                param="previous_response_id",
            )
        return StoredResponse(*row)

    def _shrink(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM responses WHERE ends<?", (self.clock.now(),))
        while True:
            number, size = db.execute("SELECT count(*), coalesce(sum(size), 0) FROM responses").fetchone()
            if number <= self.most and size <= self.most_bytes:
                return
            measure = "count(*)" if number > self.most else "sum(size)"
            (fullest,) = db.execute(
                f"SELECT owner FROM responses GROUP BY owner ORDER BY {measure} DESC, owner LIMIT 1"  # noqa: S608
            ).fetchone()
            oldest = "DELETE FROM responses WHERE seq=(SELECT min(seq) FROM responses WHERE owner=?)"
            db.execute(oldest, (fullest,))


log = logging.getLogger("afserve.server")
Make = Callable[[Prepared, str, Clock, int], Surface]  # its last is the tokens of a block of KV
# What a query may ask of a kept response.
_WHOLE = {
    **dict.fromkeys(
        ("stream", "starting_after"), KnownField(str, "a kept response is given whole", ("false",))
    ),
    "include": KnownField(str, "leave it out", ("reasoning.encrypted_content",)),
}
_ITEMS = {"include": _WHOLE["include"]}
_USUAL_ITEMS, _MOST_ITEMS = 20, 100  # of a page, as OpenAI has it
_PREFIX = {BodyKind.MESSAGE: "msg_", BodyKind.RESPONSE: "resp_"}  # of an answer's id, where the API has one


class Spoken:
    """One such endpoint, as an ASGI application."""

    def __init__(self, service: Service, kind: BodyKind, make: Make) -> None:
        self._service, self._kind, self._make = service, kind, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with await service.bodies.read_body(Request(scope, receive)) as body, service.answering.enter():
            arrived = service.http.clock.now()
            service.check_serving()
            account = account_of(scope)
            asked = await self._prepare(body, account.owner)
            body.release_bytes()
            send = service.ignored.naming(send, asked.ignored)
            if isinstance(asked, Computed):
                await Whole([asked.body], service.settings.write_deadline)(scope, receive, send)
                return
            model, asked = service.admitted(asked, service.scheduled(account, asked.scheduling))
            id = f"{_PREFIX.get(self._kind, '')}{uuid.uuid4().hex}"
            stream = asked.stream is not None
            tokens = len(asked.prompts[0])
            watched = Watched(
                id, account.owner, int(time.time()), asked.model, 1, stream=stream, prompt_tokens=tokens
            )
            service.answering.watch_request(watched, scope)
            task = Task(id, asked, arrived, account, span_of(scope), origin_of(scope), watched)
            surface = self._make(asked, id, service.http.clock, model.backend.model.block_size)
            keep = self._keeping(asked, surface, account.owner)
            await service.answer_now(model, task, surface, keep)(scope, receive, send)

    async def _prepare(self, body: CountedBody, owner: str) -> Prepared | Computed:
        return await self._service.text.prepare(self._kind, body.data)

    def _keeping(self, asked: Prepared, surface: Surface, owner: str) -> Keep | None:
        """Who keeps the answer, where one does."""
        return None


def message(asked: Prepared, id: str, clock: Clock, block: int) -> Surface:
    """Whole blocks alone are found again."""
    kept = len(asked.prompts[0]) // block * block if asked.scheduling.retain > 0 else 0
    return MessageSurface(id, asked.model, asked.reading, kept=kept)


def response(asked: Prepared, id: str, clock: Clock, block: int) -> Surface:
    return ResponseSurface(id, asked.model, asked.facts, asked.reading)


def ollama_chat(asked: Prepared, id: str, clock: Clock, block: int) -> Surface:
    return OllamaSurface(asked.model, asked.reading, clock.now, chat=True)


def ollama_generate(asked: Prepared, id: str, clock: Clock, block: int) -> Surface:
    return OllamaSurface(asked.model, asked.reading, clock.now, chat=False)


class Responses(Spoken):
    """POST /v1/responses, and what is kept of its answers."""

    def __init__(self, service: Service) -> None:
        limits = service.settings
        self._store = ResponseStore(
            service.database,
            WallClock(),
            limits.max_responses,
            limits.max_responses_bytes,
            limits.response_seconds,
        )
        super().__init__(service, BodyKind.RESPONSE, response)

    async def _prepare(self, body: CountedBody, owner: str) -> Prepared | Computed:
        """A body that follows a response is prepared together with what was said up to that one."""
        text = self._service.text
        asked = await text.prepare(BodyKind.RESPONSE, body.data)
        if isinstance(asked, Computed):
            before = (await self._store.get_response(owner, json.loads(asked.body))).items
            asked = await text.prepare(
                BodyKind.FOLLOWING, b'{"before":' + before + b',"asked":' + body.data + b"}"
            )
        return asked

    def _keeping(self, asked: Prepared, surface: Surface, owner: str) -> Keep | None:
        assert isinstance(surface, ResponseSurface)
        if not asked.kept:
            return None

        async def keep(usage: Usage) -> None:
            own = encode(surface.items).encode()
            items = asked.kept[:-1] + b"," + own[1:] if surface.items else asked.kept
            try:
                await self._store.put_response(
                    owner, surface.id, StoredResponse(b"".join(surface.whole_body(usage)), items, asked.kept)
                )
            except CapacityError as error:
                log.warning("%s is answered and not kept: %s", surface.id, error.message)

        return keep

    async def show_response(self, request: Request) -> Response:
        refuse_known(Fields(request.query_params), _WHOLE)
        stored = await self._store.get_response(owner_of(request), request.path_params["response_id"])
        return Whole([stored.body], self._service.settings.write_deadline)

    async def delete_response(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._store.delete_response(owner_of(request), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        query = request.query_params
        refuse_known(Fields(query), _ITEMS)
        stored = await self._store.get_response(owner_of(request), request.path_params["response_id"])
        items = await asyncio.to_thread(listed_items, stored.asked)
        page = page_of(items, query, usual=_USUAL_ITEMS, most=_MOST_ITEMS)
        return Whole([json.dumps(page).encode()], self._service.settings.write_deadline)
