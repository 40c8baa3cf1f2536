"""Ollama's /api/chat and /api/generate as a chat request: its options to sampling fields, its format to a schema."""

from collections.abc import Mapping

from afserve.errors import RequestError, shown
from afserve.server.fields import Fields, or_else
from afserve.server.surfaces.translate import Body, Translated
from afserve.server.unsupported import KnownField, refuse_known

_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
NAMES: Mapping[str, str] = {
    "max_completion_tokens": "options.num_predict",
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
_REFUSED = {
    **dict.fromkeys(("logprobs", "top_logprobs"), KnownField("use /v1/chat/completions")),
    **dict.fromkeys(("width", "height", "steps"), KnownField("this model writes text only")),
}
_OF_PROMPTS = {
    **dict.fromkeys(("suffix", "images", "template", "context"), KnownField("leave it out")),
    "raw": KnownField("use /v1/completions"),
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "repeat_last_n": (64, -1), "typical_p": (1, 1.0), "tfs_z": (1, 1.0), "mirostat": (0,), "mirostat_eta": (0.1,),
    "mirostat_tau": (5, 5.0), "penalize_newline": (True,),
}  # fmt: skip


def translate_chat(fields: Fields) -> Translated:
    """Raises RequestError that names the field."""
    chat = _common(fields)
    chat["messages"] = [_message(message) for message in fields.sections("messages")]
    if fields.get("tools"):
        chat["tools"] = fields.get("tools")
    return Translated(chat, {})


def translate_generate(fields: Fields) -> Translated:
    """A prompt in the model's template, or with `raw` as it is, which /v1/completions is for."""
    refuse_known(fields, _OF_PROMPTS)
    chat = _common(fields)
    messages: list[Body] = []
    if fields.text("system"):
        messages.append({"role": "system", "content": fields.text("system")})
    if fields.text("prompt") is None:
        fields.refuse("prompt", "a string")
    messages.append({"role": "user", "content": fields.text("prompt")})
    chat["messages"] = messages
    return Translated(chat, {})


def _message(message: Fields) -> Body:
    if message.get("images"):
        name = message.name("images")
        raise RequestError(f"{name}: this model reads text only", param=name)
    role = message.text("role")
    plain: Body = {"role": role, "content": or_else(message.text("content"), "")}
    plain |= {own: message.text(name) for name, own in _SAME_WORDS.items() if message.text(name)}
    calls = [
        {"type": "function", "function": call.get("function")} for call in message.sections("tool_calls")
    ]
    return {**plain, "tool_calls": calls} if calls else plain


def plain_name(model: str) -> str:
    """Without the tag that Ollama's clients add."""
    return model.removesuffix(":latest")


def _common(fields: Fields) -> Body:
    """Streams unless it is asked not to."""
    refuse_known(fields, _REFUSED)
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
    chat |= {name: options.get(name) for name in _SAME if options.get(name) is not None}
    predict = options.integer("num_predict", -2, 1 << 24)
    if predict is not None and predict > 0:
        chat["max_completion_tokens"] = predict
    if options.get("repeat_penalty") is not None:
        chat["repetition_penalty"] = options.get("repeat_penalty")
    known = {*_SAME, *_ITS_OWN, "num_predict", "repeat_penalty"}
    for name, value in options.raw().items():
        if name not in known and value not in (None, *_NEUTRAL.get(name, ())):
            raise RequestError(
                f"{options.name(name)}: {shown(value)} is not supported; leave it out",
                param=options.name(name),
            )
