"""Ollama's /api/chat and /api/generate as a chat request, its options as sampling fields, and answers in its words."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from afserve.errors import AfserveError, RequestError
from afserve.server.bodies.declared import SchedulingFields
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.unsupported import (
    ANYWHERE,
    OF_OLLAMA,
    OF_OLLAMA_OPTIONS,
    OF_OLLAMA_PROMPTS,
    refuse_known,
)
from afserve.server.reading.call_object import arguments_object
from afserve.server.reading.parts import Argued, Called, Content, Part, Thought
from afserve.server.reading.table import Reading
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.refusal import ollama_body
from afserve.server.replies.surface import ReadSurface
from afserve.server.replies.wording import Usage, encode
from afserve.server.surfaces.translate import Body, Translated

_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("max_completion_tokens", "max_tokens"), "options.num_predict"),
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in _SAME},
}
# What a template may read of a message.
_SAME_WORDS = {"thinking": "reasoning_content", "tool_name": "name"}
# What belongs to Ollama's own way to run a model and changes no answer here.
_ITS_OWN = (
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "num_keep",
    "low_vram",
    "use_mmap",
    "use_mlock",
    "numa",
)
_KEEP_ALIVE = {"keep_alive": ANYWHERE["keep_alive"]}
_NO_TIME = re.compile(r"0+(\.0*)?(ns|us|ms|s|m|h)?")
_RAW, _TAG = "raw", ":latest"


def translate_chat(fields: Fields) -> Translated:
    """Raises RequestError that names the field."""
    chat = _common(fields)
    if not fields.sections("messages"):
        return _preload(fields, chat=True)
    chat["messages"] = [_message(message) for message in fields.sections("messages")]
    if fields.get("tools"):
        chat["tools"] = fields.get("tools")
    return Translated(chat, {})


def translate_generate(fields: Fields) -> Translated:
    """A prompt in the model's template, or with `raw` as it is."""
    refuse_known(fields, OF_OLLAMA_PROMPTS)
    prompt, raw, common = fields.text("prompt"), fields.flag(_RAW), _common(fields)
    if not prompt:
        return _preload(fields, chat=False)
    if raw:
        return Translated(_completion(fields, common, prompt), {}, raw=True)
    messages: list[Body] = []
    if fields.text("system"):
        messages.append({"role": "system", "content": fields.text("system")})
    messages.append({"role": "user", "content": prompt})
    return Translated({**common, "messages": messages}, {})


def translate_embed(fields: Fields) -> Mapping[str, object]:
    """Of /api/embed, or of the older /api/embeddings, as OpenAI's request."""
    refuse_known(fields, _KEEP_ALIVE)
    _options(fields, {})
    text = fields.get("prompt") if fields.get("input") is None else fields.get("input")
    return {"input": text, "dimensions": fields.get("dimensions")}


def _preload(fields: Fields, *, chat: bool) -> Translated:
    """A request without words asks for the model to be loaded, which it is, or to be unloaded, which it is not."""
    reason = "unload" if _NO_TIME.fullmatch(str(fields.get("keep_alive"))) else "load"
    return Translated({}, {}, whole=loaded(fields.text("model") or "", reason, chat=chat))


def _completion(fields: Fields, common: Body, prompt: str) -> Body:
    if fields.text("system"):
        raise RequestError.about("system", "a raw prompt has no place for it; put it there, or leave raw out")
    if "max_completion_tokens" in common:
        common["max_tokens"] = common.pop("max_completion_tokens")
    if common.pop("reasoning_effort", "none") != "none":
        fields.pass_over("think", "a raw prompt says itself whether to think; leave raw out")
    return {**common, "prompt": prompt}


def _message(message: Fields) -> Body:
    if message.get("images"):
        raise message.refusal("images", "this model reads text only")
    role = message.text("role")
    plain: Body = {"role": role, "content": or_else(message.text("content"), "")}
    plain |= {own: message.text(name) for name, own in _SAME_WORDS.items() if message.text(name)}
    calls = [{"type": "function", "function": one.get("function")} for one in message.sections("tool_calls")]
    return {**plain, "tool_calls": calls} if calls else plain


def served_name(asked: str, names: Collection[str]) -> str:
    """Which of these names is meant: Ollama's clients add a tag, or leave it out."""
    plain = asked.removesuffix(_TAG)
    return next((name for name in (asked, plain, plain + _TAG) if name in names), plain)


def _common(fields: Fields) -> Body:
    """Streams unless it is asked not to."""
    refuse_known(fields, {**OF_OLLAMA, **_KEEP_ALIVE})
    chat: Body = {"stream": fields.flag("stream", True), **fields.given(*SchedulingFields.declared)}
    _options(fields, chat)
    form = fields.get("format")
    if form == "json":
        chat["response_format"] = {"type": "json_object"}
    elif form not in (None, ""):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
    think = fields.get("think")
    if isinstance(think, str):
        chat["reasoning_effort"] = think
    elif think is not None:
        chat["reasoning_effort"] = "medium" if fields.flag("think") else "none"
    return chat


def _options(fields: Fields, chat: Body) -> None:
    options = fields.section("options")
    if options is None:
        return
    chat |= options.given(*_SAME)
    predict = options.integer("num_predict", -2, 1 << 24)
    if predict is not None and predict > 0:
        chat["max_completion_tokens"] = predict
    if options.get("repeat_penalty") is not None:
        chat["repetition_penalty"] = options.get("repeat_penalty")
    refuse_known(options, OF_OLLAMA_OPTIONS)
    known = {*_SAME, *_ITS_OWN, *OF_OLLAMA_OPTIONS, "num_predict", "repeat_penalty"}
    if any(value is not None for name, value in options.raw().items() if name not in known):
        options.pass_over("options", "this server knows no such option; leave it out")


Line = dict[str, object]
_NOTHING: Mapping[str, object] = MappingProxyType({})


class OllamaSurface(ReadSurface):
    """One JSON object per line, the last with counts and times in nanoseconds. `chat`: /api/chat, else /api/generate. A
    call is one line, once its arguments are whole."""

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
