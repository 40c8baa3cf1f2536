"""/v1/files and /v1/batches: JSONL in, JSONL out. A batch's lines go through the endpoints that they name."""

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from afserve.clock import WallClock
from afserve.errors import AfserveError, CapacityError, RequestError, shown
from afserve.server.access.accounts import STATE, Account, account_of
from afserve.server.batches.batch import lines_of, numbered, run
from afserve.server.batches.files import PURPOSES, FileStore
from afserve.server.batches.multipart import fields_of
from afserve.server.batches.table import HELD_SECONDS, BatchRow, BatchTable
from afserve.server.fields import Fields, or_else, parse_object
from afserve.server.refusal import json_response, refusal
from afserve.server.service import Service

LOOK_SECONDS = HELD_SECONDS / 15  # between two looks at what this gateway holds, and what nobody does
WINDOW = "24h"
MAX_METADATA, MAX_METADATA_CHARACTERS = 16, 512
MAX_NAME = 255
log = logging.getLogger("afserve.server")


class Files:
    def __init__(self, service: Service) -> None:
        limits = service.settings
        self.bodies = service.bodies
        self.store = FileStore(service.database, WallClock(), limits.max_file_bytes, limits.file_seconds)

    async def create(self, request: Request) -> Response:
        with await self.bodies.read(request) as body:
            form = fields_of(request.headers.get("content-type", ""), body.data)
        file, purpose = form.get("file"), form.get("purpose")
        if file is None:
            raise RequestError("file: is missing from the form", param="file")
        named = "" if purpose is None else purpose.data.decode("utf-8", "replace")
        if named not in PURPOSES:
            raise RequestError(f"purpose: {shown(named)} is none of {', '.join(PURPOSES)}", param="purpose")
        name = file.filename or "file"
        if len(name) > MAX_NAME:
            raise RequestError(
                f"file: its name has {len(name)} characters, at most {MAX_NAME} are taken", param="file"
            )
        stored = await self.store.put(owner_of(request), name, named, file.data)
        return json_response(stored.body())

    async def all(self, request: Request) -> Response:
        return json_response(_list([file.body() for file in await self.store.all(owner_of(request))]))

    async def get(self, request: Request) -> Response:
        stored = await self.store.get(owner_of(request), request.path_params["file_id"])
        return json_response(stored.body())

    async def content(self, request: Request) -> Response:
        data = await self.store.content(owner_of(request), request.path_params["file_id"])
        return Response(data, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await self.store.delete(owner_of(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


class Batches:
    """`endpoints` are those that a batch may name. With a state that gateways share, a batch outlives this one."""

    def __init__(self, service: Service, files: Files, endpoints: Mapping[str, ASGIApp]) -> None:
        self._service, self._files, self._endpoints = service, files, endpoints
        holder = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._table = BatchTable(service.database, files.store, WallClock(), holder)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._leaving = False

    async def create(self, request: Request) -> Response:
        owner = owner_of(request)
        with await self._files.bodies.read(request) as body:
            fields = Fields(parse_object(body.data))
        endpoint, file_id = fields.text("endpoint"), or_else(fields.text("input_file_id"), "")
        if endpoint is None or endpoint not in self._endpoints:
            raise RequestError(
                f"endpoint: {shown(endpoint)} is none of {', '.join(self._endpoints)}", param="endpoint"
            )
        about = {"completion_window": _window(fields), "metadata": _metadata(fields)}
        lines = await lines_of(await self._files.store.content(owner, file_id), endpoint)
        row = await self._table.create(owner, endpoint, file_id, len(lines), about)
        self._begin(row)
        return json_response(row.body())

    async def all(self, request: Request) -> Response:
        return json_response(_list([row.body() for row in await self._table.all(owner_of(request))]))

    async def get(self, request: Request) -> Response:
        row = await self._table.get(owner_of(request), request.path_params["batch_id"])
        return json_response(row.body())

    async def cancel(self, request: Request) -> Response:
        """What is answered by now is kept."""
        owner, batch_id = owner_of(request), request.path_params["batch_id"]
        await self._table.cancel(owner, batch_id)
        task = self._running.get(batch_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        return json_response((await self._table.get(owner, batch_id)).body())

    # ---- the work

    async def start(self) -> None:
        """Where gateways share a state: go on with what nobody holds, and with what this one holds."""
        if self._service.database.shared:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """What runs is cancelled, or left to another gateway or the next life of this one."""
        self._leaving = self._service.database.shared
        tasks = [*self._running.values(), *filter(None, [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except CapacityError as error:
                log.warning("batches: %s", error.message)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        for batch_id, task in list(self._running.items()):
            if not await self._table.hold(batch_id):
                task.cancel()
        if self._service.backend.ready():
            for row in await self._table.take():
                log.warning(
                    "%s goes on here, with %d of %d lines", row.id, row.completed + row.failed, row.total
                )
                self._begin(row)

    def _begin(self, row: BatchRow) -> None:
        self._running[row.id] = asyncio.create_task(self._run(row))

    async def _run(self, row: BatchRow) -> None:
        status = "failed"
        try:
            await self._answer(row)
            status = "completed"
        except asyncio.CancelledError:
            status = "cancelled"
        except Exception:  # its own file says what was answered, the log why not more was
            log.exception("%s: ended early", row.id)
        try:
            if status == "cancelled" and self._leaving:
                await self._table.release(row.id)
            elif lost := await self._table.end(row.id, status):
                log.warning("a file of a batch is lost: %s", lost)
        except CapacityError as error:
            log.warning("%s: its end is told when the state can be written: %s", row.id, error.message)
        finally:
            self._running.pop(row.id, None)

    async def _answer(self, row: BatchRow) -> None:
        data, done = await self._table.input(row)
        account = self._service.accounts.named(row.owner)

        async def ask(endpoint: str, body: bytes) -> tuple[int, bytes]:
            return await self._ask(endpoint, body, account)

        async def tell(number: int, status: int, said: bytes) -> None:
            await self._table.answered(row.id, number, said, fine=status == 200)

        await run(row.endpoint, numbered(data, done), ask, tell)

    async def _ask(self, endpoint: str, body: bytes, account: Account) -> tuple[int, bytes]:
        """One line through the endpoint, as a client would ask it; a refusal is an answer too."""
        said = _Said()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "headers": headers,
            "state": {STATE: account},
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.get_running_loop().create_future()  # a client that never leaves
            raise AssertionError("nobody sets it")

        try:
            await self._endpoints[endpoint](scope, receive, said.take)
        except AfserveError as error:
            reply = refusal(error, endpoint)
            return reply.status_code, bytes(reply.body)
        return said.status, b"".join(said.parts)


class _Said:
    """What an endpoint answered."""

    def __init__(self) -> None:
        self.status = 500
        self.parts: list[bytes] = []

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))


def _window(fields: Fields) -> str:
    """OpenAI's one value; a batch that takes longer goes on all the same."""
    window = or_else(fields.text("completion_window"), WINDOW)
    if window != WINDOW:
        raise RequestError(f"completion_window: {shown(window)} is not {WINDOW}", param="completion_window")
    return window


def _metadata(fields: Fields) -> Mapping[str, object] | None:
    given = fields.section("metadata")
    if given is None:
        return None
    words = [word for pair in given.raw().items() for word in pair]
    if len(words) > 2 * MAX_METADATA or any(
        not isinstance(word, str) or len(word) > MAX_METADATA_CHARACTERS for word in words
    ):
        raise RequestError(
            f"metadata: is not at most {MAX_METADATA} pairs of texts of at most {MAX_METADATA_CHARACTERS} characters",
            param="metadata",
        )
    return given.raw()


def owner_of(request: Request) -> str:
    return account_of(request.scope).owner


def _list(data: list[dict[str, object]]) -> dict[str, object]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": False}
