"""Reading a request: its body within limits, and noticing that the client has gone."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from afserve.errors import OverloadedError, RequestError, TooLargeError
from afserve.server.fields import parse_object

T = TypeVar("T")
# A refused upload is read and dropped this far, so that the client gets to read why.
DROPPED_BYTES = 64 << 20
DROP_SECONDS = 2.0
LARGE_BYTES = 256 << 10
# All bodies together may hold this many times the limit of one.
HELD_BODIES = 4


class SlowBodyError(RequestError):
    status = 408


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Bodies:
    """Reads bodies: each within `limit` bytes and `deadline` seconds, all being read or used within a budget.

    A large one is parsed, and used, alone: as Python values it takes many times its size.
    """

    def __init__(self, limit: int, deadline: float) -> None:
        self._limit = limit
        self._deadline = deadline
        self._held = 0
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def object(self, request: Request) -> AsyncIterator[dict[str, object]]:
        """The body as a JSON object, for as long as the block takes."""
        parts: list[bytes] = []
        try:
            await self._read_all(request, parts)
            size = sum(map(len, parts))
            async with self._alone if size > LARGE_BYTES else nullcontext():
                yield parse_object(b"".join(parts))
        finally:
            self._held -= sum(map(len, parts))

    async def _read_all(self, request: Request, parts: list[bytes]) -> None:
        try:
            async with asyncio.timeout(self._deadline):
                await self._read(request, parts)
        except TimeoutError as error:
            raise SlowBodyError(f"the request body did not arrive within {self._deadline:g} s") from error
        except ClientDisconnect as error:
            raise ClientGone from error

    async def _read(self, request: Request, parts: list[bytes]) -> None:
        announced = request.headers.get("content-length", "0")
        size = int(announced) if announced.isdigit() else 0
        await self._check(request, size)
        size = 0
        async for part in request.stream():
            parts.append(part)
            self._held += len(part)
            size += len(part)
            await self._check(request, size)

    async def _check(self, request: Request, size: int) -> None:
        if size > self._limit:
            await _drop(request)
            raise TooLargeError(
                f"the request body has {size} bytes or more, at most {self._limit} are accepted"
            )
        if self._held > HELD_BODIES * self._limit:
            raise OverloadedError(
                f"{self._held} bytes of request bodies are being read; send this one again later"
            )


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
