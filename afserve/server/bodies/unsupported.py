"""Fields that other servers know and that are not done here: which are wishes, and which promise a form.

A wish (how hard to think, how to draw, a tool that its maker runs) changes no form of the answer: it is passed over and
named in the answer's header. What promises a form, or has content that the model must see, is refused by name. The same
tables serve every API. A value that means nothing (null, the default, what is empty of the field's own type) asks for
nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType

from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields


@dataclass(frozen=True, slots=True)
class KnownField:
    """`kind`: its type, of which false and what is empty ask for nothing, as the `neutral` values do. A number is never
    empty (0 asks for no tokens to think, or for no tops beside a logprob), and NoneType is for what asks even then.
    """

    kind: type | UnionType
    instead: str
    neutral: tuple[object, ...] = ()
    wish: bool = False

    def is_nothing(self, value: object) -> bool:
        empty = value is False or value in ("", [], {})
        own = value is None or (empty and isinstance(value, self.kind))
        return own or any(_same(value, each) for each in self.neutral)


def _wish(kind: type | UnionType, instead: str = "leave it out", *neutral: object) -> KnownField:
    return KnownField(kind, instead, neutral, wish=True)


def _drawn(*neutral: object, kind: type | UnionType = float) -> KnownField:
    return _wish(kind, "tokens are drawn by temperature, top_k, top_p and min_p", *neutral)


_LEAVE = KnownField(str, "leave it out")
_TEXT_ONLY = "this model reads and writes text only"
_SCHEMA = KnownField(str, "use response_format or structured_outputs")
_BEAMS = "it belongs to beam search; leave it out"
_BUDGET = _wish(float, "use thinking_token_budget of /v1/chat/completions")
_VERBOSITY = _wish(str, "ask for it in a message", "medium")
_EFFORT = _wish(NoneType, "use reasoning_effort, thinking_token_budget and include_reasoning")
_EDITED = _wish(dict | list, "nothing of a conversation is left out here; leave it out")

# ---- of every request for text

_SAMPLING: Mapping[str, KnownField] = {
    "use_beam_search": _wish(bool, "tokens are drawn; ask for n answers and choose"),
    "length_penalty": _wish(float, _BEAMS, 1, 1.0),
    "early_stopping": _wish(bool | str, _BEAMS),
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
    "samplers": _drawn(kind=list | str),
}
ANYWHERE: Mapping[str, KnownField] = {
    **_SAMPLING,
    "repeat_penalty": _wish(float, "use repetition_penalty", 1, 1.0),
    "thinking_budget": _BUDGET,
    "guided_decoding_backend": _wish(str, "llguidance is the one there is; leave it out", "auto", "guidance"),
    "context_management": _EDITED,
    "keep_alive": _wish(str, "a model stays loaded until its server ends; leave it out"),
    "vllm_xargs": _wish(dict),
    "mm_processor_kwargs": _wish(dict, _TEXT_ONLY),
    "bad_words": KnownField(list | str, "use logit_bias with their token ids"),
    "allowed_token_ids": KnownField(list, "use structured_outputs with a choice, a regex or a grammar"),
    "logits_processors": KnownField(list, "use logit_bias or structured_outputs"),
    "truncate_prompt_tokens": KnownField(
        float, "send a prompt that fits; /tokenize counts its tokens", (-1,)
    ),
    "prompt_logprobs": KnownField(float, "use /v1/completions with echo and logprobs"),
    "spaces_between_special_tokens": KnownField(bool, "leave it out", (True,)),
    "return_token_ids": KnownField(bool, "use /tokenize on the text"),
    "return_tokens_as_token_ids": KnownField(bool, "use /tokenize on the text"),
    "guided_whitespace_pattern": _LEAVE,
    "prompt_embeds": KnownField(str | list, "send text or token ids"),
    "kv_transfer_params": KnownField(dict, "leave it out"),
    "structural_tag": _SCHEMA,
    "regex": _SCHEMA,
    "ebnf": _SCHEMA,
    "grammar": _SCHEMA,
    "json_schema": replace(_SCHEMA, kind=dict | str),
    "stop_regex": KnownField(str | list, "use stop"),
    "no_stop_trim": KnownField(bool, "use include_stop_str_in_output"),
    "custom_logit_processor": KnownField(str, "use logit_bias or structured_outputs"),
    "lora_path": KnownField(str | list, "serve the merged checkpoint"),
    "n_predict": KnownField(float, "use max_tokens", (-1,)),
    "return_hidden_states": KnownField(bool, "use /v1/embeddings"),
    "moderation": KnownField(bool | dict, "nothing is moderated here; ask a model that does"),
}
_ELSEWHERE: Mapping[str, KnownField] = {"thinking_token_budget": _BUDGET}
_CHAT: Mapping[str, KnownField] = {
    "web_search_options": _wish(NoneType, "this server has no tools of its own"),
    "verbosity": _VERBOSITY,
    "store": _wish(bool, "use /v1/responses, which keeps answers"),
    "reasoning": _EFFORT,
    "thinking": _EFFORT,
    "enable_thinking": _EFFORT,
    "modalities": KnownField(list, _TEXT_ONLY, (["text"],)),
    "audio": KnownField(dict, _TEXT_ONLY),
    "functions": KnownField(list, "use tools"),
    "function_call": KnownField(str | dict, "use tool_choice", ("auto", "none")),
    "echo": KnownField(bool, "use /v1/completions"),
    "documents": KnownField(list, "put them into a message"),
    "chat_template": KnownField(str, "the model's own template is used, leave it out"),
    "add_special_tokens": KnownField(bool, "the chat template writes them; leave it out"),
}

# ---- of one API's own

OF_TOOLS: Mapping[str, KnownField] = {
    "input_examples": _wish(list, "put them into its description"),
    "defer_loading": _wish(bool, "every tool is shown to the model; leave it out"),
    "allowed_callers": _wish(list, "only the model calls tools here; leave it out", ["direct"]),
}
OF_RESPONSES: Mapping[str, KnownField] = {
    "max_tool_calls": _wish(float, "this server calls no tools itself"),
    "truncation": _wish(str, "nothing of a prompt is cut; send what fits", "disabled"),
    "background": KnownField(bool, "ask for a stream, or send it with /v1/batches"),
    "conversation": KnownField(str | dict, "use previous_response_id"),
    "prompt": KnownField(dict, "send the text itself"),
    "top_logprobs": KnownField(float, "chat completions and completions have logprobs", (0,)),
}
OF_REASONING: Mapping[str, KnownField] = {
    **dict.fromkeys(("summary", "generate_summary"), _wish(str, "the reasoning itself is told", "auto")),
    "context": _wish(str, "earlier reasoning is shown to the model as its template does it", "auto"),
    "mode": _wish(str, "use effort", "standard"),
}
OF_TEXT: Mapping[str, KnownField] = {"verbosity": _VERBOSITY}
OF_MESSAGES: Mapping[str, KnownField] = {
    "mcp_servers": _wish(list, "this server calls no tools itself"),
    "container": _wish(str | dict, "this server runs no code"),
    "output_format": KnownField(dict, "use output_config.format"),
}
OF_OLLAMA: Mapping[str, KnownField] = {
    "logprobs": KnownField(bool, "use /v1/chat/completions"),
    "top_logprobs": KnownField(float, "use /v1/chat/completions"),
    **dict.fromkeys(("width", "height", "steps"), KnownField(float, "this model writes text only")),
}
OF_OLLAMA_PROMPTS: Mapping[str, KnownField] = {
    **dict.fromkeys(("suffix", "template"), _LEAVE),
    **dict.fromkeys(("images", "context"), KnownField(list, "leave it out")),
}
OF_OLLAMA_OPTIONS: Mapping[str, KnownField] = {
    **_SAMPLING,
    "repeat_last_n": _wish(float, "the whole text counts for repeat_penalty", 64, -1),
    "penalize_newline": _wish(bool, "every token counts for repeat_penalty", True),
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
        if known.is_nothing(value):
            continue
        own = fields.path_of(name)
        if known.wish:
            fields.pass_over(own, known.instead)
        else:
            raise RequestError.about(own, f"is not supported; {known.instead}")


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


def _same(value: object, other: object) -> bool:
    """True is no 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
