"""One batch: lines of requests in, lines of answers out, behind everything else that waits."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator

from afserve.errors import CapacityError, RequestError, shown
from afserve.server.bodies.declared import BATCH_PRIORITY
from afserve.server.bodies.fields import Fields, parse_object
from afserve.server.replies.refusal import told

Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # path and body -> status and body
Tell = Callable[[int, int, bytes], Awaitable[None]]  # line, status and what its file says
Line = tuple[int, bytes]
MAX_LINES = 50_000
MAX_LINE_BYTES = 1 << 20
TURN_BYTES = 64 << 10  # of lines that are looked at between two turns of the event loop
MAX_ENDS = 2 * MAX_LINES  # empty lines do not count, up to here
AT_ONCE = 16  # lines of one batch that are with the engine
BUSY = (429, 503)  # what is asked again
FIRST_PAUSE, LONGEST_PAUSE, TRIES = 0.5, 30.0, 100  # seconds, doubled from try to try: 50 minutes in all


class BatchEnded(Exception):
    """A batch ends before all of its lines are answered: with this `status`, and the client is told `why`."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


async def run(endpoint: str, lines: Iterable[Line], ask: Ask, tell: Tell) -> None:
    """Every line is answered and told, some at a time. The first exception of `ask` or `tell` ends all."""
    waiting = iter(lines)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(_some(endpoint, waiting, ask, tell))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _some(endpoint: str, waiting: Iterator[Line], ask: Ask, tell: Tell) -> None:
    for number, line in waiting:
        custom_id, body = request_of(line, endpoint)
        status, said = await _patiently(ask, endpoint, body)
        about = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
        lead = json.dumps({**about, "error": None})[:-1]
        response = f',"response":{{"status_code":{status},"request_id":"{about["id"]}","body":'
        await tell(number, status, (lead + response).encode() + said + b"}}")


async def _patiently(ask: Ask, endpoint: str, body: bytes) -> tuple[int, bytes]:
    """A server that is busy, or starts, or has lost a node, is asked again: a batch has time."""
    pause = FIRST_PAUSE
    for _ in range(TRIES):
        status, said = await ask(endpoint, body)
        if status not in BUSY:
            break
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return status, said


async def patiently_told(tell: Callable[[], Awaitable[None]], number: int) -> None:
    """An answer is not thrown away because the state is busy or full for a while. Raises BatchEnded."""
    pause = FIRST_PAUSE
    for tried in range(1, TRIES + 1):
        try:
            await tell()
            break
        except CapacityError as error:
            if tried == TRIES:
                raise BatchEnded(
                    "failed", f"the answer of line {number + 1} could not be kept: {told(error)}"
                ) from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def numbered(data: bytes, done: frozenset[int]) -> list[Line]:
    """The lines of a file that have no answer yet, by their place in it."""
    lines = filter(bytes.strip, data.split(b"\n"))
    return [(number, line) for number, line in enumerate(lines) if number not in done]


def request_of(line: bytes, endpoint: str) -> tuple[str, bytes]:
    """Its own id and the body, with a batch's priority. Raises RequestError."""
    fields = Fields(parse_object(line))
    custom_id, body = fields.text("custom_id"), fields.section("body")
    if custom_id is None or body is None:
        raise RequestError("a line needs a custom_id, a method, a url and a body")
    if not custom_id or any("\ud800" <= letter <= "\udfff" for letter in custom_id):
        raise RequestError.about(
            "custom_id",
            f"{shown(custom_id)} is no id; give a text of at least one character, without a lone surrogate",
        )
    method = fields.get("method")
    if method not in (None, "POST"):
        raise RequestError.about("method", f"{shown(method)} is not POST")
    if fields.get("url") != endpoint:
        raise RequestError.about("url", f"{shown(fields.get('url'))} is not the batch's endpoint {endpoint}")
    if body.get("stream"):
        raise RequestError.about("stream", "an answer in a batch is no stream")
    if body.get("resume") is not None:
        raise RequestError.about("resume", "an answer in a batch is kept in its file; leave it out")
    return custom_id, json.dumps({"priority": BATCH_PRIORITY, **body.raw()}).encode()


async def checked(data: bytes, endpoint: str) -> int:
    """How many lines there are, each looked at, with turns for others between them. Raises RequestError that names the
    line."""
    ends = data.count(b"\n")
    if ends > MAX_ENDS:
        raise RequestError(
            f"the file has {ends} lines, empty ones included; 1 to {MAX_LINES} requests are taken",
            param="input_file_id",
        )
    lines = [line for line in data.split(b"\n") if line.strip()]
    if not lines or len(lines) > MAX_LINES:
        raise RequestError(
            f"the file has {len(lines)} requests, 1 to {MAX_LINES} are taken", param="input_file_id"
        )
    seen: set[str] = set()
    looked = 0
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise RequestError(
                f"line {number}: has {len(line)} bytes, at most {MAX_LINE_BYTES} are taken",
                param="input_file_id",
            )
        looked += len(line)
        if looked > TURN_BYTES:
            looked = 0
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
    return len(lines)
