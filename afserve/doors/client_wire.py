"""What both clients say and hear: payloads, replies, stream lines and errors as values. No sockets."""

import base64
import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import httpx

from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import (
    AfserveError,
    AuthError,
    CapacityError,
    DeadlineError,
    NotFoundError,
    OverloadedError,
    PeerError,
    PeerLost,
    ProtocolError,
    RequestError,
    TooLargeError,
    UnavailableError,
)

_BY_STATUS: dict[int, type[AfserveError]] = {
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    413: TooLargeError,
    429: OverloadedError,
    503: CapacityError,
    504: DeadlineError,
}
_BY_KIND: dict[str, type[AfserveError]] = {
    error.kind: error for error in (AfserveError, RequestError, CapacityError, OverloadedError, PeerError)
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model wants. `arguments` is JSON text as the model wrote it, a piece of it in a stream.

    In a stream `index` says which call a piece belongs to; `id` and `name` come with its first piece.
    """

    id: str
    name: str
    arguments: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice of a stream. `finish_reason` comes with its last one."""

    text: str
    finish_reason: str | None = None
    index: int = 0
    completion_tokens: int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; text, reasoning and calls are those of its first choice, `texts` has the text of all.

    `cached_tokens` of the prompt were not computed again. `body` is the JSON as received, for logprobs and whatever
    else was asked.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    texts: tuple[str, ...]
    body: Mapping[str, object]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector of float32 per input, in their order, each of the model's hidden size."""

    vectors: tuple["array[float]", ...]
    model: str
    prompt_tokens: int


def completion_payload(
    prompt: str | Sequence[int], params: SamplingParams | None, *, stream: bool = False
) -> dict[str, object]:
    payload = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **_sampling(params)}
    return _streaming(payload) if stream else payload


def chat_payload(
    messages: Sequence[Mapping[str, object]],
    params: SamplingParams | None,
    *,
    unlimited: bool = False,
    stream: bool = False,
    extra: Mapping[str, object] | None = None,
) -> dict[str, object]:
    sampling = _sampling(params)
    if unlimited:
        sampling.pop("max_tokens", None)
    if "logprobs" in sampling:
        sampling["top_logprobs"], sampling["logprobs"] = sampling["logprobs"], True
    payload = {"messages": [dict(message) for message in messages], **sampling, **(extra or {})}
    return _streaming(payload) if stream else payload


