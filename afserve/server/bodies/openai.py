"""The requests of the OpenAI API as values: what was asked, checked, before any text is tokenized.

Follows the OpenAI reference, then vLLM for the sampling fields that OpenAI lacks. Knows no HTTP.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType

from afserve.errors import RequestError, shown
from afserve.server.bodies.declared import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    StreamFields,
)
from afserve.server.bodies.fields import Fields, or_else, refuse, token_ids
from afserve.server.bodies.messages import messages_of
from afserve.server.bodies.structured import WantedGrammar, wanted_format
from afserve.server.bodies.tools import Tools, tools_of
from afserve.server.bodies.unsupported import KnownField, refuse_known, refuse_unsupported

Prompt = str | tuple[int, ...]
BUDGET = ChatBody.thinking_token_budget.name
_OF_TEMPLATES = {
    name: KnownField(NoneType if name == "add_generation_prompt" else list, f"use {name} of the request")
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


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """POST /v1/embeddings."""

    inputs: tuple[Prompt, ...]
    base64: bool
    add_special_tokens: bool


def completion_request(fields: Fields) -> CompletionRequest:
    body = CompletionBody(fields)
    echo = body.echo
    if body.suffix:
        raise RequestError.about("suffix", "this model continues text, it cannot fill a gap; leave it out")
    _refuse_best_of(body)
    refuse_unsupported(fields)
    return CompletionRequest(
        prompts=prompts_of(fields),
        wanted_tokens=body.max_tokens,
        sampling=fields,
        logprobs=body.logprobs,
        echo=echo,
        add_special_tokens=body.add_special_tokens,
        stream=body.stream,
        options=_stream_options(body),
        wanted=wanted_format(fields),
        resume=_resume(body),
    )


def chat_request(fields: Fields) -> ChatRequest:
    body = ChatBody(fields)
    _refuse_best_of(body)
    refuse_unsupported(fields, chat=True)
    tools, wanted = tools_of(fields), wanted_format(fields)
    if wanted is not None and tools.forced:
        raise RequestError.about(
            wanted.param, "tool_choice makes the answer a call, so it cannot have another format"
        )
    extra = body.chat_template_kwargs
    if extra is not None:
        refuse_known(extra, _OF_TEMPLATES)
    newer, older, continues = body.max_completion_tokens, body.max_tokens, body.continue_final_message
    begins = fields.flag("add_generation_prompt", not continues)
    if continues and begins:
        raise RequestError.about(
            "add_generation_prompt",
            "begins a new message, and continue_final_message goes on with the last one; leave one of both out",
        )
    return ChatRequest(
        messages=messages_of(fields),
        tools=tools,
        template_values={} if extra is None else extra.raw(),
        add_generation_prompt=begins,
        continue_final_message=continues,
        wanted_tokens=older if newer is None else newer,
        sampling=fields,
        logprobs=_chat_logprobs(body),
        stream=body.stream,
        options=_stream_options(body),
        wanted=wanted,
        effort=body.reasoning_effort,
        thoughts=body.thinking_token_budget,
        resume=_resume(body),
    )


def embedding_request(fields: Fields) -> EmbeddingRequest:
    refuse_unsupported(fields)
    if fields.get("dimensions") is not None:
        raise RequestError.about(
            "dimensions",
            "this model was not trained to be cut to fewer, so its whole vector is given; leave it out",
        )
    if fields.flag("stream"):
        raise RequestError.about("stream", "vectors come whole; leave it out")
    for name in ("resume", "request_id"):
        if fields.get(name) is not None:
            raise RequestError.about(name, "vectors are not kept; leave it out")
    body = EmbeddingBody(fields)
    base64 = body.encoding_format == "base64"
    return EmbeddingRequest(prompts_of(fields, "input"), base64, body.add_special_tokens)


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
        fields.refuse_field(name, "a string, an array of strings, token ids, or an array of token-id arrays")
    if isinstance(value[0], int):
        return (token_ids(value, name),)
    return tuple(_prompt(item, f"{name}[{i}]") for i, item in enumerate(value))


def _prompt(item: object, name: str) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return token_ids(item, name)
    return refuse(name, item, "a string or an array of token ids")


def _refuse_best_of(body: GenerationBody) -> None:
    best_of = body.best_of
    if best_of not in (None, or_else(body.n, 1)):
        raise RequestError.about("best_of", "only best_of equal to n is supported; ask for n and choose")


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if body.logprobs:
        return or_else(top, 0)
    if top:
        raise RequestError.about("top_logprobs", "needs logprobs to be true")
    return None


def _stream_options(body: GenerationBody) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    options = StreamFields(body.stream_options)
    return StreamOptions(options.include_usage, options.continuous_usage_stats)


def _resume(body: GenerationBody) -> ResumeOptions | None:
    """A client's own id is as long as a random one: it is all that others would have to guess."""
    seconds, id = body.resume, body.request_id
    if seconds is None and id is not None:
        raise RequestError.about(
            "request_id",
            "names a request that outlives its connection; add resume (seconds), or leave it out and take the id "
            "that is answered",
        )
    if seconds is None:
        return None
    if id is not None and not _OWN_ID.fullmatch(id):
        raise RequestError.about(
            "request_id",
            f"{shown(id)} is not 32 to 64 random hexadecimal digits (0-9, a-f); leave it out for one of the server's",
        )
    return ResumeOptions(seconds, id)
