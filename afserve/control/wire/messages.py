"""The control plane's values as protobuf bytes and back. The only file that touches generated code.

`encode_*` and `decode_*` are handed to gRPC as serializers. Bytes that no correct peer sends raise
ProtocolError before anything of them is used.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from afserve import errors
from afserve.config import EngineConfig, ModelSource
from afserve.control.membership.desired import Deployment
from afserve.control.wire import control_pb2 as pb
from afserve.control.wire.keeping import Claim, Claimed, Given, Halt, Keep, KeptAnswer
from afserve.control.wire.placements import Memo, Said, SaidLast, pack, unpack
from afserve.control.wire.values import (
    Acknowledge,
    Adopt,
    Adopted,
    Assigned,
    Attend,
    AttentionNodes,
    AttentionPeer,
    Cancel,
    Drain,
    Drained,
    Endpoint,
    ExpertPeer,
    Failed,
    Filled,
    FillSlots,
    FromAttention,
    FromNode,
    Gateways,
    Heartbeat,
    Held,
    Identity,
    KvSource,
    Noted,
    Peers,
    Prefixes,
    Progress,
    Query,
    QueryAnswer,
    Ready,
    Record,
    Recorded,
    Refused,
    Register,
    Resume,
    Retire,
    Routed,
    Serve,
    Shutdown,
    Stage,
    Standing,
    Stuck,
    Submit,
    ToAttention,
    Tokens,
    ToNode,
    Traced,
    Unheard,
)
from afserve.engine.request import (
    NO_ORIGIN,
    NO_TENANT,
    GenerationRequest,
    Origin,
    SamplingParams,
    Tenant,
    TokenEvent,
    TokenLogprob,
)
from afserve.engine.stats import AttentionStats, ExpertStats, KvStats, TierStats
from afserve.errors import AfserveError, ProtocolError
from afserve.member import AttentionPhase, NodeId, Role
from afserve.placement.optimizer.problem import Ints
from afserve.placement.placement import Placement
from afserve.placement.stats import RoutedRows
from afserve.settings import build

Value = TypeVar("Value")
Stats = AttentionStats | ExpertStats | None
Proto = Any  # generated classes carry no types that mypy can follow

_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AfserveError)
}
_PLAIN = (bool, int, float, str, bytes)
_to_many: Memo[bytes] = Memo()  # a thousand nodes are told of a thousand peers with one message


def encode_from_node(value: FromNode) -> bytes:
    return _encode(pb.FromNode(), value, _FROM_NODE)


def decode_from_node(data: bytes) -> FromNode:
    decoded: FromNode = _decode(pb.FromNode, data, _FROM_NODE)
    return decoded


def encode_to_node(value: ToNode, last: SaidLast | None = None) -> bytes:
    """`last` is this end's of the stream that it goes over; None where it is the only message."""
    if (placed := _PLACED.get(type(value))) is not None:
        return _encode(pb.ToNode(), value, {type(value): _over(placed, last or SaidLast())})
    return _to_many.get(id(value), lambda: _encode(pb.ToNode(), value, _TO_NODE), (value,))


def decode_to_node(data: bytes, last: SaidLast | None = None) -> ToNode:
    """`last` as in `encode_to_node`, of the other end."""
    last = last or SaidLast()
    table = _TO_NODE | {kind: _over(placed, last) for kind, placed in _PLACED.items()}
    decoded: ToNode = _decode(pb.ToNode, data, table)
    return decoded


def encode_from_attention(value: FromAttention) -> bytes:
    return _encode(pb.FromAttention(), value, _FROM_ATTENTION)


def decode_from_attention(data: bytes) -> FromAttention:
    decoded: FromAttention = _decode(pb.FromAttention, data, _FROM_ATTENTION)
    return decoded


def encode_to_attention(value: ToAttention) -> bytes:
    return _encode(pb.ToAttention(), value, _TO_ATTENTION)


def decode_to_attention(data: bytes) -> ToAttention:
    decoded: ToAttention = _decode(pb.ToAttention, data, _TO_ATTENTION)
    return decoded


