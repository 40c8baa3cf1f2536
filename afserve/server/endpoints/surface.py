"""What an API's answers have in common: pieces of one choice in, bytes of a stream or one body out."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afserve.errors import AfserveError, RequestError
from afserve.server.answers.answer import Writer
from afserve.server.answers.answering import Answering, DrainingError, within
from afserve.server.answers.generation import Task, generate
from afserve.server.answers.hosted import Hosted
from afserve.server.http.body import ClientGone, until_gone
from afserve.server.http.direct import direct_of
from afserve.server.http.settings import ServerSettings
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.wording import Usage

Keep = Callable[[Usage], Awaitable[None]]


class Surface(Protocol):
    """One answer in one API's words. What `take` gave becomes part of `body`."""

    media: bytes
    comment: bytes | None

    def begin(self, usage: Usage) -> bytes:
        """What a stream says first, once its first piece is there."""
        ...

    def take(self, piece: TextPiece) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def failed(self, error: AfserveError | None) -> bytes:
        """What a stream that has begun says of its end; None is a bug, whose reason the log has."""
        ...

    def body(self, usage: Usage) -> bytes:
        """The whole answer, once everything was taken."""
        ...


class SurfaceAnswer(Response):
    """Runs `task` while the client is there; every API but the two of OpenAI that `Answer` serves."""

    def __init__(
        self,
        model: Hosted,
        answering: Answering,
        task: Task,
        surface: Surface,
        stream: bool,
        limits: ServerSettings,
        keep: Keep | None = None,
    ) -> None:
        """`keep` is awaited before an answer's end is said, so that who has read it can refer to it."""
        super().__init__()
        self._keep = keep
        self._model, self._answering, self._task = model, answering, task
        self._surface, self._stream, self._limits = surface, stream, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        surface = self._surface
        writer = Writer(send, self._limits.write_deadline, surface.media, surface.comment, direct_of(scope))
        try:
            if self._stream:
                await self._send_stream(receive, writer)
            else:
                await writer.whole([await until_gone(receive, self._collect())])
        finally:
            writer.close()

    async def _collect(self) -> bytes:
        usage, size, most = Usage(self._task.prompt_tokens), 0, self._limits.max_answer_bytes
        async with (
            within(self._task.scheduling.deadline, watched=self._task.watched),
            aclosing(generate(self._model, self._task)) as pieces,
        ):
            async for _, piece in pieces:
                usage.add(piece)
                self._surface.take(piece)
                size += len(piece.text)
                if size > most:
                    raise RequestError(
                        f"the answer has more than {most} bytes, the limit of --max-answer-bytes; ask for a stream"
                    )
        self._surface.end(usage)
        if self._keep is not None:
            await self._keep(usage)
        return self._surface.body(usage)

    async def _send_stream(self, receive: Receive, writer: Writer) -> None:
        try:
            await until_gone(receive, self._write_all(writer))
        except AfserveError as error:
            await writer.fail(self._surface.failed(error), error)
        except ClientGone:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                await writer.fail(self._surface.failed(None), error)
                raise
            if not self._answering.aborted:
                raise
            await writer.fail(self._surface.failed(DrainingError()), error)

    async def _write_all(self, writer: Writer) -> None:
        usage, surface = Usage(self._task.prompt_tokens), self._surface
        begun = False
        async with (
            within(self._task.scheduling.deadline, watched=self._task.watched),
            aclosing(generate(self._model, self._task, _Events(surface, usage, writer))) as pieces,
        ):
            async for _, piece in pieces:
                usage.add(piece)
                opening = b"" if begun else surface.begin(usage)
                begun = True
                if data := opening + surface.take(piece):
                    await writer.write(data)
        end = surface.end(usage)
        if self._keep is not None:
            await self._keep(usage)
        await writer.end(end)


class _Events:
    """Pieces of a stream that has begun, written at once: a `PieceWriter`."""

    def __init__(self, surface: Surface, usage: Usage, writer: Writer) -> None:
        self._surface, self._usage, self._writer = surface, usage, writer

    def can_write(self) -> bool:
        return self._writer.free

    def write_piece(self, index: int, piece: TextPiece) -> None:
        self._usage.add(piece)
        if data := self._surface.take(piece):
            self._writer.write_now(data)
