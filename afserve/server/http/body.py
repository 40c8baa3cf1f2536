"""Reading a request: its body within limits, and noticing that the client has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from afserve.errors import OverloadedError, RequestError, TooLargeError

T = TypeVar("T")
# A refused upload is read and dropped this far, so that the client gets to read why.
DROPPED_BYTES = 64 << 20
DROP_SECONDS = 2.0
# Below this a body does not count: as many as there may be connections can be held.
SMALL_BYTES = 16 << 10
# All larger bodies together may hold this many times the limit of one.
HELD_BODIES = 4


class SlowBodyError(RequestError):
    status = 408


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""

    reason = "left"
    aborts = False  # its connection: it is there, and gets no more


class SlowReader(ClientGone):
    """The client is there and does not read: its answer is not kept for it."""

    reason, aborts = "slow_reader", True


class CountedBody:
    """A body, whole or on its way. It counts until `with` ends or it is released."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.parts: list[bytes] = []
        self.size = 0
        self.data = b""
        self.timeout: asyncio.Timeout | None = None
        self.put_off = False

    def release_bytes(self) -> None:
        self._bodies.forget_body(self)
        self.parts, self.data = [], b""

    def __enter__(self) -> "CountedBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.release_bytes()


class Bodies:
    """Reads bodies: each within `limit` bytes and `deadline` seconds, all large ones within a budget.

    When the budget is used up, the one that began first and is not whole yet is refused: it stalls, or is slowest.
    """

    def __init__(self, limit: int, deadline: float) -> None:
        self._limit = limit
        self._deadline = deadline
        self._large: dict[CountedBody, int] = {}  # oldest first
        self.held_bytes = 0

    async def read_body(self, request: Request) -> CountedBody:
        """The whole body; release it, or use it in a `with`."""
        body = CountedBody(self)
        try:
            await self._read_all(request, body)
        except BaseException:
            body.release_bytes()
            raise
        body.data, body.parts = b"".join(body.parts), []
        return body

    def forget_body(self, body: CountedBody) -> None:
        self.held_bytes -= self._large.pop(body, 0)

    async def _read_all(self, request: Request, body: CountedBody) -> None:
        try:
            async with asyncio.timeout(self._deadline) as body.timeout:
                await self._read(request, body)
        except TimeoutError as error:
            if body.put_off:
                raise OverloadedError(
                    "large bodies that are still to come use all memory for them; send this one again later"
                ) from error
            raise SlowBodyError(f"the request body did not arrive within {self._deadline:g} s") from error
        except (ClientDisconnect, h11.LocalProtocolError) as error:
            # The second: the parser has refused what follows and answered; "100 Continue" cannot be sent any more.
            raise ClientGone from error
        finally:
            body.timeout = None

    async def _read(self, request: Request, body: CountedBody) -> None:
        announced = request.headers.get("content-length", "0")  # h11 reads 20 digits
        await self._check(request, body, int(announced) if announced.isdigit() else 0)
        async for part in request.stream():
            body.parts.append(part)
            body.size += len(part)
            await self._check(request, body, body.size)
            if body.size > SMALL_BYTES:
                self._count(body)

    async def _check(self, request: Request, body: CountedBody, size: int) -> None:
        if size > self._limit:
            if body.size or "expect" not in request.headers:  # else it is not invited to send
                await _drop(request)
            raise TooLargeError(
                f"the request body has {size} bytes or more, at most {self._limit} are accepted"
            )

    def _count(self, body: CountedBody) -> None:
        if body.put_off:
            return
        self.held_bytes += body.size - self._large.get(body, 0)
        self._large[body] = body.size
        if self.held_bytes > HELD_BODIES * self._limit:
            self._put_off_first()

    def _put_off_first(self) -> None:
        """There is one: whoever asks is not whole yet."""
        first = next(b for b in self._large if b.timeout is not None)
        first.put_off = True
        assert first.timeout is not None
        first.timeout.reschedule(asyncio.get_running_loop().time())
        self.forget_body(first)


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