Codec = tuple[str, Callable[[Any, Proto], None], Callable[[Proto], Any]]
PlacedCodec = tuple[str, Callable[[Any, Proto, SaidLast], None], Callable[[Proto, SaidLast], Any]]


def _encode(envelope: Proto, value: object, table: dict[type, Codec]) -> bytes:
    field, put, _ = table[type(value)]
    body = getattr(envelope, field)
    body.SetInParent()  # a body without fields must still name itself
    put(value, body)
    data: bytes = envelope.SerializeToString()
    return data


def _decode(envelope: Proto, data: bytes, table: dict[type, Codec]) -> Any:
    try:
        message = envelope.FromString(data)
        which = message.WhichOneof("body")
        for field, _, take in table.values():
            if field == which:
                return take(getattr(message, field))
    except (DecodeError, ValueError, TypeError, IndexError, errors.UserError) as error:
        raise ProtocolError(f"control message of {len(data)} bytes is not usable: {error}") from error
    raise ProtocolError(f"control message of {len(data)} bytes is of an unknown kind; are versions mixed?")


# ---- flat values: dataclass fields and protobuf fields have the same names


_known: dict[type, tuple[tuple[str, bool], ...]] = {}


def _names(cls: type) -> tuple[tuple[str, bool], ...]:
    """Of its fields, and whether each may be None. Heartbeats of thousands of nodes ask for them."""
    if cls not in _known:
        _known[cls] = tuple((field.name, "None" in str(field.type)) for field in fields(cls))
    return _known[cls]


def _put_flat(value: Any, proto: Proto) -> None:
    """Fields that are None stay unset, which is what `optional` in the proto stands for."""
    for name, _ in _names(type(value)):
        item = getattr(value, name)
        if isinstance(item, _PLAIN):
            setattr(proto, name, item)


def _take_flat(cls: type[Value], proto: Proto, **others: object) -> Value:
    for name, optional in _names(cls):
        if name not in others:
            absent = optional and not proto.HasField(name)
            others[name] = None if absent else getattr(proto, name)
    return cls(**others)


def _flat(name: str, cls: type) -> Codec:
    return name, _put_flat, lambda proto: _take_flat(cls, proto)


# ---- settings: by name, each with its type

_SCALARS = {bool: "flag", int: "whole", float: "real", str: "text"}


def put_settings(group: Any, proto: Proto) -> None:
    for field in fields(group):
        item, scalar = getattr(group, field.name), proto.settings[field.name]
        if item is not None:
            setattr(scalar, _SCALARS[type(item)], item)


def take_settings(cls: type[Value], proto: Proto) -> Value:
    """Every field, and no other: a peer that knows more or fewer settings is not obeyed by halves."""
    values = {name: _take_scalar(scalar) for name, scalar in proto.settings.items()}
    missing = {field.name for field in fields(cls)} - values.keys()  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))}: missing")
    return build(cls, values)


def _take_scalar(proto: Proto) -> bool | int | float | str | None:
    which = proto.WhichOneof("value")
    value: bool | int | float | str | None = None if which is None else getattr(proto, which)
    return value


# ---- the values that are not flat


def _put_endpoint(value: Endpoint, proto: Proto) -> None:
    proto.address = value.address
    proto.agreed.update(value.agreed)


def _take_endpoint(proto: Proto) -> Endpoint:
    return Endpoint(proto.address, dict(proto.agreed))


def _put_register(value: Register, proto: Proto) -> None:
    _put_flat(value, proto)
    if value.standing is not None:
        _put_standing(value.standing, proto.standing)


def _take_register(proto: Proto) -> Register:
    standing = _take_standing(proto.standing) if proto.HasField("standing") else None
    return _take_flat(Register, proto, standing=standing)


def _put_standing(value: Standing, proto: Proto) -> None:
    proto.generation, proto.stage, proto.resident_bytes = value.generation, value.stage, value.resident_bytes
    if value.endpoint is not None:
        proto.endpoint.SetInParent()
        _put_endpoint(value.endpoint, proto.endpoint)
    if value.identity is not None:
        proto.identity.SetInParent()
        _put_identity(value.identity, proto.identity)
    proto.held.extend(map(pack, value.held))
    proto.newest = value.newest
    proto.asked.extend(map(pack, value.asked))


