"""An answer as an ASGI response: collected and sent whole, or streamed as server-sent events.

The engine's refusal before the first token is still an HTTP status; after it, an error event in the stream.
When the client leaves, generation is cancelled.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from afserve.errors import AfserveError, RequestError
from afserve.server.answers.answering import Answering, DrainingError, within
from afserve.server.answers.generation import PieceWriter, Task
from afserve.server.bodies.openai import StreamOptions
from afserve.server.http.body import ClientGone, SlowReader, until_gone
from afserve.server.http.direct import Direct, direct_of
from afserve.server.http.settings import ServerSettings
from afserve.server.replies.chat_reply import ChatDraft
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.completion_reply import CompletionDraft, CompletionReply
from afserve.server.replies.position import DONE as LAST
from afserve.server.replies.position import USAGE, Position, stamped
from afserve.server.replies.record import Numbered
from afserve.server.replies.refusal import error_body, internal_error
from afserve.server.replies.replies import Reply, usage_chunk, whole
from afserve.server.replies.wording import DONE, Usage, encode, event

STALLED = "the client does not read"
QUIET_SECONDS = 5.0  # after which a stream that has begun says that it is still there
COMMENT = b": still here\n\n"  # what clients of server-sent events skip
SLICE_BYTES = 256 << 10  # of a whole answer, for each of which a client has the write deadline
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Runs `task` while the client is there, and reads: for `write_deadline` it may take nothing."""

    def __init__(
        self,
        source: "Source",
        answering: Answering,
        task: Task,
        reply: Reply,
        stream: StreamOptions | None,
        limits: ServerSettings,
    ) -> None:
        super().__init__()
        self._source = source
        self._answering = answering
        self._task = task
        self._reply = reply
        self._stream = stream
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send, self._limits.write_deadline, direct=direct_of(scope))
        try:
            if self._stream is None:
                await self._send_whole(receive, writer)
            else:
                await self._send_stream(receive, writer, self._stream)
        finally:
            writer.close()

    async def _send_whole(self, receive: Receive, writer: "Writer") -> None:
        parts = await until_gone(receive, self._collect())
        await writer.whole(parts)

    async def _collect(self) -> list[bytes]:
        usage = Usage(self._task.prompt_tokens)
        drafts = [self._reply.draft(i) for i in range(self._task.choices)]
        size, most = 0, self._limits.max_answer_bytes
        async with (
            within(self._source.deadline, watched=self._task.watched),
            aclosing(self._source.pieces(None)) as pieces,
        ):
            async for index, piece in pieces:
                before = drafts[index].size
                await _add(drafts[index], piece)
                usage.add(piece)
                size += drafts[index].size - before
                if size > most:
                    raise RequestError(
                        f"the answer has more than {most} bytes, the limit of --max-answer-bytes; ask for it as a "
                        "stream, or for less"
                    )
        return await _in_turns(whole(self._reply, drafts, usage))

    async def _send_stream(self, receive: Receive, stream: "Writer", options: StreamOptions) -> None:
        try:
            await until_gone(receive, self._write_all(stream, options))
        except AfserveError as error:
            await stream.fail(self._source.stamped(event(error_body(error)) + DONE), error)
        except asyncio.CancelledError as error:
            if not self._answering.aborted:
                raise
            await stream.fail(self._source.stamped(event(error_body(DrainingError())) + DONE), error)
        except ClientGone:
            raise
        except Exception as error:
            await stream.fail(self._source.stamped(event(internal_error()) + DONE), error)
            raise

    async def _write_all(self, stream: "Writer", options: StreamOptions) -> None:
        usage, source = Usage(self._task.prompt_tokens), self._source
        events = _Events(self._reply, source, options, usage, stream)
        async with (
            within(source.deadline, watched=self._task.watched),
            aclosing(source.pieces(events if self._reply.is_plain else None)) as pieces,
        ):
            async for index, piece in pieces:
                if data := await events.of(index, piece):
                    await stream.write(data)
        if options.include_usage and not source.has_usage:
            await stream.write(source.stamped(usage_chunk(self._reply, usage), USAGE))
        await stream.end(source.stamped(DONE, LAST))


