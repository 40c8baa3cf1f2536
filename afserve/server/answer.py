"""An answer as an ASGI response: collected and sent whole, or streamed as server-sent events.

The engine's refusal before the first token is still an HTTP status; after it, an error event in the stream.
When the client leaves, generation is cancelled.
"""

import asyncio
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from afserve.errors import AfserveError
from afserve.server.body import ClientGone, until_gone
from afserve.server.generation import Generator, Task
from afserve.server.inflight import DrainingError, Inflight
from afserve.server.openai import StreamOptions
from afserve.server.refusal import error_body, internal_error
from afserve.server.replies import DONE, Choice, Reply, Usage, encode, event

STALLED = "the client does not read"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Runs `task` while the client is there. `write_deadline` bounds how long a client may refuse to read."""

    def __init__(
        self,
        generator: Generator,
        inflight: Inflight,
        task: Task,
        reply: Reply,
        stream: StreamOptions | None,
        write_deadline: float,
    ) -> None:
        super().__init__()
        self._generator = generator
        self._inflight = inflight
        self._task = task
        self._reply = reply
        self._stream = stream
        self._write_deadline = write_deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream is None:
            whole = await until_gone(receive, self._collect())
            await whole(scope, receive, send)
        else:
            stream = _Stream(send, self._write_deadline)
            try:
                await self._send_stream(receive, stream, self._stream)
            finally:
                stream.close()

    async def _collect(self) -> Response:
        usage = Usage(self._task.prompt_tokens)
        choices = [Choice() for _ in self._task.requests()]
        async with aclosing(self._generator.run(self._task)) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
                usage.add(piece)
        return Response(encode(self._reply.body(choices, usage)), media_type="application/json")

    async def _send_stream(self, receive: Receive, stream: "_Stream", options: StreamOptions) -> None:
        try:
            await until_gone(receive, self._write_all(stream, options))
        except AfserveError as error:
            await stream.fail(error_body(error), error)
        except asyncio.CancelledError as error:
            if not self._inflight.aborted:
                raise
            await stream.fail(error_body(DrainingError()), error)
        except ClientGone:
            raise
        except Exception as error:
            await stream.fail(internal_error(), error)
            raise

    async def _write_all(self, stream: "_Stream", options: StreamOptions) -> None:
        usage = Usage(self._task.prompt_tokens)
        tail = ',"usage":null' if options.include_usage else ""
        async with aclosing(self._generator.run(self._task)) as pieces:
            async for index, piece in pieces:
                usage.add(piece)
                if options.continuous:
                    tail = f',"usage":{encode(usage.body())}'
                if piece.text or piece.logprobs or piece.finish_reason or piece.prompt_logprobs:
                    await stream.write(self._reply.chunks(index, piece, tail))
        if options.include_usage:
            await stream.write(self._reply.usage_chunk(usage))
        await stream.end(DONE)


class _Stream:
    """The response side of one stream. Headers go out with the first write; `close` when it is over.

    One timer per stream, not per write, notices a client that does not read.
    """

    def __init__(self, send: Send, deadline: float) -> None:
        self._send_message = send
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.Task[object] | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def begun(self) -> bool:
        return self._timer is not None

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if not self.begun:
            self._timer = self._loop.call_later(self._deadline, self._look)
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def end(self, data: bytes) -> None:
        self._ended = True
        await self.write(data, more=False)

    async def fail(self, body: dict[str, object], error: BaseException) -> None:
        """An error event where the stream has begun; before that the caller's exception is the answer."""
        if not self.begun:
            raise error
        if not self._ended:
            await self.end(event(body) + DONE)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _send(self, message: Message) -> None:
        self._writer, self._since = asyncio.current_task(), self._loop.time()
        try:
            await self._send_message(message)
        except asyncio.CancelledError as error:
            if error.args == (STALLED,):
                raise ClientGone from error
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
