"""An answer as an ASGI response, whatever API it is of: collected and sent whole, or streamed as it comes.

The engine's refusal before the first token is still an HTTP status; after it, the API's own event of an error. When the
client leaves, generation is cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afserve.errors import AfserveError, RequestError
from afserve.server.answers.answering import Answering, DrainingError, within
from afserve.server.answers.generation import Task
from afserve.server.answers.writer import SLICE_BYTES, PieceWriter, Writer
from afserve.server.http.body import ClientGone, until_gone
from afserve.server.http.protocol import direct_of
from afserve.server.http.settings import ServerSettings
from afserve.server.replies.record import Numbered
from afserve.server.replies.surface import Surface
from afserve.server.replies.wording import Usage

Pieces = Callable[[PieceWriter | None], AsyncGenerator[Numbered, None]]
Keep = Callable[[Usage], Awaitable[None]]


class Answer(Response):
    """Computes or reads what `task` asked for while the client is there, and reads: for `write_deadline` it may take
    nothing."""

    def __init__(
        self,
        pieces: Pieces,
        answering: Answering,
        task: Task,
        surface: Surface,
        stream: bool,
        limits: ServerSettings,
        *,
        deadline: float | None = None,
        keep: Keep | None = None,
    ) -> None:
        """`deadline` in seconds for all of it. `keep` is awaited before an answer's end is said, so that who has read
        it can refer to it."""
        super().__init__()
        self._pieces, self._answering, self._task, self._surface = pieces, answering, task, surface
        self._stream, self._limits, self._deadline, self._keep = stream, limits, deadline, keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        surface = self._surface
        writer = Writer(send, self._limits.write_deadline, surface.media, surface.comment, direct_of(scope))
        try:
            if self._stream:
                await self._send_stream(receive, writer)
            else:
                await writer.write_whole(await until_gone(receive, self._collect()))
        finally:
            writer.stop_timers()

    async def _collect(self) -> list[bytes]:
        usage, surface, most = Usage(self._task.prompt_tokens), self._surface, self._limits.max_answer_bytes
        async with within(self._deadline, watched=self._task.watched), aclosing(self._pieces(None)) as pieces:
            async for index, piece in pieces:
                usage.count_piece(piece)
                await _in_turns(surface.say_piece(index, piece, usage))
                if surface.size > most:
                    raise RequestError(
                        f"the answer has more than {most} bytes, the limit of --max-answer-bytes; ask for it as a "
                        "stream, or for less"
                    )
        surface.stream_end(usage)
        if self._keep is not None:
            await self._keep(usage)
        return await _sliced(surface.whole_body(usage))

    async def _send_stream(self, receive: Receive, writer: Writer) -> None:
        surface = self._surface
        try:
            await until_gone(receive, self._write_all(writer))
        except AfserveError as error:
            await writer.end_with_failure(surface.say_failure(error), error)
        except asyncio.CancelledError as error:
            if not self._answering.aborted:
                raise
            await writer.end_with_failure(surface.say_failure(DrainingError()), error)
        except ClientGone:
            raise
        except Exception as error:
            await writer.end_with_failure(surface.say_failure(None), error)
            raise

    async def _write_all(self, writer: Writer) -> None:
        usage, surface = Usage(self._task.prompt_tokens), self._surface
        at_once = PieceWriter(surface, usage, writer) if surface.at_once else None
        begun = False
        async with (
            within(self._deadline, watched=self._task.watched),
            aclosing(self._pieces(at_once)) as pieces,
        ):
            async for index, piece in pieces:
                usage.count_piece(piece)
                opening = b"" if begun else surface.stream_opening(usage)
                begun = True
                if data := opening + await _in_turns(surface.say_piece(index, piece, usage)):
                    await writer.write_part(data)
        end = surface.stream_end(usage)
        if self._keep is not None:
            await self._keep(usage)
        await writer.end_response(end)


async def _in_turns(parts: Iterable[bytes]) -> bytes:
    """Joined, with a turn of the event loop at each that is empty."""
    said = b""
    for part in parts:
        said += part
        if not part:
            await asyncio.sleep(0)
    return said


async def _sliced(parts: Iterable[bytes]) -> list[bytes]:
    """Small ones as one, with a turn of the event loop between large ones."""
    drawn, small = [], b""
    for part in parts:
        small += part
        if len(small) > SLICE_BYTES:
            drawn.append(small)
            small = b""
            await asyncio.sleep(0)
    return [*drawn, small]