def embedding_payload(
    input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> dict[str, object]:
    """In base64, which is half as long as numbers and gives every float32 back."""
    if isinstance(input, str):
        return {"input": input, "encoding_format": "base64"}
    inputs = [one if isinstance(one, str | int) else list(one) for one in input]
    return {"input": inputs, "encoding_format": "base64"}


def embeddings_of(body: Mapping[str, object]) -> Embeddings:
    data, usage = body["data"], body["usage"]
    assert isinstance(data, list) and isinstance(usage, dict)
    in_order = sorted(data, key=lambda one: int(one["index"]))
    vectors = tuple(_vector(one["embedding"]) for one in in_order)
    return Embeddings(vectors, str(body["model"]), usage["prompt_tokens"])


def _vector(embedding: str | Sequence[float]) -> "array[float]":
    """A server that knows no base64 sends numbers."""
    if not isinstance(embedding, str):
        return array("f", embedding)
    vector = array("f", base64.b64decode(embedding))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def _streaming(payload: dict[str, object]) -> dict[str, object]:
    return {**payload, "stream": True, "stream_options": {"include_usage": True}}


def _sampling(params: SamplingParams | None) -> dict[str, object]:
    """The fields that differ from the defaults; max_tokens always, because chat's own default is another."""
    if params is None:
        return {}
    plain = SamplingParams()
    given: dict[str, object] = {"max_tokens": params.max_tokens}
    for field in fields(params):
        value = getattr(params, field.name)
        if value != getattr(plain, field.name) and field.name not in ("prompt_logprobs", "grammar", "pooled"):
            given[field.name] = list(value) if isinstance(value, tuple) else value
    if params.grammar:
        given["structured_outputs"] = {"grammar": params.grammar}
    if params.logit_bias:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    return given


def reply_of(body: Mapping[str, object]) -> Reply:
    choices = body["choices"]
    usage = body["usage"]
    assert isinstance(choices, list) and isinstance(usage, dict)
    texts = tuple((c["text"] if "text" in c else c["message"]["content"]) or "" for c in choices)
    message = choices[0].get("message") or {}
    return Reply(
        texts[0],
        choices[0]["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        texts,
        body,
        message.get("reasoning") or "",
        _calls(message),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def _calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            call.get("id") or "",
            (call.get("function") or {}).get("name") or "",
            (call.get("function") or {}).get("arguments") or "",
            call.get("index", number),
        )
        for number, call in enumerate(message.get("tool_calls") or ())
    )


def texts_of(body: Mapping[str, object], key: str) -> tuple[str, ...]:
    data = body["data"]
    assert isinstance(data, list)
    return tuple(str(entry[key]) for entry in data)


class Deltas:
    """Reads the lines of an event stream. An error event is raised, a missing end is a lost server.

    `done`: it has its end, be that an error.
    """

    def __init__(self) -> None:
        self.done = False

    def read_line(self, line: str) -> Iterator[Delta]:
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        body = json.loads(data)
        if "error" in body:
            self.done = True
            raise _error(_BY_KIND.get(body["error"].get("type"), AfserveError), body["error"], None)
        if not body["choices"]:
            yield Delta("", completion_tokens=(body.get("usage") or {}).get("completion_tokens"))
        for choice in body["choices"]:
            piece = choice.get("delta") or {"content": choice.get("text")}
            text, thought, calls = piece.get("content"), piece.get("reasoning"), _calls(piece)
            if text or thought or calls or choice["finish_reason"]:
                yield Delta(
                    text or "",
                    choice["finish_reason"],
                    choice["index"],
                    reasoning=thought or "",
                    tool_calls=calls,
                )

    def check_ended(self) -> None:
        if not self.done:
            raise PeerLost("server", "the stream broke off before its end")


def error_of(status: int, text: str, retry_after: str | None) -> AfserveError:
    """The exception for an HTTP error, with the server's own words."""
    kind = _BY_STATUS.get(status, RequestError if status < 500 else AfserveError)
    try:
        error = json.loads(text)["error"]
        kind = _BY_KIND.get(error["type"], kind) if status == 503 else kind
        if status == 503 and kind is CapacityError and retry_after is not None:
            kind = UnavailableError
    except (ValueError, LookupError, TypeError):
        error = {"message": f"the server answered {status}: {text[:200]}"}
    return _error(kind, error, retry_after)


def _error(kind: type[AfserveError], error: Mapping[str, object], retry_after: str | None) -> AfserveError:
    message = str(error.get("message"))
    if issubclass(kind, OverloadedError):
        return kind(message, retry_after=_seconds(retry_after))
    param = error.get("param")
    return kind(message, param=param if isinstance(param, str) else None)


def _seconds(retry_after: str | None) -> float:
    """Of the header; a date, or none, is taken for one second."""
    try:
        return max(0.0, float(retry_after or 1.0))
    except ValueError:
        return 1.0


def unreachable(url: str, error: Exception) -> AfserveError:
    """What a network failure means for the caller, and what to do."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return PeerLost(url, "nothing answers there; start a server with `afserve up`, or give another --url")
    if isinstance(error, httpx.TimeoutException):
        return DeadlineError(f"{url}: no answer in time; look at `afserve status`")
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
        return PeerLost(url, f"the connection broke off: {error}")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return RequestError(f"{url}: not an http:// or https:// address", param="url")
    return ProtocolError(f"{url}: answered something that is not this API: {error}")
