"""One batch: lines of requests in, lines of answers out, behind everything else that waits."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

from afserve.errors import RequestError, shown
from afserve.server.fields import Fields, parse_object
from afserve.server.scheduling import BATCH_PRIORITY

Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # path and body -> status and body
MAX_LINES = 50_000
MAX_LINE_BYTES = 1 << 20
TURN = 32  # lines between two turns of the event loop
AT_ONCE = 16  # lines of one batch that are with the engine


class Batch:
    """`run` to its end; then `output` and `errors` are its answers, one JSON object per line."""

    def __init__(self, endpoint: str, lines: list[bytes], about: dict[str, object]) -> None:
        self.id = f"batch_{uuid.uuid4().hex}"
        self.status = "in_progress"
        self.output: list[bytes] = []
        self.errors: list[bytes] = []
        self.about = about
        self.times: dict[str, int] = {"created_at": int(time.time()), "in_progress_at": int(time.time())}
        self._endpoint = endpoint
        self._lines = lines

    def body(self) -> dict[str, object]:
        counts = {
            "total": len(self._lines),
            "completed": len(self.output),
            "failed": len(self.errors),
        }
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self._endpoint,
            "errors": None,
            "status": self.status,
            "request_counts": counts,
            **self.about,
            **self.times,
        }

    async def run(self, ask: Ask) -> None:
        waiting = iter(self._lines)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(self._lines))):
                group.create_task(self._some(waiting, ask))

    async def _some(self, waiting: Iterator[bytes], ask: Ask) -> None:
        for line in waiting:
            await self._one(line, ask)
            await asyncio.sleep(0)

    async def _one(self, line: bytes, ask: Ask) -> None:
        custom_id, body = request_of(line, self._endpoint)
        status, said = await ask(self._endpoint, body)
        about = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
        lead = json.dumps({**about, "error": None})[:-1]
        response = f',"response":{{"status_code":{status},"request_id":"{about["id"]}","body":'
        into = self.output if status == 200 else self.errors
        into.append((lead + response).encode() + said + b"}}")

    def ended(self, status: str) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(time.time())


def request_of(line: bytes, endpoint: str) -> tuple[str, bytes]:
    """Its own id and the body, with a batch's priority. Raises RequestError."""
    fields = Fields(parse_object(line))
    custom_id, body = fields.text("custom_id"), fields.section("body")
    if custom_id is None or body is None:
        raise RequestError("a line needs a custom_id, a method, a url and a body")
    if fields.get("method") not in (None, "POST") or fields.get("url") != endpoint:
        raise RequestError(
            f"url: {shown(fields.get('url'))} is not the batch's endpoint {endpoint}", param="url"
        )
    if body.get("stream"):
        raise RequestError("stream: an answer in a batch is no stream", param="stream")
    if body.get("resume") is not None:
        raise RequestError("resume: an answer in a batch is kept in its file; leave it out", param="resume")
    return custom_id, json.dumps({"priority": BATCH_PRIORITY, **body.raw()}).encode()


async def lines_of(data: bytes, endpoint: str) -> list[bytes]:
    """Every line, looked at with turns for others between them. Raises RequestError that names the line."""
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines or len(lines) > MAX_LINES:
        raise RequestError(
            f"the file has {len(lines)} requests, 1 to {MAX_LINES} are taken", param="input_file_id"
        )
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise RequestError(
                f"line {number}: has {len(line)} bytes, at most {MAX_LINE_BYTES} are taken",
                param="input_file_id",
            )
        if number % TURN == 0:
            await asyncio.sleep(0)
        try:
            custom_id, _ = request_of(line, endpoint)
        except RequestError as error:
            raise RequestError(f"line {number}: {error.message}", param="input_file_id") from error
        if custom_id in seen:
            raise RequestError(
                f"line {number}: custom_id {shown(custom_id)} is there twice", param="input_file_id"
            )
        seen.add(custom_id)
    return lines
