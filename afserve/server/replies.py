"""Answers in OpenAI's words: whole bodies, and stream chunks as bytes. Knows no engine and no sockets.

A stream's fixed parts are encoded once per choice; a token costs one small JSON string.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from afserve.engine.request import TokenLogprob
from afserve.server.choice import Piece
from afserve.server.logprobs import Columns, Scored, chat_entries
from afserve.server.prepared import EchoText
from afserve.tokenizer import Tokenizer

# Tokens of a prompt that are drawn at once: 256 with twenty alternatives take about 5 ms.
TURN = 256
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Usage:
    """Token counts of one request so far. A request that moved counts what each of its nodes had in its cache."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, piece: Piece) -> None:
        self.completion_tokens += piece.tokens
        self.cached_tokens += piece.cached_tokens

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self.cached_tokens, self.prompt_tokens)},
        }


@dataclass(frozen=True, slots=True)
class Header:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts to repeat before each choice's text, as words and as tokens."""

    words: EchoText
    ids: tuple["array[int]", ...]

    def scored(self, p: int, logprobs: Sequence[TokenLogprob | None]) -> Iterator[Scored]:
        added, known = self.words.added[p], len(logprobs)
        for i, token_id in enumerate(self.ids[p]):
            yield Scored(token_id, logprobs[i] if i < known else None, i >= added)


class CompletionDraft:
    """One choice of /v1/completions, or what one event adds to it, as JSON text."""

    def __init__(self, reply: "CompletionReply", index: int, columns: Columns | None) -> None:
        self._reply = reply
        self._text: list[str] = []
        self._characters = 0
        self.index = index
        self.columns = columns
        self.reason: str | None = None

    @property
    def size(self) -> int:
        return self._characters + (0 if self.columns is None else self.columns.size)

    def add(self, piece: Piece) -> Iterator[None]:
        """Stops now and then while it draws a long prompt, so that others have their turn."""
        reply, echo = self._reply, self._reply.echo
        if echo is not None and reply.first(self.index):
            p = self.index // reply.n
            self._say(echo.words.texts[p])
            if self.columns is not None:
                scored = echo.scored(p, piece.prompt_logprobs)
                while some := list(islice(scored, TURN)):
                    self.columns.add(reply.tokenizer, some)
                    yield
        if echo is None or echo.words.generate:
            self._say(piece.text)
            if self.columns is not None:
                hidden = reply.hidden
                self.columns.add(
                    reply.tokenizer, (Scored(s.token_id, s, s.token_id not in hidden) for s in piece.logprobs)
                )
        self.reason = piece.finish_reason

    def _say(self, text: str) -> None:
        self._text.append(_inner(text))
        self._characters += len(self._text[-1])

    def parts(self) -> list[str]:
        logprobs = ["null"] if self.columns is None else self.columns.parts()
        return [
            f'{{"index":{self.index},"text":"', "".join(self._text), '","logprobs":', *logprobs,
            f',"finish_reason":{_quoted(self.reason)}}}',
        ]  # fmt: skip


class CompletionReply:
    """Bodies and chunks of /v1/completions. `offsets` remembers where each choice's text has got to."""

    kind = streamed = "text_completion"

    def __init__(
        self,
        header: Header,
        tokenizer: Tokenizer,
        n: int,
        logprobs: int | None,
        echo: Echo | None,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self.header = header
        self.tokenizer = tokenizer
        self.n = n
        self.echo = echo
        self.hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._logprobs = logprobs
        self._head = encode(header.fields(self.streamed))
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def first(self, index: int) -> bool:
        """Whether this choice has not begun; it has from now on."""
        if index in self._begun:
            return False
        self._begun.add(index)
        return True

    def draft(self, index: int) -> CompletionDraft:
        columns = None if self._logprobs is None else Columns.at(self._offsets.get(index, 0))
        return CompletionDraft(self, index, columns)

    def plain(self, index: int, piece: Piece, tail: str) -> bytes | None:
        """The chunk of a piece of text alone; None where it needs a draft."""
        if self._logprobs is not None or self.echo is not None:
            return None
        return self._framed(
            f'{{"index":{index},"text":{_text(piece.text)},"logprobs":null,"finish_reason":{_quoted(piece.finish_reason)}}}',
            tail,
        )

    def chunk(self, draft: CompletionDraft, tail: str) -> bytes:
        if draft.columns is not None:
            self._offsets[draft.index] = draft.columns.offset
        return self._framed("".join(draft.parts()), tail)

    def usage(self, usage: Usage) -> dict[str, object]:
        """The one token that is generated and dropped where none was asked for does not count."""
        dropped = self.echo is not None and not self.echo.words.generate
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens).body() if dropped else usage.body()

    def _framed(self, choice: str, tail: str) -> bytes:
        return f'data: {self._head[:-1]},"choices":[{choice}]{tail}}}\n\n'.encode()


class ChatDraft:
    """One choice of /v1/chat/completions as JSON text."""

    def __init__(self, tokenizer: Tokenizer, index: int, scored: bool) -> None:
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._scores: list[str] | None = [] if scored else None
        self.index = index
        self.size = 0
        self.reason: str | None = None

    def add(self, piece: Piece) -> Iterator[None]:
        self._text.append(_inner(piece.text))
        self.size += len(self._text[-1])
        if self._scores is not None and piece.logprobs:
            self._scores.append(chat_entries(self._tokenizer, piece.logprobs))
            self.size += len(self._scores[-1])
        self.reason = piece.finish_reason
        yield from ()

    def parts(self) -> list[str]:
        scores = _content(self._scores)
        return [
            f'{{"index":{self.index},"message":{{"role":"assistant","content":"', "".join(self._text),
            f'","refusal":null}},"logprobs":{scores},"finish_reason":{_quoted(self.reason)}}}',
        ]  # fmt: skip


class ChatReply:
    """Bodies and chunks of /v1/chat/completions. The role comes in a choice's first chunk."""

    kind, streamed = "chat.completion", "chat.completion.chunk"

    def __init__(self, header: Header, tokenizer: Tokenizer, logprobs: int | None) -> None:
        self.header = header
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = encode(header.fields(self.streamed))
        self._begun: set[int] = set()

    def draft(self, index: int) -> ChatDraft:
        return ChatDraft(self._tokenizer, index, self._logprobs is not None)

    def plain(self, index: int, piece: Piece, tail: str) -> bytes:
        opening = b""
        if index not in self._begun:
            self._begun.add(index)
            opening = self._chunk(index, '{"role":"assistant","content":""}', "null", None, tail)
        delta = f'{{"content":{_text(piece.text)}}}' if piece.text else "{}"
        entries = None if self._logprobs is None else [chat_entries(self._tokenizer, piece.logprobs)]
        return opening + self._chunk(index, delta, _content(entries), piece.finish_reason, tail)

    def usage(self, usage: Usage) -> dict[str, object]:
        return usage.body()

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str | None, tail: str) -> bytes:
        return (
            f'data: {self._head[:-1]},"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{_quoted(reason)}}}]{tail}}}\n\n'
        ).encode()


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


def encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inner(text: str) -> str:
    """The text in JSON, without its quotes: such pieces may be joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _content(entries: list[str] | None) -> str:
    if entries is None:
        return "null"
    return f'{{"content":[{",".join(filter(None, entries))}],"refusal":null}}'


def event(value: object) -> bytes:
    return f"data: {encode(value)}\n\n".encode()


def _quoted(reason: str | None) -> str:
    return "null" if reason is None else f'"{reason}"'