def _take_standing(proto: Proto) -> Standing:
    return Standing(
        proto.generation,
        Stage(proto.stage),
        proto.resident_bytes,
        _take_endpoint(proto.endpoint) if proto.HasField("endpoint") else None,
        Identity(dict(proto.identity.things)) if proto.HasField("identity") else None,
        tuple(map(unpack, proto.held)),
        tuple(map(unpack, proto.asked)),
        proto.newest,
    )


def _put_identity(value: Identity, proto: Proto) -> None:
    proto.things.update(value.things)


def _put_heartbeat(value: Heartbeat, proto: Proto) -> None:
    proto.resident_bytes = value.resident_bytes
    put_stats(value.stats, proto)


def _take_heartbeat(proto: Proto) -> Heartbeat:
    return Heartbeat(proto.resident_bytes, take_stats(proto))


def put_stats(stats: Stats, proto: Proto) -> None:
    """Into a message that has one of both kinds, or none."""
    if stats is not None:
        body = proto.attention if isinstance(stats, AttentionStats) else proto.expert
        body.SetInParent()
        _put_flat(stats, body)
        if isinstance(stats, AttentionStats):
            _put_flat(stats.kv, body.kv)
            _put_flat(stats.tiers, body.tiers)


def take_stats(proto: Proto) -> Stats:
    match proto.WhichOneof("stats"):
        case "attention":
            body = proto.attention
            tiers, kv = _take_flat(TierStats, body.tiers), _take_flat(KvStats, body.kv)
            return _take_flat(AttentionStats, body, kv=kv, tiers=tiers)
        case "expert":
            return _take_flat(ExpertStats, proto.expert)
    return None


def _put_routed(value: Routed, proto: Proto) -> None:
    """In the narrowest unsigned integers that hold the largest count: one byte each for most seconds of decoding."""
    rows = value.rows
    largest = max(int(rows.prefill_LE.max()), int(rows.decode_LE.max()))
    width = next(w for w in _WIDTHS if largest < 1 << 8 * w)
    proto.layers, proto.experts = rows.decode_LE.shape
    proto.width = width
    for name, counts_LE in (("prefill", rows.prefill_LE), ("decode", rows.decode_LE)):
        setattr(proto, name, counts_LE.astype(f"<u{width}").tobytes() if counts_LE.any() else b"")


def _take_routed(proto: Proto) -> Routed:
    if proto.width not in _WIDTHS:
        raise ValueError(f"counts of {proto.width} bytes")
    shape = proto.layers, proto.experts
    return Routed(
        RoutedRows(_counts(proto.prefill, proto.width, shape), _counts(proto.decode, proto.width, shape))
    )


def _counts(data: bytes, width: int, shape: tuple[int, int]) -> Ints:
    """Empty bytes are zeros. Sizes are compared before anything is allocated."""
    expected = shape[0] * shape[1] * width
    if not data and expected <= _MOST_COUNTS:
        return np.zeros(shape, dtype=np.int64)
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes of counts, {shape[0]} x {shape[1]} of {width} are {expected}")
    found = np.frombuffer(data, dtype=f"<u{width}").astype(np.int64).reshape(shape)
    if found.min(initial=0) < 0:
        raise ValueError("a count above 2**63")
    return found


_WIDTHS = (1, 2, 4, 8)
_MOST_COUNTS = 64 << 20


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
    return bool(event.finish_reason or scored or event.cached_tokens or event.queued or event.pooled)


def _put_extra(event: TokenEvent, index: int, proto: Proto) -> None:
    proto.event = index
    proto.finish_reason = event.finish_reason or ""
    proto.cached_tokens = event.cached_tokens
    proto.error = event.error or ""
    if event.stop_token_id is not None:
        proto.stop_token_id = event.stop_token_id
    _put_logprobs(event.logprobs, proto.logprobs)
    _put_logprobs(event.prompt_logprobs, proto.prompt_logprobs)
    proto.pooled, proto.queued = event.pooled, event.queued


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
        error=extra.error or None,
        pooled=extra.pooled,
        queued=extra.queued,
    )


