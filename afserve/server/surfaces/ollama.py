"""Ollama's /api/chat and /api/generate as a chat request: its options to sampling fields, its format to a schema."""

import re
from collections.abc import Collection, Mapping

from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.unsupported import (
    ANYWHERE,
    OF_OLLAMA,
    OF_OLLAMA_OPTIONS,
    OF_OLLAMA_PROMPTS,
    refuse_known,
)
from afserve.server.surfaces.ollama_lines import loaded
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
    options = fields.section("options")
    if options is not None:
        _options(options, {})
    text = fields.get("prompt") if fields.get("input") is None else fields.get("input")
    return {"input": text, "dimensions": fields.get("dimensions")}


def _preload(fields: Fields, *, chat: bool) -> Translated:
    """A request without words asks for the model to be loaded, which it is, or to be unloaded, which it is not."""
    reason = "unload" if _NO_TIME.fullmatch(str(fields.get("keep_alive"))) else "load"
    return Translated({}, {}, whole=loaded(fields.text("model") or "", reason, chat=chat))


def _completion(fields: Fields, common: Body, prompt: str) -> Body:
    if fields.text("system"):
        raise RequestError.about(
            "system", "a raw prompt has no place for it; put it into the prompt, or leave raw out"
        )
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
    calls = [
        {"type": "function", "function": call.get("function")} for call in message.sections("tool_calls")
    ]
    return {**plain, "tool_calls": calls} if calls else plain


def served_name(asked: str, names: Collection[str]) -> str:
    """Which of these names is meant: Ollama's clients add a tag, or leave it out."""
    plain = asked.removesuffix(_TAG)
    return next((name for name in (asked, plain, plain + _TAG) if name in names), plain)


def _common(fields: Fields) -> Body:
    """Streams unless it is asked not to."""
    refuse_known(fields, {**OF_OLLAMA, **_KEEP_ALIVE})
    chat: Body = {"stream": fields.flag("stream", True)}
    options = fields.section("options")
    if options is not None:
        _options(options, chat)
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


def _options(options: Fields, chat: Body) -> None:
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
