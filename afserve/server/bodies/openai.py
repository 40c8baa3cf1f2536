"""The requests of the OpenAI API as values: what was asked, checked, before any text is tokenized.

Follows the OpenAI reference, then vLLM for the sampling fields that OpenAI lacks. Knows no HTTP.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from afserve.engine.scheduling.request import MAX_LOGPROBS
from afserve.errors import RequestError, shown
from afserve.server.bodies.fields import Fields, or_else, refuse, token_ids
from afserve.server.bodies.messages import messages_of
from afserve.server.bodies.sampling import MAX_TOKENS
from afserve.server.bodies.structured import WantedGrammar, wanted_format
from afserve.server.bodies.tools import Tools, tools_of
from afserve.server.bodies.unsupported import KnownField, refuse_known, refuse_unsupported

Prompt = str | tuple[int, ...]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGET = "thinking_token_budget"
MOST_RESUME_SECONDS = 86_400.0
_OF_TEMPLATES = {
    name: KnownField(f"use {name} of the request", even_empty=True)
    for name in ("messages", "tools", "documents", "add_generation_prompt")
}
_OWN_ID = re.compile("[0-9a-f]{32,64}")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`continuous` puts the running usage in every chunk."""

    include_usage: bool = False
    continuous: bool = False


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """Keep the request for `seconds` without a connection. `id`: as its client wants it to be known."""

    seconds: float
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """POST /v1/completions. `wanted_tokens` None is 16; 0 is allowed together with echo."""

    prompts: tuple[Prompt, ...]
    wanted_tokens: int | None
    sampling: Fields
    logprobs: int | None
    echo: bool
    add_special_tokens: bool
    stream: bool
    options: StreamOptions
    wanted: WantedGrammar | None
    resume: ResumeOptions | None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """POST /v1/chat/completions. `wanted_tokens` None is whatever the context has left; `thoughts` tokens of reasoning
    at most, None for any number."""

    messages: tuple[Mapping[str, object], ...]
    tools: Tools
    template_values: Mapping[str, object]
    add_generation_prompt: bool
    continue_final_message: bool
    wanted_tokens: int | None
    sampling: Fields
    logprobs: int | None
    stream: bool
    options: StreamOptions
    wanted: WantedGrammar | None
    effort: str | None
    thoughts: int | None
    resume: ResumeOptions | None


def completion_request(fields: Fields) -> CompletionRequest:
    echo = fields.flag("echo")
    if fields.text("suffix"):
        raise RequestError(
            "suffix: this model continues text, it cannot fill a gap; leave it out", param="suffix"
        )
    _refuse_best_of(fields)
    refuse_unsupported(fields)
    return CompletionRequest(
        prompts=prompts_of(fields),
        wanted_tokens=fields.integer("max_tokens", 0 if echo else 1, MAX_TOKENS),
        sampling=fields,
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
        echo=echo,
        add_special_tokens=fields.flag("add_special_tokens", True),
        stream=fields.flag("stream"),
        options=_stream_options(fields),
        wanted=wanted_format(fields),
        resume=_resume(fields),
    )


def chat_request(fields: Fields) -> ChatRequest:
    _refuse_best_of(fields)
    refuse_unsupported(fields, chat=True)
    tools, wanted = tools_of(fields), wanted_format(fields)
    if wanted is not None and tools.forced:
        raise RequestError(
            f"{wanted.param}: tool_choice makes the answer a call, so it cannot have another format",
            param=wanted.param,
        )
    extra = fields.section("chat_template_kwargs")
    if extra is not None:
        refuse_known(extra, _OF_TEMPLATES)
    newer = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    older = fields.integer("max_tokens", 1, MAX_TOKENS)
    continues = fields.flag("continue_final_message")
    if continues and fields.flag("add_generation_prompt"):
        raise RequestError(
            "add_generation_prompt: begins a new message, and continue_final_message goes on with the last one; leave "
            "one of both out",
            param="add_generation_prompt",
        )
    return ChatRequest(
        messages=messages_of(fields),
        tools=tools,
        template_values={} if extra is None else extra.raw(),
        add_generation_prompt=fields.flag("add_generation_prompt", not continues),
        continue_final_message=continues,
        wanted_tokens=older if newer is None else newer,
        sampling=fields,
        logprobs=_chat_logprobs(fields),
        stream=fields.flag("stream"),
        options=_stream_options(fields),
        wanted=wanted,
        effort=_effort(fields),
        thoughts=fields.integer(BUDGET, 0, MAX_TOKENS),
        resume=_resume(fields),
    )


def prompt_count(fields: Fields, name: str = "prompt") -> int:
    """How many prompts there are, before any of them is looked at."""
    value = fields.get(name)
    return len(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1


def prompts_of(fields: Fields, name: str = "prompt") -> tuple[Prompt, ...]:
    """A string, strings, token ids, or lists of token ids."""
    value = fields.get(name)
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        fields.refuse(name, "a string, an array of strings, token ids, or an array of token-id arrays")
    if isinstance(value[0], int):
        return (token_ids(value, name),)
    return tuple(_prompt(item, f"{name}[{i}]") for i, item in enumerate(value))


def _prompt(item: object, name: str) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return token_ids(item, name)
    return refuse(name, item, "a string or an array of token ids")


def _refuse_best_of(fields: Fields) -> None:
    best_of = fields.integer("best_of", 1, 128)
    if best_of not in (None, or_else(fields.integer("n", 1, 128), 1)):
        raise RequestError(
            "best_of: only best_of equal to n is supported; ask for n and choose", param="best_of"
        )


def _effort(fields: Fields) -> str | None:
    effort = fields.text("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort: {shown(effort)} is none of {', '.join(EFFORTS)}", param="reasoning_effort"
        )
    return effort


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if fields.flag("logprobs"):
        return or_else(top, 0)
    if top:
        raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return None


def _stream_options(fields: Fields) -> StreamOptions:
    options = fields.section("stream_options")
    if options is None:
        return StreamOptions()
    return StreamOptions(options.flag("include_usage"), options.flag("continuous_usage_stats"))


def _resume(fields: Fields) -> ResumeOptions | None:
    """A client's own id is as long as a random one: it is all that others would have to guess."""
    seconds = fields.number("resume", 0.001, MOST_RESUME_SECONDS)
    id = fields.text("request_id")
    if seconds is None and id is not None:
        raise RequestError(
            "request_id: names a request that outlives its connection; add resume (seconds), or leave it out and "
            "take the id that is answered",
            param="request_id",
        )
    if seconds is None:
        return None
    if id is not None and not _OWN_ID.fullmatch(id):
        raise RequestError(
            f"request_id: {shown(id)} is not 32 to 64 random hexadecimal digits (0-9, a-f); leave it out for one of "
            "the server's",
            param="request_id",
        )
    return ResumeOptions(seconds, id)
