"""Answers in OpenAI's words: whole bodies, and stream chunks as bytes. Knows no engine and no sockets.

A stream's fixed parts are encoded once per choice; a token costs one small JSON string.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from afserve.engine.request import TokenLogprob
from afserve.server.choice import Piece
from afserve.server.logprobs import Scored, chat_logprobs, completion_logprobs
from afserve.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Usage:
    """Token counts of one request so far."""

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
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Choice:
    """One choice of a body that is sent whole: its pieces joined."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = piece.finish_reason


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
    """The prompts to repeat before each choice's text; `generate` False drops what follows them.

    `added[p]` is how many tokens the tokenizer put before the words of prompt p; its text does not show them.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    added: tuple[int, ...]
    generate: bool

    def scored(self, p: int, logprobs: Sequence[TokenLogprob | None]) -> list[Scored]:
        ids = self.ids[p]
        known = [*logprobs, *([None] * (len(ids) - len(logprobs)))]
        return [Scored(token_id, known[i], i >= self.added[p]) for i, token_id in enumerate(ids)]


class CompletionReply:
    """Bodies and chunks of /v1/completions. `offsets` remembers where each choice's text has got to."""

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
        self._header = header
        self._tokenizer = tokenizer
        self._n = n
        self._logprobs = logprobs
        self._echo = echo
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._head = encode(header.fields("text_completion"))
        self._offsets: dict[int, int] = {}

    def body(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        drawn = [self._choice(i, choice) for i, choice in enumerate(choices)]
        return {**self._header.fields("text_completion"), "choices": drawn, "usage": self._usage(usage)}

    def chunks(self, index: int, piece: Piece, tail: str) -> bytes:
        first = index not in self._offsets
        if self._logprobs is None and self._echo is None:
            self._offsets[index] = 0
            return self._chunk(
                index, json.dumps(piece.text, ensure_ascii=False), "null", piece.finish_reason, tail
            )
        choice = Choice([piece.text], list(piece.logprobs), piece.prompt_logprobs, piece.finish_reason)
        drawn = self._choice(index, choice, first=first)
        text = json.dumps(drawn["text"], ensure_ascii=False)
        return self._chunk(index, text, encode(drawn["logprobs"]), piece.finish_reason, tail)

    def usage_chunk(self, usage: Usage) -> bytes:
        return event({**self._header.fields("text_completion"), "choices": [], "usage": self._usage(usage)})

    def _usage(self, usage: Usage) -> dict[str, object]:
        """The one token that is generated and dropped where none was asked for does not count."""
        dropped = self._echo is not None and not self._echo.generate
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens).body() if dropped else usage.body()

    def _chunk(self, index: int, text: str, logprobs: str, reason: str | None, tail: str) -> bytes:
        return (
            f'data: {self._head[:-1]},"choices":[{{"index":{index},"text":{text},"logprobs":{logprobs},'
            f'"finish_reason":{_quoted(reason)}}}]{tail}}}\n\n'
        ).encode()

    def _choice(self, index: int, choice: Choice, *, first: bool = True) -> dict[str, object]:
        text = "".join(choice.text)
        hidden = self._hidden
        scored = [Scored(entry.token_id, entry, entry.token_id not in hidden) for entry in choice.logprobs]
        if self._echo is not None:
            p = index // self._n
            if not self._echo.generate:
                text, scored = "", []
            if first:
                text = self._echo.texts[p] + text
                scored = [*self._echo.scored(p, choice.prompt_logprobs), *scored]
        offset = self._offsets.get(index, 0)
        logprobs = None
        if self._logprobs is not None:
            logprobs, offset = completion_logprobs(self._tokenizer, scored, offset)
        self._offsets[index] = offset
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


class ChatReply:
    """Bodies and chunks of /v1/chat/completions. The role comes in a choice's first chunk."""

    def __init__(self, header: Header, tokenizer: Tokenizer, logprobs: int | None) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = encode(header.fields("chat.completion.chunk"))
        self._begun: set[int] = set()

    def body(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        drawn = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": self._scores(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(choices)
        ]
        return {**self._header.fields("chat.completion"), "choices": drawn, "usage": usage.body()}

    def chunks(self, index: int, piece: Piece, tail: str) -> bytes:
        opening = b""
        if index not in self._begun:
            self._begun.add(index)
            opening = self._chunk(index, '{"role":"assistant","content":""}', "null", None, tail)
        delta = f'{{"content":{json.dumps(piece.text, ensure_ascii=False)}}}' if piece.text else "{}"
        logprobs = "null" if self._logprobs is None else encode(self._scores(piece.logprobs))
        return opening + self._chunk(index, delta, logprobs, piece.finish_reason, tail)

    def usage_chunk(self, usage: Usage) -> bytes:
        return event({**self._header.fields("chat.completion.chunk"), "choices": [], "usage": usage.body()})

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str | None, tail: str) -> bytes:
        return (
            f'data: {self._head[:-1]},"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{_quoted(reason)}}}]{tail}}}\n\n'
        ).encode()

    def _scores(self, logprobs: Sequence[TokenLogprob]) -> dict[str, object] | None:
        return None if self._logprobs is None else chat_logprobs(self._tokenizer, logprobs)


Reply = CompletionReply | ChatReply


def encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: object) -> bytes:
    return f"data: {encode(value)}\n\n".encode()


def _quoted(reason: str | None) -> str:
    return "null" if reason is None else f'"{reason}"'