def _take_logprob(proto: Proto) -> TokenLogprob:
    top = tuple(zip(proto.top_token, proto.top_logprob, strict=True))
    return TokenLogprob(proto.token_id, proto.logprob, proto.rank, top)


def _put_error(error: AfserveError, proto: Proto) -> None:
    proto.kind, proto.message, proto.param = type(error).__name__, error.message, error.param or ""
    proto.retry_after = getattr(error, "retry_after", 0.0)


def _take_error(proto: Proto) -> AfserveError:
    """A kind with arguments of its own (PeerLost) comes back as its nearest plain ancestor."""
    kind = _KINDS.get(proto.kind, AfserveError)
    if issubclass(kind, errors.OverloadedError):
        return kind(proto.message, retry_after=proto.retry_after)
    if issubclass(kind, errors.PeerLost):
        return errors.PeerError(proto.message)
    return kind(proto.message, param=proto.param or None)


def _put_refused(value: Refused, proto: Proto) -> None:
    proto.request = value.request
    _put_error(value.error, proto.error)


def _put_failed(value: Failed, proto: Proto) -> None:
    _put_error(value.error, proto.error)


def _put_assigned(value: Assigned, proto: Proto, last: SaidLast) -> None:
    deployment = value.deployment
    proto.role, proto.index, proto.generation = value.node.role, value.node.index, value.generation
    for role, count in deployment.counts.items():
        proto.counts[role] = count
    for index, phase in deployment.phases.items():
        proto.phases[index] = phase
    _put_said(deployment.placement, proto, last)
    _put_flat(deployment, proto)
    _put_flat(deployment.source, proto.source)
    put_settings(deployment.engine, proto.engine)


def _take_assigned(proto: Proto, last: SaidLast) -> Assigned:
    deployment = _take_flat(
        Deployment,
        proto,
        source=_take_flat(ModelSource, proto.source),
        engine=take_settings(EngineConfig, proto.engine),
        counts={Role(role): count for role, count in sorted(proto.counts.items())},
        phases={index: AttentionPhase(phase) for index, phase in sorted(proto.phases.items())},
        placement=_take_said(proto, last),
    )
    return Assigned(NodeId(Role(proto.role), proto.index), proto.generation, deployment)


def _put_peers(value: Peers, proto: Proto) -> None:
    for peer in value.experts:
        _put_flat(peer, proto.experts.add())


def _take_peers(proto: Proto) -> Peers:
    return Peers(tuple(_take_flat(ExpertPeer, expert) for expert in proto.experts))


def _put_gateways(value: Gateways, proto: Proto) -> None:
    for index, address in value.gateways:
        proto.gateways.add(index=index, address=address)


def _take_gateways(proto: Proto) -> Gateways:
    return Gateways(tuple((gateway.index, gateway.address) for gateway in proto.gateways))


def _put_attention_nodes(value: AttentionNodes, proto: Proto) -> None:
    proto.refusing, proto.serves = value.refusing, value.serves
    for peer in value.nodes:
        _put_flat(peer, proto.nodes.add())


def _take_attention_nodes(proto: Proto) -> AttentionNodes:
    peers = tuple(
        _take_flat(AttentionPeer, peer, phase=AttentionPhase(peer.phase or AttentionPhase.BOTH))
        for peer in proto.nodes
    )
    return AttentionNodes(peers, proto.refusing, proto.serves)


def _put_attend(value: Attend, proto: Proto) -> None:
    proto.index, proto.generation, proto.stream = value.index, value.generation, value.stream
    for held in value.held:
        _put_flat(held, proto.held.add())


def _take_attend(proto: Proto) -> Attend:
    held = tuple(_take_flat(Held, held) for held in proto.held)
    return Attend(proto.index, proto.generation, held, proto.stream)


def _put_prefixes(value: Prefixes, proto: Proto) -> None:
    proto.came.extend(value.came)
    proto.went.extend(value.went)
    proto.anew = value.anew


def _put_acknowledge(value: Acknowledge, proto: Proto) -> None:
    proto.requests.extend(value.requests)


def _put_answer(value: QueryAnswer, proto: Proto) -> None:
    proto.number, proto.body = value.number, value.body
    if value.error is not None:
        _put_error(value.error, proto.error)


