"""What is sent to a client at the pace at which it reads: an answer that is there already, or a stream as it comes."""

import asyncio
import contextlib
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from afserve.server.http.body import SlowReader
from afserve.server.http.protocol import Direct
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.surface import COMMENT, EVENTS, Surface
from afserve.server.replies.wording import Usage

STALLED = "the client does not read"
QUIET_SECONDS = 5.0  # after which a stream that has begun says that it is still there
SLICE_BYTES = 256 << 10  # of a whole answer, for each of which a client has the write deadline
JSON = b"application/json"
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Writer:
    """The response side of one answer. Headers go out with the first write; `close` when it is over.

    One timer per answer, not per write, notices a client that does not read; another one, of a stream, that nothing was
    written for some seconds, and writes a comment, so that nobody on the way takes the connection for dead.
    """

    __slots__ = (
        "_comment",
        "_deadline",
        "_direct",
        "_ended",
        "_headers",
        "_loop",
        "_quiet",
        "_send_message",
        "_since",
        "_timer",
        "_words",
        "_writer",
    )

    def __init__(
        self,
        send: Send,
        deadline: float,
        media: bytes = EVENTS,
        comment: bytes | None = COMMENT,
        direct: Direct | None = None,
    ) -> None:
        self._direct = direct
        self._headers = [(b"content-type", media), *_STREAM_HEADERS]
        self._words = comment
        self._send_message = send
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.Task[object] | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._comment: asyncio.Future[None] | None = None
        self._ended = False

    @property
    def begun(self) -> bool:
        return self._timer is not None

    async def begin_response(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._timer = self._loop.call_later(self._deadline, self._look)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write_whole(self, parts: Sequence[bytes], media: bytes = JSON) -> None:
        """An answer that is no stream, in slices: a client that takes none of them for the deadline is ended."""
        size = str(sum(map(len, parts))).encode()
        await self.begin_response([(b"content-type", media), (b"content-length", size)])
        slices = [part[at : at + SLICE_BYTES] for part in parts for at in range(0, len(part), SLICE_BYTES)]
        for piece in slices[:-1]:
            await self.write_part(piece)
        await self.end_response(slices[-1] if slices else b"")

    async def write_part(self, data: bytes, *, more: bool = True) -> None:
        if not self.begun:
            if self._words is not None:
                self._quiet = self._loop.call_later(QUIET_SECONDS, self._look_quiet)
            await self.begin_response(self._headers)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @property
    def can_write_now(self) -> bool:
        """Whether `write_now` may be called: the stream has begun, and nothing is being written."""
        return (
            self._direct is not None
            and self._timer is not None
            and self._writer is None
            and not self._ended
            and (self._comment is None or self._comment.done())
            and self._direct.takes_more()
        )

    def write_now(self, data: bytes) -> None:
        """What nobody has to wait for, because the socket is `free`."""
        assert self._direct is not None
        self._since = self._loop.time()
        self._direct.write_chunk(data)

    async def end_response(self, data: bytes) -> None:
        self._ended = True
        await self.write_part(data, more=False)

    async def end_with_failure(self, last: bytes, error: BaseException) -> None:
        """These last events where the stream has begun; before that the caller's exception is the answer."""
        if not self.begun:
            raise error
        if not self._ended:
            await self.end_response(last)

    def stop_timers(self) -> None:
        for pending in (self._timer, self._quiet, self._comment):
            if pending is not None:
                pending.cancel()

    async def _send(self, message: Message) -> None:
        self._writer, self._since = asyncio.current_task(), self._loop.time()
        try:
            if self._comment is not None and not self._comment.done():
                await asyncio.wait({self._comment})
            await self._send_message(message)
        except asyncio.CancelledError as error:
            if error.args == (STALLED,):
                raise SlowReader from error
            raise
        finally:
            self._writer = None

    def _look(self) -> None:
        """Ends the writing task when its write has lasted too long, else looks again later."""
        left = self._since + self._deadline - self._loop.time() if self._writer else self._deadline
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._writer is not None:
            self._writer.cancel(STALLED)

    def _look_quiet(self) -> None:
        """Comments come between two writes only, so a client that does not read gets none."""
        left = self._since + QUIET_SECONDS - self._loop.time()
        if left <= 0:
            left = QUIET_SECONDS
            if self._writer is None and not self._ended and (self._comment is None or self._comment.done()):
                self._comment = self._loop.create_task(self._send_comment())
        self._quiet = self._loop.call_later(left, self._look_quiet)

    async def _send_comment(self) -> None:
        """That the client has gone is the answering task's business."""
        with contextlib.suppress(OSError):
            await self._send_message({"type": "http.response.body", "body": self._words, "more_body": True})


class Whole(Response):
    """Bytes that are there already, sent at the pace at which the client reads."""

    def __init__(self, parts: Sequence[bytes], deadline: float, media: bytes = JSON) -> None:
        super().__init__()
        self._parts, self._deadline, self._media = parts, deadline, media

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send, self._deadline)
        try:
            await writer.write_whole(self._parts, self._media)
        finally:
            writer.stop_timers()


class PieceWriter:
    """Pieces of a stream that has begun, written without a turn of the event loop while its task waits for the next."""

    __slots__ = ("_surface", "_usage", "_writer")

    def __init__(self, surface: Surface, usage: Usage, writer: Writer) -> None:
        self._surface, self._usage, self._writer = surface, usage, writer

    def can_write(self) -> bool:
        return self._writer.can_write_now

    def write_piece(self, index: int, piece: TextPiece) -> None:
        """One that ends nothing."""
        self._usage.count_piece(piece)
        for data in self._surface.say_piece(index, piece, self._usage):
            self._writer.write_now(data)
