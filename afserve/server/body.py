"""Reading a request: its body within limits, and noticing that the client has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from afserve.errors import RequestError, TooLargeError
from afserve.server.fields import parse_object

T = TypeVar("T")
# A refused upload is read and dropped this far, so that the client gets to read why.
DROPPED_BYTES = 64 << 20
DROP_SECONDS = 2.0


class SlowBodyError(RequestError):
    status = 408


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_object(request: Request, limit: int, deadline: float) -> dict[str, object]:
    try:
        async with asyncio.timeout(deadline):
            return parse_object(await _read(request, limit))
    except TimeoutError as error:
        raise SlowBodyError(f"the request body did not arrive within {deadline:g} s") from error
    except ClientDisconnect as error:
        raise ClientGone from error


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    parts: list[bytes] = []
    size = 0
    if announced.isdigit() and int(announced) > limit:
        await _drop(request)
        raise _too_large(int(announced), limit)
    async for part in request.stream():
        size += len(part)
        if size > limit:
            await _drop(request)
            raise _too_large(size, limit)
        parts.append(part)
    return b"".join(parts)


async def _drop(request: Request) -> None:
    dropped = 0
    try:
        async with asyncio.timeout(DROP_SECONDS):
            message = await request.receive()
            while message.get("more_body") and dropped < DROPPED_BYTES:
                dropped += len(message.get("body", b""))
                message = await request.receive()
    except TimeoutError:
        return


def _too_large(size: int, limit: int) -> TooLargeError:
    return TooLargeError(f"the request body has {size} bytes or more, at most {limit} are accepted")


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client leaves first, `work` is cancelled and ClientGone raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
