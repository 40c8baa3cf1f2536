"""Fields that other servers know and that would change an answer here if they were done: refused by name, not ignored.

A field with a value that means nothing (null, false, an empty list, the default) is no reason to refuse.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from afserve.errors import RequestError
from afserve.server.fields import Fields


@dataclass(frozen=True, slots=True)
class KnownField:
    """What to do instead, and the values that ask for nothing."""

    instead: str
    neutral: tuple[object, ...] = ()
    even_empty: bool = False  # an empty object and false ask for it, too


_BUDGET = KnownField("use thinking_token_budget of /v1/chat/completions")
_TEXT_ONLY = KnownField("this model reads and writes text only", (["text"],))
_SCHEMA = KnownField("use response_format or structured_outputs")


def _drawn(*neutral: object) -> KnownField:
    return KnownField("tokens are drawn by temperature, top_k, top_p and min_p", neutral)


VERBOSITY = KnownField("ask for it in a message", ("medium",))
_EFFORT = KnownField("use reasoning_effort, thinking_token_budget and include_reasoning", even_empty=True)
_ANYWHERE: Mapping[str, KnownField] = {
    "use_beam_search": KnownField("tokens are drawn; ask for n answers and choose"),
    "length_penalty": KnownField("it belongs to beam search; leave it out", (1, 1.0)),
    "early_stopping": KnownField("it belongs to beam search; leave it out"),
    "bad_words": KnownField("use logit_bias with their token ids"),
    "allowed_token_ids": KnownField("use structured_outputs with a choice, a regex or a grammar"),
    "logits_processors": KnownField("use logit_bias or structured_outputs"),
    "truncate_prompt_tokens": KnownField("send a prompt that fits; /tokenize counts its tokens", (-1,)),
    "prompt_logprobs": KnownField("use /v1/completions with echo and logprobs"),
    "spaces_between_special_tokens": KnownField("leave it out", (True,)),
    "return_token_ids": KnownField("use /tokenize on the text"),
    "return_tokens_as_token_ids": KnownField("use /tokenize on the text"),
    "thinking_budget": _BUDGET,
    "guided_decoding_backend": KnownField(
        "llguidance is the one there is; leave it out", ("auto", "guidance")
    ),
    "guided_whitespace_pattern": KnownField("leave it out"),
    "prompt_embeds": KnownField("send text or token ids"),
    "kv_transfer_params": KnownField("leave it out"),
    "vllm_xargs": KnownField("leave it out"),
    "mm_processor_kwargs": _TEXT_ONLY,
    "structural_tag": _SCHEMA,
    "regex": _SCHEMA,
    "ebnf": _SCHEMA,
    "grammar": _SCHEMA,
    "json_schema": _SCHEMA,
    "stop_regex": KnownField("use stop"),
    "no_stop_trim": KnownField("use include_stop_str_in_output"),
    "custom_logit_processor": KnownField("use logit_bias or structured_outputs"),
    "lora_path": KnownField("serve the merged checkpoint"),
    "typical_p": _drawn(1, 1.0),
    "tfs_z": _drawn(1, 1.0),
    "top_a": _drawn(0, 0.0),
    "top_n_sigma": _drawn(-1, -1.0),
    "mirostat": _drawn(0),
    "dynatemp_range": _drawn(0, 0.0),
    "dry_multiplier": _drawn(0, 0.0),
    "xtc_probability": _drawn(0, 0.0),
    "samplers": _drawn(),
    "repeat_penalty": KnownField("use repetition_penalty", (1, 1.0)),
    "n_predict": KnownField("use max_tokens", (-1,)),
    "return_hidden_states": KnownField("use /v1/embeddings"),
    "moderation": KnownField("nothing is moderated here; ask a model that does"),
}
_ELSEWHERE: Mapping[str, KnownField] = {"thinking_token_budget": _BUDGET}
_CHAT: Mapping[str, KnownField] = {
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "functions": KnownField("use tools"),
    "function_call": KnownField("use tool_choice", ("auto", "none")),
    "prediction": KnownField("leave it out"),
    "web_search_options": KnownField("this server has no tools of its own", even_empty=True),
    "echo": KnownField("use /v1/completions"),
    "documents": KnownField("put them into a message"),
    "verbosity": VERBOSITY,
    "store": KnownField("use /v1/responses, which keeps answers"),
    "chat_template": KnownField("the model's own template is used, leave it out"),
    "add_special_tokens": KnownField("the chat template writes them; leave it out"),
    "reasoning": _EFFORT,
    "thinking": _EFFORT,
    "enable_thinking": _EFFORT,
}


def refuse_unsupported(fields: Fields, *, chat: bool = False) -> None:
    """Raises RequestError for the first field that is known and not done."""
    refuse_known(fields, {**_ANYWHERE, **(_CHAT if chat else _ELSEWHERE)})


def refuse_known(fields: Fields, table: Mapping[str, KnownField]) -> None:
    """Raises RequestError for the first field of `table` that asks for something."""
    for name, known in table.items():
        value = fields.get(name)
        if _asks_nothing(value, known) or any(_same(value, each) for each in known.neutral):
            continue
        own = fields.name(name)
        raise RequestError(f"{own}: is not supported; {known.instead}", param=own)


def _asks_nothing(value: object, known: KnownField) -> bool:
    """0 is a number like others: no tokens to think, or no tops beside a logprob."""
    return value is None or value in ([], "") or (not known.even_empty and (value is False or value == {}))


def _same(value: object, other: object) -> bool:
    """True is no 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