def _take_answer(proto: Proto) -> QueryAnswer:
    return QueryAnswer(proto.number, proto.body, _optional_error(proto))


def _put_shutdown(value: Shutdown, proto: Proto) -> None:
    if value.error is not None:
        _put_error(value.error, proto.error)


def _optional_error(proto: Proto) -> AfserveError | None:
    return _take_error(proto.error) if proto.HasField("error") else None


def _put_said(placement: Placement, proto: Proto, last: SaidLast) -> None:
    said = last.say(placement)
    proto.placement.data = said.data
    if said.base is not None:
        proto.placement.base = said.base


def _take_said(proto: Proto, last: SaidLast) -> Placement:
    said = proto.placement
    return last.hear(Said(said.data, said.base if said.HasField("base") else None))


def _put_adopt(value: Adopt, proto: Proto, last: SaidLast) -> None:
    _put_said(value.placement, proto, last)


def _take_adopt(proto: Proto, last: SaidLast) -> Adopt:
    return Adopt(_take_said(proto, last))


def _put_fill(value: FillSlots, proto: Proto, last: SaidLast) -> None:
    _put_said(value.placement, proto, last)
    proto.urgent = value.urgent


def _take_fill(proto: Proto, last: SaidLast) -> FillSlots:
    return FillSlots(_take_said(proto, last), proto.urgent)


def _put_submit(value: Submit, proto: Proto) -> None:
    request, params = value.request, value.request.params
    proto.request = request.handle
    proto.prompt.extend(request.prompt_ids)
    proto.generated.extend(request.generated)
    proto.priority = request.priority
    proto.cache_salt = request.cache_salt
    if value.keep is not None:
        _put_flat(value.keep, proto.keep)
    if request.tenant != NO_TENANT:
        _put_flat(request.tenant, proto.tenant)
    if request.origin != NO_ORIGIN:
        proto.origin.SetInParent()
        _put_flat(request.origin, proto.origin)
    for name in _SAMPLING:
        item = getattr(params, name)
        if item is not None:
            setattr(proto.sampling, name, item)
    if value.kv_from is not None:
        proto.kv_from.SetInParent()
        _put_flat(value.kv_from, proto.kv_from)
    proto.sampling.stop_token_ids.extend(params.stop_token_ids)
    proto.sampling.bias_token.extend([token for token, _ in params.logit_bias])
    proto.sampling.bias_value.extend([bias for _, bias in params.logit_bias])


def _take_submit(proto: Proto) -> Submit:
    sampling = proto.sampling
    optional = {"seed", "logprobs", "prompt_logprobs"}
    plain = {n: getattr(sampling, n) for n in _SAMPLING if n not in optional or sampling.HasField(n)}
    bias = _pairs(sampling.bias_token, sampling.bias_value)
    params = SamplingParams(**plain, stop_token_ids=tuple(sampling.stop_token_ids), logit_bias=bias)
    source = _take_flat(KvSource, proto.kv_from) if proto.HasField("kv_from") else None
    keep = _take_flat(Keep, proto.keep) if proto.HasField("keep") else None
    origin = _take_origin(proto.origin) if proto.HasField("origin") else NO_ORIGIN
    tenant = _take_flat(Tenant, proto.tenant) if proto.HasField("tenant") else NO_TENANT
    request = GenerationRequest(
        proto.request,
        tuple(proto.prompt),
        params,
        tuple(proto.generated),
        proto.priority,
        proto.cache_salt,
        origin,
        tenant=tenant,
    )
    return Submit(request, source, keep)


def _take_origin(proto: Proto) -> Origin:
    """It reaches logs and collectors: what is no name and no traceparent is refused."""
    if len(proto.request_id) > _MOST_NAME or not proto.request_id.isprintable():
        raise ValueError("origin: request_id is not a short printable text")
    if proto.traceparent and not _TRACEPARENT.fullmatch(proto.traceparent):
        raise ValueError("origin: traceparent is not one of W3C Trace Context")
    return _take_flat(Origin, proto)


def _put_claimed(value: Claimed, proto: Proto) -> None:
    proto.query = value.query
    for answer in value.answers:
        into = proto.answers.add()
        _put_flat(answer, into)
        into.prompt.extend(answer.prompt_ids)
        _put_flat(answer.keep, into.keep)


