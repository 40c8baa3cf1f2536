"""Answers of OpenAI's two endpoints as `Answer` wants them: a whole body, or a stream of events that may have ids."""

from collections.abc import Iterable, Iterator

from afserve.errors import AfserveError
from afserve.server.bodies.openai import StreamOptions
from afserve.server.replies.chat_reply import ChatReply
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.completion_reply import CompletionReply
from afserve.server.replies.record import DONE as LAST
from afserve.server.replies.record import USAGE, Position, stamped
from afserve.server.replies.refusal import error_body, internal_error
from afserve.server.replies.surface import Surface
from afserve.server.replies.wording import DONE, Usage, encode, event

Reply = CompletionReply | ChatReply


def surface_of(
    reply: Reply, stream: StreamOptions | None, choices: int, since: Position | None = None
) -> "OpenAIBody | OpenAIStream":
    """None asks for a whole answer."""
    return OpenAIBody(reply, choices) if stream is None else OpenAIStream(reply, stream, since)


class OpenAIBody(Surface):
    """An answer that is no stream, of so many choices."""

    def __init__(self, reply: Reply, choices: int) -> None:
        self._reply = reply
        self._drafts = [reply.draft(index) for index in range(choices)]

    def say_piece(self, index: int, piece: TextPiece, usage: Usage) -> Iterator[bytes]:
        draft = self._drafts[index]
        self.size -= draft.size
        for _ in draft.add_piece(piece):
            yield b""
        self.size += draft.size + self._reply.routed.add_piece(index, piece)

    def whole_body(self, usage: Usage) -> Iterator[bytes]:
        reply, lead = self._reply, encode(self._reply.header.fields(self._reply.kind))[:-1] + ',"choices":['
        for choice in self._drafts:
            yield (lead + "".join(choice.json_parts())).encode()
            lead = ","
        yield f'],"usage":{encode(reply.usage(usage))}}}'.encode()


class OpenAIStream(Surface):
    """With `since` every event has an id, see `Position`, and what came before is not said again."""

    def __init__(self, reply: Reply, options: StreamOptions, since: Position | None = None) -> None:
        self._reply, self._counts, self._tells_usage = reply, options.continuous, options.include_usage
        self.at_once = reply.is_plain
        self._tail = ',"usage":null' if options.include_usage else ""
        self._at = None if since is None else Position(since.tokens, since.ended)
        self._last, self._said = ("", "") if since is None else (since.last, since.id)

    def say_piece(self, index: int, piece: TextPiece, usage: Usage) -> Iterable[bytes]:
        """Nothing where the client is to see nothing of it."""
        if self._at is not None and not piece.old:
            self._at.passed(index, piece)
        self._reply.routed.add_piece(index, piece)
        if self._counts:
            self._tail = f',"usage":{encode(self._reply.usage(usage))}'
        if not (piece.text or piece.logprobs or piece.finish_reason or piece.prompt_logprobs):
            return ()
        chunk = self._reply.plain(index, piece, self._tail)
        if chunk is None:
            return self._drafted(index, piece)
        if not chunk or piece.old:
            return ()
        return (chunk if self._at is None else self._stamped(chunk),)

    def _drafted(self, index: int, piece: TextPiece) -> Iterator[bytes]:
        reply = self._reply
        assert isinstance(reply, CompletionReply)
        draft = reply.draft(index)
        for _ in draft.add_piece(piece):
            yield b""
        chunk = reply.chunk(draft, self._tail)
        if not piece.old:
            yield self._stamped(chunk)

    def stream_end(self, usage: Usage) -> bytes:
        counts, reply = b"", self._reply
        if self._tells_usage and not self._last:
            said = {**reply.header.fields(reply.streamed), "choices": [], "usage": reply.usage(usage)}
            counts = self._stamped(event(said), USAGE)
        return counts + self._stamped(DONE, LAST)

    def say_failure(self, error: AfserveError | None) -> bytes:
        return self._stamped(event(internal_error() if error is None else error_body(error)) + DONE)

    def _stamped(self, events: bytes, id: str | None = None) -> bytes:
        """With the id of what has passed, or with this one."""
        if self._at is None:
            return events
        before, self._said = self._said, id or self._at.id
        return stamped(events, before, self._said)
