"""Answers of /v1/chat/completions: words, reasoning and calls as whole bodies and stream chunks."""

import uuid
from collections.abc import Iterator, Mapping, Sequence

from afserve.server.reading.call_ids import call_id
from afserve.server.reading.parts import Argued, Called, Content, Part, Thought
from afserve.server.reading.table import Reading
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.logprobs import chat_entries
from afserve.server.replies.routed import RoutedAnswer
from afserve.server.replies.wording import ChunkHeader, Usage, encode, inner, quoted, text_of
from afserve.tokens.tokenizer import Tokenizer


class ReadChoice:
    """One choice of a chat, read: its words, its reasoning, its calls, and what finished it.

    Calls have the same ids whoever reads a choice of this `name`; without one they are drawn.
    """

    def __init__(self, reading: Reading | None, name: str = "") -> None:
        self._reading = reading or Reading()
        self._name = name or uuid.uuid4().hex
        self._reader = self._reading.reader()
        self._ids: list[str] = []
        self._thinking = self._reading.thinks == "inside"
        self.reasoning_tokens = 0

    def read_piece(self, piece: TextPiece) -> list[Part]:
        """What this piece turns out to be, without what nobody wants to be told."""
        parts = self._reader.read_text(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            parts += self._reader.end_text(cut=piece.finish_reason != "stop")
        if self._thinking or any(isinstance(part, Thought) for part in parts):
            self.reasoning_tokens += piece.tokens
        if parts:
            self._thinking = isinstance(parts[-1], Thought)
        wanted = [part for part in parts if self._wanted(part)]
        for part in wanted:
            if isinstance(part, Called):
                self._ids.append(self._id(part))
        return wanted

    def _wanted(self, part: Part) -> bool:
        if isinstance(part, Thought):
            return self._reading.tell_reasoning
        most = self._reading.most_calls
        return isinstance(part, Content) or not most or part.index < most

    def reason(self, reason: str | None) -> str | None:
        """OpenAI's own: a call that the model chose ends with `tool_calls`, one that was named does not."""
        chosen = self._ids and not self._reading.name
        return "tool_calls" if reason == "stop" and chosen else reason

    def call_id(self, index: int) -> str:
        return self._ids[index]

    def _id(self, call: Called) -> str:
        first = self._reading.earlier_calls
        return call_id(self._reading.ids, call.name, first + call.index, self._name)

    def delta_json(self, part: Part) -> str:
        match part:
            case Content(text):
                return f'{{"content":{text_of(text)}}}'
            case Thought(text):
                return f'{{"reasoning":{text_of(text)},"reasoning_content":{text_of(text)}}}'
            case Called(index, name):
                function = f'{{"name":{text_of(name)},"arguments":""}}'
                call = f'{{"index":{index},"id":"{self.call_id(index)}","type":"function","function":{function}}}'
                return f'{{"tool_calls":[{call}]}}'
            case Argued(index, text):
                return f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":{text_of(text)}}}}}]}}'

    def joined(self, parts: Sequence[Part]) -> str:
        """All of them as one `delta`: whoever adds up deltas comes to the same."""
        words: dict[str, str] = {}
        calls: dict[int, dict[str, object]] = {}
        arguments: dict[int, str] = {}
        for part in parts:
            match part:
                case Content(text):
                    words["content"] = words.get("content", "") + text
                case Thought(text):
                    words["reasoning"] = words["reasoning_content"] = words.get("reasoning", "") + text
                case Called(index, name):
                    arguments[index] = ""
                    calls[index] = {"id": self.call_id(index), "type": "function", "name": name}
                case Argued(index, text):
                    arguments[index] = arguments.get(index, "") + text
        return encode({**words, **({"tool_calls": _calls(calls, arguments)} if arguments else {})})


def _calls(
    begun: Mapping[int, Mapping[str, object]], arguments: Mapping[int, str]
) -> list[dict[str, object]]:
    told: list[dict[str, object]] = []
    for index, text in arguments.items():
        head = dict(begun.get(index, {}))
        name = {"name": head.pop("name")} if head else {}
        told.append({"index": index, **head, "function": {**name, "arguments": text}})
    return told


class ChatDraft:
    """One choice of /v1/chat/completions as JSON text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        scored: bool,
        routed: RoutedAnswer,
        reading: Reading | None = None,
        name: str = "",
    ) -> None:
        self._tokenizer, self._routed = tokenizer, routed
        self.told = ReadChoice(reading, name)
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._scores: list[str] | None = [] if scored else None
        self.index = index
        self.size = 0
        self.reason: str | None = None

    def add_piece(self, piece: TextPiece) -> Iterator[None]:
        for part in self.told.read_piece(piece):
            self._take(part)
        if self._scores is not None and piece.logprobs:
            self._scores.append(chat_entries(self._tokenizer, piece.logprobs))
            self.size += len(self._scores[-1])
        self.reason = self.told.reason(piece.finish_reason)
        yield from ()

    def _take(self, part: Part) -> None:
        match part:
            case Called(_, name):
                self._calls.append((name, []))
                self.size += len(name)
                return
            case Argued(index, text):
                into = self._calls[index][1]
            case Thought(text):
                into = self._thoughts
            case Content(text):
                into = self._text
        into.append(inner(text))
        self.size += len(into[-1])

    def _message(self) -> Iterator[str]:
        """What follows `"role":"assistant"`. A message that only calls has no content."""
        if self._text or not self._calls:
            yield from (',"content":"', "".join(self._text), '"')
        else:
            yield ',"content":null'
        for name in ("reasoning", "reasoning_content") if self._thoughts else ():
            yield from (f',"{name}":"', "".join(self._thoughts), '"')
        if self._calls:
            yield ',"tool_calls":['
            for index, (name, arguments) in enumerate(self._calls):
                lead, call_id = "," if index else "", self.told.call_id(index)
                yield f'{lead}{{"id":"{call_id}","type":"function","function":{{"name":{text_of(name)},'
                yield from ('"arguments":"', "".join(arguments), '"}}')
            yield "]"

    def json_parts(self) -> list[str]:
        scores = _content(self._scores)
        return [
            f'{{"index":{self.index},"message":{{"role":"assistant"', *self._message(),
            f',"refusal":null}},"logprobs":{scores}{self._routed.json(self.index, self.reason)}',
            f',"finish_reason":{quoted(self.reason)}}}',
        ]  # fmt: skip


class ChatReply:
    """Bodies and chunks of /v1/chat/completions. The role comes in a choice's first chunk.

    With `joined` a piece is never more than one chunk, so that a stream which breaks has all of it or nothing.
    """

    kind, streamed = "chat.completion", "chat.completion.chunk"
    is_plain = True

    def __init__(
        self,
        header: ChunkHeader,
        tokenizer: Tokenizer,
        logprobs: int | None,
        reading: Reading | None = None,
        *,
        joined: bool = False,
    ) -> None:
        self._reading, self._joined = reading, joined
        self._told: dict[int, ReadChoice] = {}
        self.header = header
        self.routed = RoutedAnswer()
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = encode(header.fields(self.streamed))
        self._leads: dict[int, str] = {}  # of the chunks of each choice
        self._begun: set[int] = set()

    def draft(self, index: int) -> ChatDraft:
        scored = self._logprobs is not None
        draft = ChatDraft(self._tokenizer, index, scored, self.routed, self._reading, self._name(index))
        self._told[index] = draft.told
        return draft

    def plain(self, index: int, piece: TextPiece, tail: str) -> bytes:
        opening = b""
        if index not in self._begun:
            self._begun.add(index)
            opening = self._chunk(index, '{"role":"assistant","content":""}', "null", None, tail)
        entries = None if self._logprobs is None else [chat_entries(self._tokenizer, piece.logprobs)]
        scores = _content(entries)
        if self._reading is not None:
            return opening + self._read(index, piece, scores, tail)
        delta = f'{{"content":{text_of(piece.text)}}}' if piece.text else "{}"
        return opening + self._chunk(index, delta, scores, piece.finish_reason, tail)

    def _read(self, index: int, piece: TextPiece, scores: str, tail: str) -> bytes:
        """A chunk for each part; the first has the scores, the last the reason."""
        told = self._told.get(index)
        if told is None:
            told = self._told[index] = ReadChoice(self._reading, self._name(index))
        parts = told.read_piece(piece)
        deltas = [told.joined(parts)] if self._joined and parts else [told.delta_json(part) for part in parts]
        reason = told.reason(piece.finish_reason)
        if not deltas and reason is None and scores == "null":
            return b""
        deltas = deltas or ["{}"]
        last = len(deltas) - 1
        return b"".join(
            self._chunk(index, delta, "null" if at else scores, reason if at == last else None, tail)
            for at, delta in enumerate(deltas)
        )

    def _name(self, index: int) -> str:
        return f"{self.header.id}-{index}"

    def usage(self, usage: Usage) -> dict[str, object]:
        thought = sum(told.reasoning_tokens for told in self._told.values())
        details = {"reasoning_tokens": thought, **usage.of_prediction()}
        return {**usage.as_json(), "completion_tokens_details": details}

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str | None, tail: str) -> bytes:
        lead = self._leads.get(index)
        if lead is None:
            lead = self._leads[index] = f'data: {self._head[:-1]},"choices":[{{"index":{index},"delta":'
        end = f'{self.routed.json(index, reason)},"finish_reason":{quoted(reason)}'
        return f'{lead}{delta},"logprobs":{logprobs}{end}}}]{tail}}}\n\n'.encode()


def _content(entries: list[str] | None) -> str:
    if entries is None:
        return "null"
    return f'{{"content":[{",".join(filter(None, entries))}],"refusal":null}}'
