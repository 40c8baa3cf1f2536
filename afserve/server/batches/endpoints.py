"""/v1/files and /v1/batches: JSONL in, JSONL out. A batch's lines go through the endpoints that they name."""

import asyncio
import logging
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from afserve.errors import AfserveError, CapacityError, NotFoundError, RequestError, shown
from afserve.server.batches.batch import Batch, lines_of
from afserve.server.batches.files import PURPOSES, FileStore
from afserve.server.batches.multipart import fields_of
from afserve.server.fields import Fields, or_else, parse_object
from afserve.server.refusal import json_response, refusal
from afserve.server.service import Service

MAX_BATCHES = 256
log = logging.getLogger("afserve.server")


class Files:
    def __init__(self, service: Service) -> None:
        limits = service.settings
        self.bodies = service.bodies
        self.store = FileStore(service.metrics.clock, limits.max_file_bytes, limits.file_seconds)

    async def create(self, request: Request) -> Response:
        with await self.bodies.read(request) as body:
            form = fields_of(request.headers.get("content-type", ""), body.data)
        file, purpose = form.get("file"), form.get("purpose")
        if file is None:
            raise RequestError("file: is missing from the form", param="file")
        named = "" if purpose is None else purpose.data.decode("utf-8", "replace")
        if named not in PURPOSES:
            raise RequestError(f"purpose: {shown(named)} is none of {', '.join(PURPOSES)}", param="purpose")
        stored = self.store.put(file.filename or "file", named, file.data, int(time.time()))
        return json_response(stored.body())

    async def all(self, request: Request) -> Response:
        return json_response(_list([file.body() for file in self.store.all()]))

    async def get(self, request: Request) -> Response:
        return json_response(self.store.get(request.path_params["file_id"]).body())

    async def content(self, request: Request) -> Response:
        file = self.store.get(request.path_params["file_id"])
        return Response(file.data, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        self.store.delete(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


class Batches:
    """`endpoints` are those that a batch may name. `close` ends what runs."""

    def __init__(self, files: Files, endpoints: Mapping[str, ASGIApp]) -> None:
        self._files = files
        self._endpoints = endpoints
        self._batches: dict[str, Batch] = {}  # the oldest first
        self._running: dict[str, asyncio.Task[None]] = {}

    async def create(self, request: Request) -> Response:
        with await self._files.bodies.read(request) as body:
            fields = Fields(parse_object(body.data))
        endpoint, file_id = fields.text("endpoint"), or_else(fields.text("input_file_id"), "")
        if endpoint is None or endpoint not in self._endpoints:
            raise RequestError(
                f"endpoint: {shown(endpoint)} is none of {', '.join(self._endpoints)}", param="endpoint"
            )
        lines = await lines_of(self._files.store.get(file_id).data, endpoint)
        self._make_room()
        about = {
            "input_file_id": file_id,
            "completion_window": or_else(fields.text("completion_window"), "24h"),
            "metadata": fields.get("metadata"),
        }
        batch = Batch(endpoint, lines, about)
        self._batches[batch.id] = batch
        self._running[batch.id] = asyncio.create_task(self._run(batch))
        return json_response(batch.body())

    async def all(self, request: Request) -> Response:
        return json_response(_list([batch.body() for batch in reversed(self._batches.values())]))

    async def get(self, request: Request) -> Response:
        return json_response(self._of(request).body())

    async def cancel(self, request: Request) -> Response:
        """What is answered by now is kept."""
        batch = self._of(request)
        task = self._running.get(batch.id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        return json_response(batch.body())

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _of(self, request: Request) -> Batch:
        batch_id = request.path_params["batch_id"]
        batch = self._batches.get(batch_id)
        if batch is None:
            raise NotFoundError(f"batch {shown(batch_id)} is not kept here", param="batch_id")
        return batch

    def _make_room(self) -> None:
        """The oldest that has ended goes. Raises CapacityError where all run."""
        if len(self._batches) < MAX_BATCHES:
            return
        ended = next((each for each in self._batches if each not in self._running), None)
        if ended is None:
            raise CapacityError(
                f"{MAX_BATCHES} batches are running, the most this gateway takes; try again later"
            )
        del self._batches[ended]

    async def _run(self, batch: Batch) -> None:
        status = "failed"
        try:
            await batch.run(self._ask)
            status = "completed"
        except asyncio.CancelledError:
            status = "cancelled"
        except Exception:  # its own file says what was answered, the log why not more was
            log.exception("%s: ended early", batch.id)
        finally:
            self._running.pop(batch.id, None)
            self._keep(batch)
            batch.ended(status)

    def _keep(self, batch: Batch) -> None:
        for key, lines in (("output_file_id", batch.output), ("error_file_id", batch.errors)):
            if lines:
                name = f"{batch.id}_{key.partition('_')[0]}.jsonl"
                try:
                    data = b"\n".join(lines) + b"\n"
                    batch.about[key] = self._files.store.put(name, "batch_output", data, int(time.time())).id
                except CapacityError as error:
                    log.warning("%s: its %s file is lost: %s", batch.id, key, error.message)

    async def _ask(self, endpoint: str, body: bytes) -> tuple[int, bytes]:
        """One line through the endpoint, as a client would ask it; a refusal is an answer too."""
        said = _Said()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope: Scope = {"type": "http", "method": "POST", "path": endpoint, "headers": headers, "state": {}}
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


def _list(data: list[dict[str, object]]) -> dict[str, object]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": False}
