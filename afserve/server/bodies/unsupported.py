"""Fields that other servers know and that are not done here: which are wishes, and which promise a form.

A wish (how hard to think, how to draw, a tool that its maker runs) changes no form of the answer: it is passed over and
named in the answer's header. What promises a form, or has content that the model must see, is refused by name. The same
tables serve every API. A value that means nothing (null, false, an empty list, the default) asks for nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields


@dataclass(frozen=True, slots=True)
class KnownField:
    """What to do instead, and the values that ask for nothing."""

    instead: str
    neutral: tuple[object, ...] = ()
    even_empty: bool = False  # an empty object and false ask for it, too
    wish: bool = False


def _wish(instead: str = "leave it out", *neutral: object, even_empty: bool = False) -> KnownField:
    return KnownField(instead, neutral, even_empty, wish=True)


def _drawn(*neutral: object) -> KnownField:
    return _wish("tokens are drawn by temperature, top_k, top_p and min_p", *neutral)


_LEAVE = KnownField("leave it out")
_TEXT_ONLY = KnownField("this model reads and writes text only", (["text"],))
_SCHEMA = KnownField("use response_format or structured_outputs")
_BEAMS = "it belongs to beam search; leave it out"
_BUDGET = _wish("use thinking_token_budget of /v1/chat/completions")
_VERBOSITY = _wish("ask for it in a message", "medium")
_EFFORT = _wish("use reasoning_effort, thinking_token_budget and include_reasoning", even_empty=True)
_EDITED = _wish("nothing of a conversation is left out here; leave it out")

# ---- of every request for text

_SAMPLING: Mapping[str, KnownField] = {
    "use_beam_search": _wish("tokens are drawn; ask for n answers and choose"),
    "length_penalty": _wish(_BEAMS, 1, 1.0),
    "early_stopping": _wish(_BEAMS),
    "typical_p": _drawn(1, 1.0),
    "tfs_z": _drawn(1, 1.0),
    "top_a": _drawn(0, 0.0),
    "top_n_sigma": _drawn(-1, -1.0),
    "mirostat": _drawn(0),
    "mirostat_eta": _drawn(0.1),
    "mirostat_tau": _drawn(5, 5.0),
    "dynatemp_range": _drawn(0, 0.0),
    "dry_multiplier": _drawn(0, 0.0),
    "xtc_probability": _drawn(0, 0.0),
    "samplers": _drawn(),
}
ANYWHERE: Mapping[str, KnownField] = {
    **_SAMPLING,
    "repeat_penalty": _wish("use repetition_penalty", 1, 1.0),
    "thinking_budget": _BUDGET,
    "guided_decoding_backend": _wish("llguidance is the one there is; leave it out", "auto", "guidance"),
    "context_management": _EDITED,
    "keep_alive": _wish("a model stays loaded until its server ends; leave it out"),
    "vllm_xargs": _wish(),
    "mm_processor_kwargs": _wish("this model reads and writes text only"),
    "bad_words": KnownField("use logit_bias with their token ids"),
    "allowed_token_ids": KnownField("use structured_outputs with a choice, a regex or a grammar"),
    "logits_processors": KnownField("use logit_bias or structured_outputs"),
    "truncate_prompt_tokens": KnownField("send a prompt that fits; /tokenize counts its tokens", (-1,)),
    "prompt_logprobs": KnownField("use /v1/completions with echo and logprobs"),
    "spaces_between_special_tokens": KnownField("leave it out", (True,)),
    "return_token_ids": KnownField("use /tokenize on the text"),
    "return_tokens_as_token_ids": KnownField("use /tokenize on the text"),
    "guided_whitespace_pattern": _LEAVE,
    "prompt_embeds": KnownField("send text or token ids"),
    "kv_transfer_params": _LEAVE,
    "structural_tag": _SCHEMA,
    "regex": _SCHEMA,
    "ebnf": _SCHEMA,
    "grammar": _SCHEMA,
    "json_schema": _SCHEMA,
    "stop_regex": KnownField("use stop"),
    "no_stop_trim": KnownField("use include_stop_str_in_output"),
    "custom_logit_processor": KnownField("use logit_bias or structured_outputs"),
    "lora_path": KnownField("serve the merged checkpoint"),
    "n_predict": KnownField("use max_tokens", (-1,)),
    "return_hidden_states": KnownField("use /v1/embeddings"),
    "moderation": KnownField("nothing is moderated here; ask a model that does"),
}
_ELSEWHERE: Mapping[str, KnownField] = {"thinking_token_budget": _BUDGET}
_CHAT: Mapping[str, KnownField] = {
    "prediction": _wish(),
    "web_search_options": _wish("this server has no tools of its own", even_empty=True),
    "verbosity": _VERBOSITY,
    "store": _wish("use /v1/responses, which keeps answers"),
    "reasoning": _EFFORT,
    "thinking": _EFFORT,
    "enable_thinking": _EFFORT,
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "functions": KnownField("use tools"),
    "function_call": KnownField("use tool_choice", ("auto", "none")),
    "echo": KnownField("use /v1/completions"),
    "documents": KnownField("put them into a message"),
    "chat_template": KnownField("the model's own template is used, leave it out"),
    "add_special_tokens": KnownField("the chat template writes them; leave it out"),
}

# ---- of one API's own

OF_TOOLS: Mapping[str, KnownField] = {
    "input_examples": _wish("put them into its description"),
    "defer_loading": _wish("every tool is shown to the model; leave it out"),
    "allowed_callers": _wish("only the model calls tools here; leave it out", ["direct"]),
}
OF_RESPONSES: Mapping[str, KnownField] = {
    "max_tool_calls": _wish("this server calls no tools itself"),
    "truncation": _wish("nothing of a prompt is cut; send what fits", "disabled"),
    "background": KnownField("ask for a stream, or send it with /v1/batches"),
    "conversation": KnownField("use previous_response_id"),
    "prompt": KnownField("send the text itself"),
    "top_logprobs": KnownField("chat completions and completions have logprobs", (0,)),
}
OF_REASONING: Mapping[str, KnownField] = {
    **dict.fromkeys(("summary", "generate_summary"), _wish("the reasoning itself is told", "auto")),
    "context": _wish("earlier reasoning is shown to the model as its template does it", "auto"),
    "mode": _wish("use effort", "standard"),
}
OF_TEXT: Mapping[str, KnownField] = {"verbosity": _VERBOSITY}
OF_MESSAGES: Mapping[str, KnownField] = {
    "mcp_servers": _wish("this server calls no tools itself"),
    "container": _wish("this server runs no code"),
    "output_format": KnownField("use output_config.format"),
}
OF_OLLAMA: Mapping[str, KnownField] = {
    **dict.fromkeys(("logprobs", "top_logprobs"), KnownField("use /v1/chat/completions")),
    **dict.fromkeys(("width", "height", "steps"), KnownField("this model writes text only")),
}
OF_OLLAMA_PROMPTS: Mapping[str, KnownField] = dict.fromkeys(
    ("suffix", "images", "template", "context"), _LEAVE
)
OF_OLLAMA_OPTIONS: Mapping[str, KnownField] = {
    **_SAMPLING,
    "repeat_last_n": _wish("the whole text counts for repeat_penalty", 64, -1),
    "penalize_newline": _wish("every token counts for repeat_penalty", True),
}
_OWN_SCHEMA = ("parameters", "input_schema", "tools")
_PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


def refuse_unsupported(fields: Fields, *, chat: bool = False) -> None:
    """Raises RequestError for the first field that promises a form and is not done; passes over wishes."""
    refuse_known(fields, {**ANYWHERE, **(_CHAT if chat else _ELSEWHERE)})


def refuse_known(fields: Fields, table: Mapping[str, KnownField]) -> None:
    """Raises RequestError for the first field of `table` that asks for something and is no wish."""
    for name, known in table.items():
        value = fields.get(name)
        if _asks_nothing(value, known) or any(_same(value, each) for each in known.neutral):
            continue
        own = fields.path_of(name)
        if known.wish:
            fields.pass_over(own, known.instead)
        else:
            raise RequestError(f"{own}: is not supported; {known.instead}", param=own)


def passes_hosted(tool: Fields) -> bool:
    """Whether it is a tool that its maker runs or describes, such as a web search: its type says all, so that it has no
    function, or no name with a schema. It is passed over then."""
    kind = tool.get("type")
    if kind in (None, "", "function", "custom", "namespace") or not isinstance(kind, str):
        return False
    if tool.get("function") is not None or tool.get("custom") is not None:
        return False
    if tool.get("name") is not None and any(tool.get(key) is not None for key in _OWN_SCHEMA):
        return False
    name = f"tools.{kind}" if _PLAIN.fullmatch(kind) else tool.path
    tool.pass_over(name, "only your own functions are served as tools; leave it out")
    return True


def _asks_nothing(value: object, known: KnownField) -> bool:
    """0 is a number like others: no tokens to think, or no tops beside a logprob."""
    return value is None or value in ([], "") or (not known.even_empty and (value is False or value == {}))


def _same(value: object, other: object) -> bool:
    """True is no 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
