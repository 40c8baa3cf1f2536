"""An answer in OpenAI's words, of either endpoint: the whole body, and what ends a stream."""

from collections.abc import Iterable, Iterator

from afserve.server.replies.chat_reply import ChatDraft, ChatReply
from afserve.server.replies.completion_reply import CompletionDraft, CompletionReply
from afserve.server.replies.wording import Usage, encode, event

Reply = CompletionReply | ChatReply


def usage_chunk(reply: Reply, usage: Usage) -> bytes:
    return event({**reply.header.fields(reply.streamed), "choices": [], "usage": reply.usage(usage)})


def whole(reply: Reply, choices: Iterable[CompletionDraft | ChatDraft], usage: Usage) -> Iterator[bytes]:
    """The body of an answer that is no stream, choice by choice."""
    lead = encode(reply.header.fields(reply.kind))[:-1] + ',"choices":['
    for choice in choices:
        yield (lead + "".join(choice.parts())).encode()
        lead = ","
    yield f'],"usage":{encode(reply.usage(usage))}}}'.encode()