class _Events:
    """Pieces as events of one stream, for who writes them or, as a `PieceWriter`, written at once."""

    __slots__ = ("_counts", "_reply", "_source", "_stream", "_tail", "_usage")

    def __init__(
        self, reply: Reply, source: "Source", options: StreamOptions, usage: Usage, stream: "Writer"
    ) -> None:
        self._reply, self._source, self._usage, self._stream = reply, source, usage, stream
        self._counts = options.continuous
        self._tail = ',"usage":null' if options.include_usage else ""

    def can_write(self) -> bool:
        return self._stream.free

    def write_piece(self, index: int, piece: TextPiece) -> None:
        if self._shows(index, piece):
            chunk = self._reply.plain(index, piece, self._tail)
            if chunk:
                self._stream.write_now(self._source.stamped(chunk))

    async def of(self, index: int, piece: TextPiece) -> bytes:
        """Nothing where the client is to see nothing of it."""
        if not self._shows(index, piece):
            return b""
        chunk = self._reply.plain(index, piece, self._tail)
        if chunk is None:
            chunk = await self._drafted(index, piece)
        return self._source.stamped(chunk) if chunk and not piece.old else b""

    def _shows(self, index: int, piece: TextPiece) -> bool:
        self._usage.add(piece)
        self._source.passed(index, piece)
        if self._counts:
            self._tail = f',"usage":{encode(self._reply.usage(self._usage))}'
        return bool(piece.text or piece.logprobs or piece.finish_reason or piece.prompt_logprobs)

    async def _drafted(self, index: int, piece: TextPiece) -> bytes:
        reply = self._reply
        assert isinstance(reply, CompletionReply)
        draft = reply.draft(index)
        await _add(draft, piece)
        return reply.chunk(draft, self._tail)


class Whole(Response):
    """Bytes that are there already, sent at the pace at which the client reads."""

    def __init__(self, parts: Sequence[bytes], deadline: float, media: bytes = JSON) -> None:
        super().__init__()
        self._parts, self._deadline, self._media = parts, deadline, media

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send, self._deadline)
        try:
            await writer.whole(self._parts, self._media)
        finally:
            writer.close()


class Source:
    """Where an answer's pieces come from, and for how many seconds at most.

    With `since` every event of a stream has an id, see `position`.
    """

    __slots__ = ("_at", "_said", "deadline", "has_usage", "pieces")

    def __init__(
        self,
        pieces: Callable[[PieceWriter | None], AsyncGenerator[Numbered, None]],
        since: Position | None = None,
        deadline: float | None = None,
    ) -> None:
        self.pieces, self.deadline = pieces, deadline
        self.has_usage = since is not None and since.last != ""
        self._at = None if since is None else Position(since.tokens, since.ended)
        self._said = "" if since is None else since.id

    def passed(self, index: int, piece: TextPiece) -> None:
        if self._at is not None and not piece.old:
            self._at.passed(index, piece)

    def stamped(self, events: bytes, id: str | None = None) -> bytes:
        """With the id of what has passed, or with this one."""
        if self._at is None:
            return events
        before, self._said = self._said, id or self._at.id
        return stamped(events, before, self._said)


async def _add(draft: CompletionDraft | ChatDraft, piece: TextPiece) -> None:
    for _ in draft.add(piece):
        await asyncio.sleep(0)


async def _in_turns(parts: Iterator[bytes]) -> list[bytes]:
    """Small ones as one, with a turn of the event loop between large ones."""
    drawn, small = [], b""
    for part in parts:
        small += part
        if len(small) > SLICE_BYTES:
            drawn.append(small)
            small = b""
            await asyncio.sleep(0)
    return [*drawn, small]


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

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._timer = self._loop.call_later(self._deadline, self._look)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def whole(self, parts: Sequence[bytes], media: bytes = JSON) -> None:
        """An answer that is no stream, in slices: a client that takes none of them for the deadline is ended."""
        size = str(sum(map(len, parts))).encode()
        await self.begin([(b"content-type", media), (b"content-length", size)])
        slices = [part[at : at + SLICE_BYTES] for part in parts for at in range(0, len(part), SLICE_BYTES)]
        for piece in slices[:-1]:
            await self.write(piece)
        await self.end(slices[-1] if slices else b"")

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if not self.begun:
            if self._words is not None:
                self._quiet = self._loop.call_later(QUIET_SECONDS, self._look_quiet)
            await self.begin(self._headers)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @property
    def free(self) -> bool:
        """Whether `write_now` may be called: the stream has begun, and nothing is being written."""
        return (
            self._direct is not None
            and self._timer is not None
            and self._writer is None
            and not self._ended
            and (self._comment is None or self._comment.done())
            and self._direct.free()
        )

    def write_now(self, data: bytes) -> None:
        """What nobody has to wait for, because the socket is `free`."""
        assert self._direct is not None
        self._since = self._loop.time()
        self._direct.write(data)

    async def end(self, data: bytes) -> None:
        self._ended = True
        await self.write(data, more=False)

    async def fail(self, last: bytes, error: BaseException) -> None:
        """These last events where the stream has begun; before that the caller's exception is the answer."""
        if not self.begun:
            raise error
        if not self._ended:
            await self.end(last)

    def close(self) -> None:
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
