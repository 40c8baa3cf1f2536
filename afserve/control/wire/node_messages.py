"""What the controller and the nodes say to each other: each value, the field of its envelope, and the way in and out.

The tables are all that others use; `messages.py` opens and closes the envelopes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from afserve.config import EngineConfig, ModelSource
from afserve.control.membership.desired import Deployment
from afserve.control.wire.fields import (
    Codec,
    Proto,
    flat,
    optional_error,
    put_error,
    put_flat,
    put_settings,
    put_stats,
    take_error,
    take_flat,
    take_settings,
    take_stats,
)
from afserve.control.wire.placements import SaidLast, SaidPlacement, pack, unpack
from afserve.control.wire.values import (
    Adopt,
    Adopted,
    Assigned,
    AttentionNodes,
    AttentionPeer,
    Drain,
    Drained,
    Endpoint,
    ExpertPeer,
    Failed,
    Filled,
    FillSlots,
    Gateways,
    Heartbeat,
    Identity,
    NodeStage,
    Noted,
    Peers,
    Progress,
    Query,
    QueryAnswer,
    Ready,
    Record,
    Recorded,
    Register,
    Retire,
    Routed,
    Serve,
    Shutdown,
    Standing,
    Stuck,
    Traced,
    Unfilled,
    Unheard,
)
from afserve.errors import ProtocolError
from afserve.member import AttentionPhase, NodeId, Role
from afserve.placement.optimizer.problem import Ints
from afserve.placement.placement import Placement
from afserve.placement.stats import RoutedRows

PlacedCodec = tuple[str, Callable[[Any, Proto, SaidLast], None], Callable[[Proto, SaidLast], Any]]


def _put_endpoint(value: Endpoint, proto: Proto) -> None:
    proto.address = value.address
    proto.agreed.update(value.agreed)


def _take_endpoint(proto: Proto) -> Endpoint:
    return Endpoint(proto.address, dict(proto.agreed))


def _put_register(value: Register, proto: Proto) -> None:
    put_flat(value, proto)
    if value.standing is not None:
        _put_standing(value.standing, proto.standing)


def _take_register(proto: Proto) -> Register:
    standing = _take_standing(proto.standing) if proto.HasField("standing") else None
    return take_flat(Register, proto, standing=standing)


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
        NodeStage(proto.stage),
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


def _put_failed(value: Failed, proto: Proto) -> None:
    put_error(value.error, proto.error)


def _put_assigned(value: Assigned, proto: Proto, last: SaidLast) -> None:
    deployment = value.deployment
    proto.role, proto.index, proto.generation = value.node.role, value.node.index, value.generation
    for role, count in deployment.counts.items():
        proto.counts[role] = count
    for index, phase in deployment.phases.items():
        proto.phases[index] = phase
    _put_said(deployment.placement, proto, last)
    put_flat(deployment, proto)
    put_flat(deployment.source, proto.source)
    put_settings(deployment.engine, proto.engine)


def _take_assigned(proto: Proto, last: SaidLast) -> Assigned:
    deployment = take_flat(
        Deployment,
        proto,
        source=take_flat(ModelSource, proto.source),
        engine=take_settings(EngineConfig, proto.engine),
        counts={Role(role): count for role, count in sorted(proto.counts.items())},
        phases={index: AttentionPhase(phase) for index, phase in sorted(proto.phases.items())},
        placement=_take_said(proto, last),
    )
    return Assigned(NodeId(Role(proto.role), proto.index), proto.generation, deployment)


def _put_peers(value: Peers, proto: Proto) -> None:
    for peer in value.experts:
        put_flat(peer, proto.experts.add())


def _take_peers(proto: Proto) -> Peers:
    return Peers(tuple(take_flat(ExpertPeer, expert) for expert in proto.experts))


def _put_gateways(value: Gateways, proto: Proto) -> None:
    for index, address in value.gateways:
        proto.gateways.add(index=index, address=address)


def _take_gateways(proto: Proto) -> Gateways:
    return Gateways(tuple((gateway.index, gateway.address) for gateway in proto.gateways))


def _put_attention_nodes(value: AttentionNodes, proto: Proto) -> None:
    proto.refusing, proto.serves = value.refusing, value.serves
    for peer in value.nodes:
        put_flat(peer, proto.nodes.add())


def _take_attention_nodes(proto: Proto) -> AttentionNodes:
    peers = tuple(
        take_flat(AttentionPeer, peer, phase=AttentionPhase(peer.phase or AttentionPhase.BOTH))
        for peer in proto.nodes
    )
    return AttentionNodes(peers, proto.refusing, proto.serves)


def _put_answer(value: QueryAnswer, proto: Proto) -> None:
    proto.number, proto.body = value.number, value.body
    if value.error is not None:
        put_error(value.error, proto.error)


def _take_answer(proto: Proto) -> QueryAnswer:
    return QueryAnswer(proto.number, proto.body, optional_error(proto))


def _put_shutdown(value: Shutdown, proto: Proto) -> None:
    if value.error is not None:
        put_error(value.error, proto.error)


def _put_said(placement: Placement, proto: Proto, last: SaidLast) -> None:
    said = last.say(placement)
    proto.placement.data = said.data
    if said.base is not None:
        proto.placement.base = said.base


def _take_said(proto: Proto, last: SaidLast) -> Placement:
    said = proto.placement
    return last.hear(SaidPlacement(said.data, said.base if said.HasField("base") else None))


def _put_adopt(value: Adopt, proto: Proto, last: SaidLast) -> None:
    _put_said(value.placement, proto, last)


def _take_adopt(proto: Proto, last: SaidLast) -> Adopt:
    return Adopt(_take_said(proto, last))


def _put_fill(value: FillSlots, proto: Proto, last: SaidLast) -> None:
    _put_said(value.placement, proto, last)
    proto.urgent = value.urgent


def _take_fill(proto: Proto, last: SaidLast) -> FillSlots:
    return FillSlots(_take_said(proto, last), proto.urgent)


def _put_unfilled(value: Unfilled, proto: Proto) -> None:
    proto.epoch, proto.why = value.epoch, value.why
    proto.layer.extend(layer for layer, _ in value.experts)
    proto.expert.extend(expert for _, expert in value.experts)


def _take_unfilled(proto: Proto) -> Unfilled:
    if len(proto.layer) != len(proto.expert):
        raise ProtocolError(f"{len(proto.layer)} layers for {len(proto.expert)} experts that cannot be read")
    return Unfilled(proto.epoch, tuple(zip(proto.layer, proto.expert, strict=True)), proto.why)


FROM_NODE: dict[type, Codec] = {
    Routed: ("routed", _put_routed, _take_routed),
    Heartbeat: ("heartbeat", _put_heartbeat, _take_heartbeat),
    Progress: flat("progress", Progress),
    Register: ("register", _put_register, _take_register),
    Endpoint: ("endpoint", _put_endpoint, _take_endpoint),
    Identity: ("identity", _put_identity, lambda p: Identity(dict(p.things))),
    Ready: flat("ready", Ready),
    Drained: flat("drained", Drained),
    Filled: flat("filled", Filled),
    Unfilled: ("unfilled", _put_unfilled, _take_unfilled),
    Adopted: flat("adopted", Adopted),
    Failed: ("failed", _put_failed, lambda p: Failed(take_error(p.error))),
    Query: flat("query", Query),
    Stuck: flat("stuck", Stuck),
    Unheard: flat("unheard", Unheard),
    Noted: flat("noted", Noted),
    Recorded: flat("recorded", Recorded),
    Traced: flat("traced", Traced),
}
TO_NODE: dict[type, Codec] = {
    Peers: ("peers", _put_peers, _take_peers),
    Drain: flat("drain", Drain),
    Shutdown: ("shutdown", _put_shutdown, lambda p: Shutdown(optional_error(p))),
    Retire: flat("retire", Retire),
    Serve: flat("serve", Serve),
    Record: flat("record", Record),
    Gateways: ("gateways", _put_gateways, _take_gateways),
    AttentionNodes: ("attention_nodes", _put_attention_nodes, _take_attention_nodes),
    QueryAnswer: ("query_answer", _put_answer, _take_answer),
}
PLACED: dict[type, PlacedCodec] = {
    Assigned: ("assigned", _put_assigned, _take_assigned),
    FillSlots: ("fill_slots", _put_fill, _take_fill),
    Adopt: ("adopt", _put_adopt, _take_adopt),
}
