"""What gateways and attention nodes say to each other of requests: each value, its field, and the way in and out.

The tables are all that others use; `messages.py` opens and closes the envelopes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from afserve.control.wire.cache_values import AskCache, KeptCache
from afserve.control.wire.fields import Codec, Proto, codec, put_fields, take_fields
from afserve.control.wire.keeping import Claim, Claimed, Given, Halt
from afserve.control.wire.request_values import (
    Acknowledge,
    Attend,
    Cancel,
    Prefixes,
    Refused,
    Resume,
    Submit,
    Tokens,
)
from afserve.engine.scheduling.found_below import FoundBelow
from afserve.engine.scheduling.request import (
    NO_ORIGIN,
    NO_TENANT,
    NOT_PREDICTED,
    GenerationRequest,
    Origin,
    Predicted,
    SamplingParams,
    Tenant,
    TokenEvent,
    TokenLogprob,
)
from afserve.engine.scheduling.routed_experts import RoutedExperts
from afserve.tiles import pack_tiles, unpack_tiles


def _put_tokens(value: Tokens, proto: Proto) -> None:
    events = value.events
    proto.request.extend([event.handle for event in events])
    proto.count.extend([len(event.token_ids) for event in events])
    proto.token.extend([token for event in events for token in event.token_ids])
    for index, event in enumerate(events):
        if _has_extra(event):
            _put_extra(event, index, proto.extra.add())


def _has_extra(event: TokenEvent) -> bool:
    scored = event.logprobs or event.prompt_logprobs
    rare = event.pooled or event.routed is not None or event.predicted is not NOT_PREDICTED
    return bool(event.finish_reason or scored or event.cached_tokens or event.queued or rare)


def _put_extra(event: TokenEvent, index: int, proto: Proto) -> None:
    proto.event = index
    proto.finish_reason = event.finish_reason or ""
    proto.cached_tokens = event.cached_tokens
    proto.from_peer, proto.from_host, proto.from_disk = event.found_below
    proto.error = event.error or ""
    if event.stop_token_id is not None:
        proto.stop_token_id = event.stop_token_id
    _put_logprobs(event.logprobs, proto.logprobs)
    _put_logprobs(event.prompt_logprobs, proto.prompt_logprobs)
    proto.pooled, proto.queued = event.pooled, event.queued
    proto.accepted, proto.rejected = event.predicted
    if event.routed is not None:
        put_fields(event.routed, proto.routed)


def _put_logprobs(values: Sequence[TokenLogprob | None], into: Proto) -> None:
    for value in values:
        proto = into.add()
        if value is not None:
            proto.known = True
            proto.token_id, proto.logprob, proto.rank = value.token_id, value.logprob, value.rank
            proto.top_token.extend([token for token, _ in value.top])
            proto.top_logprob.extend([logprob for _, logprob in value.top])


def _take_tokens(proto: Proto) -> Tokens:
    tokens, start, events = tuple(proto.token), 0, []
    extras = {extra.event: extra for extra in proto.extra}
    for index, (request, count) in enumerate(zip(proto.request, proto.count, strict=True)):
        run = tokens[start : start + count]
        start += count
        extra = extras.get(index)
        events.append(TokenEvent(request, run) if extra is None else _take_event(request, run, extra))
    if start != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, counts say {start}")
    return Tokens(tuple(events))


def _take_event(request: int, run: tuple[int, ...], extra: Proto) -> TokenEvent:
    return TokenEvent(
        request,
        run,
        finish_reason=extra.finish_reason or None,
        stop_token_id=extra.stop_token_id if extra.HasField("stop_token_id") else None,
        logprobs=tuple(_take_logprob(item) for item in extra.logprobs),
        prompt_logprobs=tuple(_take_logprob(item) if item.known else None for item in extra.prompt_logprobs),
        cached_tokens=extra.cached_tokens,
        found_below=FoundBelow(extra.from_peer, extra.from_host, extra.from_disk),
        error=extra.error or None,
        pooled=extra.pooled,
        queued=extra.queued,
        predicted=Predicted(extra.accepted, extra.rejected),
        routed=take_fields(RoutedExperts, extra.routed) if extra.HasField("routed") else None,
    )


def _take_logprob(proto: Proto) -> TokenLogprob:
    top = tuple(zip(proto.top_token, proto.top_logprob, strict=True))
    return TokenLogprob(proto.token_id, proto.logprob, proto.rank, top)


def _put_submit(value: Submit, proto: Proto) -> None:
    request, params = value.request, value.request.params
    proto.request = request.handle
    proto.prompt.extend(request.prompt_ids)
    proto.generated.extend(request.generated)
    proto.prediction.extend(request.prediction)
    proto.priority = request.priority
    proto.cache_salt, proto.retain = request.cache_salt, request.retain
    proto.tiles = pack_tiles(request.tiles)
    put_fields(value, proto, leave=("request",))
    if request.tenant != NO_TENANT:
        put_fields(request.tenant, proto.tenant)
    if request.origin != NO_ORIGIN:
        proto.origin.SetInParent()
        put_fields(request.origin, proto.origin)
    for name in _SAMPLING:
        item = getattr(params, name)
        if item is not None:
            setattr(proto.sampling, name, item)
    proto.sampling.stop_token_ids.extend(params.stop_token_ids)
    proto.sampling.bias_token.extend([token for token, _ in params.logit_bias])
    proto.sampling.bias_value.extend([bias for _, bias in params.logit_bias])


def _take_submit(proto: Proto) -> Submit:
    sampling = proto.sampling
    optional = {"seed", "logprobs", "prompt_logprobs", "draft"}
    plain = {n: getattr(sampling, n) for n in _SAMPLING if n not in optional or sampling.HasField(n)}
    bias = _pairs(sampling.bias_token, sampling.bias_value)
    params = SamplingParams(**plain, stop_token_ids=tuple(sampling.stop_token_ids), logit_bias=bias)
    origin = _take_origin(proto.origin) if proto.HasField("origin") else NO_ORIGIN
    tenant = take_fields(Tenant, proto.tenant) if proto.HasField("tenant") else NO_TENANT
    request = GenerationRequest(
        proto.request,
        tuple(proto.prompt),
        params,
        tuple(proto.generated),
        proto.priority,
        proto.cache_salt,
        origin,
        tenant=tenant,
        prediction=tuple(proto.prediction),
        retain=proto.retain,
        tiles=unpack_tiles(proto.tiles),
    )
    return take_fields(Submit, proto, request=request)


def _take_origin(proto: Proto) -> Origin:
    """It reaches logs and collectors: what is no name and no traceparent is refused."""
    if len(proto.request_id) > _MOST_NAME or not proto.request_id.isprintable():
        raise ValueError("origin: request_id is not a short printable text")
    if proto.traceparent and not _TRACEPARENT.fullmatch(proto.traceparent):
        raise ValueError("origin: traceparent is not one of W3C Trace Context")
    return take_fields(Origin, proto)


def _pairs(left: Iterable[int], right: Iterable[float]) -> tuple[tuple[int, float], ...]:
    return tuple(zip(left, right, strict=True))


_MOST_NAME = 128  # characters of a request's id
_TRACEPARENT = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-01")
# The first three stay above the engine; the others are not scalars.
_ABOVE = {"stop", "n", "include_stop_str_in_output", "stop_token_ids", "logit_bias"}
_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name not in _ABOVE)
FROM_ATTENTION: dict[type, Codec] = {
    Tokens: ("tokens", _put_tokens, _take_tokens),
    Refused: codec("refused", Refused),
    Attend: codec("attend", Attend),
    Claimed: codec("claimed", Claimed),
    Given: codec("given", Given),
    Prefixes: codec("prefixes", Prefixes),
    KeptCache: codec("kept_cache", KeptCache),
}
TO_ATTENTION: dict[type, Codec] = {
    Submit: ("submit", _put_submit, _take_submit),
    Cancel: codec("cancel", Cancel),
    Acknowledge: codec("acknowledge", Acknowledge),
    Resume: codec("resume", Resume),
    Halt: codec("halt", Halt),
    Claim: codec("claim", Claim),
    AskCache: codec("ask_cache", AskCache),
}
