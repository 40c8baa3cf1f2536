"""An answer in Ollama's words: one JSON object per line, the last with counts and times in nanoseconds."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from afserve.errors import AfserveError
from afserve.server.reading.call_object import arguments_object
from afserve.server.reading.parts import Argued, Called, Content, Part, Thought
from afserve.server.reading.table import Reading
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.refusal import ollama_body
from afserve.server.replies.surface import ReadSurface
from afserve.server.replies.wording import Usage, encode

Line = dict[str, object]
_NOTHING: Mapping[str, object] = MappingProxyType({})


class OllamaSurface(ReadSurface):
    """`chat`: /api/chat, else /api/generate. A call is one line, once its arguments are whole."""

    media = b"application/x-ndjson"
    comment: bytes | None = None

    def __init__(self, model: str, reading: Reading | None, now: Callable[[], float], *, chat: bool) -> None:
        self._model, self._chat = model, chat
        super().__init__(reading)
        self._now, self._started, self._first = now, now(), 0.0
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._told_calls = 0
        self._reason = "stop"

    def say_piece(self, index: int, piece: TextPiece, usage: Usage) -> Iterable[bytes]:
        self._first = self._first or self._now()
        return super().say_piece(index, piece, usage)

    def _last(self, piece: TextPiece, reason: str) -> bytes:
        self._reason = "length" if reason == "length" else "stop"
        return self._calls_until(len(self._calls))

    def stream_end(self, usage: Usage) -> bytes:
        return self._line("", end=self._end(usage))

    def say_failure(self, error: AfserveError | None) -> bytes:
        return (encode(ollama_body(error)) + "\n").encode()

    def whole_body(self, usage: Usage) -> tuple[bytes, ...]:
        more: Line = {}
        if self._thought:
            more["thinking"] = "".join(self._thought)
        if self._calls:
            more["tool_calls"] = [_call(name, arguments) for name, arguments in self._calls]
        return (self._line("".join(self._said), more, self._end(usage)).rstrip(),)

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                self._said.append(text)
                return self._line(text)
            case Thought(text):
                self._thought.append(text)
                return self._line("", {"thinking": text})
            case Called(index, name):
                before = self._calls_until(index)
                self._calls.append((name, []))
                return before
            case Argued(index, text):
                self._calls[index][1].append(text)
        return b""

    def _calls_until(self, index: int) -> bytes:
        """Lines of the calls that are whole."""
        lines = [
            self._line("", {"tool_calls": [_call(name, arguments)]})
            for name, arguments in self._calls[self._told_calls : index]
        ]
        self._told_calls = index
        return b"".join(lines)

    def _line(
        self, text: str, more: Mapping[str, object] = _NOTHING, end: Mapping[str, object] = _NOTHING
    ) -> bytes:
        line: Line = {"model": self._model, "created_at": _time()}
        if self._chat:
            line["message"] = {"role": "assistant", "content": text, **more}
        else:
            line |= {"response": text, **more}
        return (encode({**line, "done": False, **end}) + "\n").encode()

    def _end(self, usage: Usage) -> Line:
        now = self._now()
        first = self._first or now
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(now - self._started),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._started),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(now - first),
        }


def _call(name: str, arguments: list[str]) -> Line:
    return {"function": {"name": name, "arguments": arguments_object("".join(arguments))}}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _time() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, reason: str, *, chat: bool) -> bytes:
    """The answer to a request without words."""
    said = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return encode(
        {"model": model, "created_at": _time(), **said, "done": True, "done_reason": reason}
    ).encode()
