"""Answers of OpenAI's two endpoints as `Answer` wants them: a whole body, or a stream of events that may have ids."""

from collections.abc import Iterable, Iterator

from afserve.errors import AfserveError
from afserve.server.answers.writer import COMMENT, EVENTS
from afserve.server.bodies.openai import StreamOptions
from afserve.server.replies.chat_reply import ChatDraft, ChatReply
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.completion_reply import CompletionDraft, CompletionReply
from afserve.server.replies.record import DONE as LAST
from afserve.server.replies.record import USAGE, Position, stamped
from afserve.server.replies.refusal import error_body, internal_error
from afserve.server.replies.wording import DONE, Usage, encode, event

Reply = CompletionReply | ChatReply


def surface_of(
    reply: Reply, stream: StreamOptions | None, choices: int, since: Position | None = None
) -> "OpenAIBody | OpenAIStream":
    """None asks for a whole answer."""
    return OpenAIBody(reply, choices) if stream is None else OpenAIStream(reply, stream, since)


class OpenAIBody:
    """An answer that is no stream, of so many choices."""

    media = EVENTS
    comment: bytes | None = COMMENT
    at_once = False

    def __init__(self, reply: Reply, choices: int) -> None:
        self._reply, self.size = reply, 0
        self._drafts = [reply.draft(index) for index in range(choices)]

    def begin(self, usage: Usage) -> bytes:
        return b""

    def say(self, index: int, piece: TextPiece, usage: Usage) -> Iterator[bytes]:
        draft = self._drafts[index]
        self.size -= draft.size
        for _ in draft.add_piece(piece):
            yield b""
        self.size += draft.size

    def end(self, usage: Usage) -> bytes:
        return b""

    def failed(self, error: AfserveError | None) -> bytes:
        return b""

    def body(self, usage: Usage) -> Iterator[bytes]:
        return _whole(self._reply, self._drafts, usage)


class OpenAIStream:
    """With `since` every event has an id, see `position`, and what came before is not said again."""

    media = EVENTS
    comment: bytes | None = COMMENT
    size = 0

    def __init__(self, reply: Reply, options: StreamOptions, since: Position | None = None) -> None:
        self._reply, self._counts, self._tells_usage = reply, options.continuous, options.include_usage
        self.at_once = reply.is_plain
        self._tail = ',"usage":null' if options.include_usage else ""
        self._at = None if since is None else Position(since.tokens, since.ended)
        self._last, self._said = ("", "") if since is None else (since.last, since.id)

    def begin(self, usage: Usage) -> bytes:
        return b""

    def say(self, index: int, piece: TextPiece, usage: Usage) -> Iterable[bytes]:
        """Nothing where the client is to see nothing of it."""
        if self._at is not None and not piece.old:
            self._at.passed(index, piece)
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

    def end(self, usage: Usage) -> bytes:
        counts = b""
        if self._tells_usage and not self._last:
            counts = self._stamped(_usage_chunk(self._reply, usage), USAGE)
        return counts + self._stamped(DONE, LAST)

    def failed(self, error: AfserveError | None) -> bytes:
        return self._stamped(event(internal_error() if error is None else error_body(error)) + DONE)

    def body(self, usage: Usage) -> Iterable[bytes]:
        return ()

    def _stamped(self, events: bytes, id: str | None = None) -> bytes:
        """With the id of what has passed, or with this one."""
        if self._at is None:
            return events
        before, self._said = self._said, id or self._at.id
        return stamped(events, before, self._said)


def _usage_chunk(reply: Reply, usage: Usage) -> bytes:
    return event({**reply.header.fields(reply.streamed), "choices": [], "usage": reply.usage(usage)})


def _whole(reply: Reply, choices: Iterable[CompletionDraft | ChatDraft], usage: Usage) -> Iterator[bytes]:
    """The body of an answer that is no stream, choice by choice."""
    lead = encode(reply.header.fields(reply.kind))[:-1] + ',"choices":['
    for choice in choices:
        yield (lead + "".join(choice.json_parts())).encode()
        lead = ","
    yield f'],"usage":{encode(reply.usage(usage))}}}'.encode()