def _take_claimed(proto: Proto) -> Claimed:
    return Claimed(proto.query, tuple(map(_take_kept_answer, proto.answers)))


def _take_kept_answer(proto: Proto) -> KeptAnswer:
    return _take_flat(KeptAnswer, proto, prompt_ids=tuple(proto.prompt), keep=_take_flat(Keep, proto.keep))


def _put_given(value: Given, proto: Proto) -> None:
    proto.requests.extend(value.requests)


def _pairs(left: Iterable[int], right: Iterable[float]) -> tuple[tuple[int, float], ...]:
    return tuple(zip(left, right, strict=True))


_MOST_NAME = 128  # characters of a request's id
_TRACEPARENT = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-01")

# The first three stay above the engine; the others are not scalars.
_ABOVE = {"stop", "n", "include_stop_str_in_output", "stop_token_ids", "logit_bias"}
_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name not in _ABOVE)

_FROM_NODE: dict[type, Codec] = {
    Routed: ("routed", _put_routed, _take_routed),
    Heartbeat: ("heartbeat", _put_heartbeat, _take_heartbeat),
    Progress: _flat("progress", Progress),
    Register: ("register", _put_register, _take_register),
    Endpoint: ("endpoint", _put_endpoint, _take_endpoint),
    Identity: ("identity", _put_identity, lambda p: Identity(dict(p.things))),
    Ready: _flat("ready", Ready),
    Drained: _flat("drained", Drained),
    Filled: _flat("filled", Filled),
    Adopted: _flat("adopted", Adopted),
    Failed: ("failed", _put_failed, lambda p: Failed(_take_error(p.error))),
    Query: _flat("query", Query),
    Stuck: _flat("stuck", Stuck),
    Unheard: _flat("unheard", Unheard),
    Noted: _flat("noted", Noted),
    Recorded: _flat("recorded", Recorded),
    Traced: _flat("traced", Traced),
}
_TO_NODE: dict[type, Codec] = {
    Peers: ("peers", _put_peers, _take_peers),
    Drain: _flat("drain", Drain),
    Shutdown: ("shutdown", _put_shutdown, lambda p: Shutdown(_optional_error(p))),
    Retire: _flat("retire", Retire),
    Serve: _flat("serve", Serve),
    Record: _flat("record", Record),
    Gateways: ("gateways", _put_gateways, _take_gateways),
    AttentionNodes: ("attention_nodes", _put_attention_nodes, _take_attention_nodes),
    QueryAnswer: ("query_answer", _put_answer, _take_answer),
}
_PLACED: dict[type, PlacedCodec] = {
    Assigned: ("assigned", _put_assigned, _take_assigned),
    FillSlots: ("fill_slots", _put_fill, _take_fill),
    Adopt: ("adopt", _put_adopt, _take_adopt),
}
_FROM_ATTENTION: dict[type, Codec] = {
    Tokens: ("tokens", _put_tokens, _take_tokens),
    Refused: ("refused", _put_refused, lambda p: Refused(p.request, _take_error(p.error))),
    Attend: ("attend", _put_attend, _take_attend),
    Claimed: ("claimed", _put_claimed, _take_claimed),
    Given: ("given", _put_given, lambda p: Given(tuple(p.requests))),
    Prefixes: ("prefixes", _put_prefixes, lambda p: Prefixes(tuple(p.came), tuple(p.went), p.anew)),
}
_TO_ATTENTION: dict[type, Codec] = {
    Submit: ("submit", _put_submit, _take_submit),
    Cancel: _flat("cancel", Cancel),
    Acknowledge: ("acknowledge", _put_acknowledge, lambda p: Acknowledge(tuple(p.requests))),
    Resume: _flat("resume", Resume),
    Halt: _flat("halt", Halt),
    Claim: _flat("claim", Claim),
}


def _over(placed: PlacedCodec, last: SaidLast) -> Codec:
    """For one end of one stream."""
    name, put, take = placed
    return name, lambda value, proto: put(value, proto, last), lambda proto: take(proto, last)
