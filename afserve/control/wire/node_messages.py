"""What the controller and the nodes say to each other: each value, the field of its envelope, and the way in and out.

The tables are all that others use; `messages.py` opens and closes the envelopes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from afserve.control.wire import placement_values, values
from afserve.control.wire.desired import Deployment
from afserve.control.wire.fields import Codec, Proto, codec, put_counts, put_fields, take_counts, take_fields
from afserve.control.wire.load_values import ClassCounts, GatewayLoad, LoadCounts
from afserve.control.wire.placements import SaidLast, SaidPlacement
from afserve.errors import ProtocolError
from afserve.member import Life, NodeId, Role
from afserve.placement.optimizer.problem import Ints
from afserve.placement.placement import Placement
from afserve.placement.rebalance.stats import RoutedRows

PlacedCodec = tuple[str, Callable[[Any, Proto, SaidLast], None], Callable[[Proto, SaidLast], Any]]


def _put_routed(value: placement_values.Routed, proto: Proto) -> None:
    """In the narrowest unsigned integers that hold the largest count: one byte each for most seconds of decoding."""
    rows = value.rows
    largest = max(int(rows.prefill_LE.max()), int(rows.decode_LE.max()))
    width = next(w for w in _WIDTHS if largest < 1 << 8 * w)
    proto.layers, proto.experts = rows.decode_LE.shape
    proto.width = width
    for name, counts_LE in (("prefill", rows.prefill_LE), ("decode", rows.decode_LE)):
        setattr(proto, name, counts_LE.astype(f"<u{width}").tobytes() if counts_LE.any() else b"")


def _take_routed(proto: Proto) -> placement_values.Routed:
    if proto.width not in _WIDTHS:
        raise ValueError(f"counts of {proto.width} bytes")
    shape = proto.layers, proto.experts
    return placement_values.Routed(
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


def _put_assigned(value: values.Assigned, proto: Proto, last: SaidLast) -> None:
    deployment = value.deployment
    life = value.life
    proto.role, proto.index, proto.generation = life.node.role, life.index, life.generation
    _put_said(deployment.placement, proto, last)
    put_fields(deployment, proto, leave=("placement",))


def _take_assigned(proto: Proto, last: SaidLast) -> values.Assigned:
    deployment = take_fields(Deployment, proto, placement=_take_said(proto, last))
    return values.Assigned(Life(NodeId(Role(proto.role), proto.index), proto.generation), deployment)


def _put_gateways(value: values.Gateways, proto: Proto) -> None:
    for index, address in value.gateways:
        proto.gateways.add(index=index, address=address)


def _take_gateways(proto: Proto) -> values.Gateways:
    return values.Gateways(tuple((gateway.index, gateway.address) for gateway in proto.gateways))


def _put_said(placement: Placement, proto: Proto, last: SaidLast) -> None:
    said = last.say(placement)
    proto.placement.data = said.data
    if said.base is not None:
        proto.placement.base = said.base


def _take_said(proto: Proto, last: SaidLast) -> Placement:
    said = proto.placement
    return last.hear(SaidPlacement(said.data, said.base if said.HasField("base") else None))


def _put_adopt(value: placement_values.Adopt, proto: Proto, last: SaidLast) -> None:
    _put_said(value.placement, proto, last)


def _take_adopt(proto: Proto, last: SaidLast) -> placement_values.Adopt:
    return placement_values.Adopt(_take_said(proto, last))


def _put_fill(value: placement_values.FillSlots, proto: Proto, last: SaidLast) -> None:
    _put_said(value.placement, proto, last)
    proto.urgent = value.urgent


def _take_fill(proto: Proto, last: SaidLast) -> placement_values.FillSlots:
    return placement_values.FillSlots(_take_said(proto, last), proto.urgent)


def _put_unfilled(value: placement_values.Unfilled, proto: Proto) -> None:
    proto.epoch, proto.why = value.epoch, value.why
    proto.layer.extend(layer for layer, _ in value.experts)
    proto.expert.extend(expert for _, expert in value.experts)


def _take_unfilled(proto: Proto) -> placement_values.Unfilled:
    if len(proto.layer) != len(proto.expert):
        raise ProtocolError(f"{len(proto.layer)} layers for {len(proto.expert)} experts that cannot be read")
    return placement_values.Unfilled(
        proto.epoch, tuple(zip(proto.layer, proto.expert, strict=True)), proto.why
    )


def _put_load(load: GatewayLoad, proto: Proto) -> None:
    put_counts(load.total, proto.total)
    for name, counts in load.classes.items():
        put_counts(counts, proto.classes[name])


def _take_load(proto: Proto) -> GatewayLoad:
    classes = {name: take_counts(ClassCounts, one) for name, one in sorted(proto.classes.items())}
    return GatewayLoad(take_counts(LoadCounts, proto.total), classes)


FROM_NODE: dict[type, Codec] = {
    placement_values.Routed: ("routed", _put_routed, _take_routed),
    values.Heartbeat: codec("heartbeat", values.Heartbeat),
    values.Progress: codec("progress", values.Progress),
    values.Register: codec("register", values.Register),
    values.Endpoint: codec("endpoint", values.Endpoint),
    values.Identity: codec("identity", values.Identity),
    values.Ready: codec("ready", values.Ready),
    values.Drained: codec("drained", values.Drained),
    placement_values.Filled: codec("filled", placement_values.Filled),
    placement_values.Unfilled: ("unfilled", _put_unfilled, _take_unfilled),
    placement_values.Adopted: codec("adopted", placement_values.Adopted),
    values.Failed: codec("failed", values.Failed),
    values.Query: codec("query", values.Query),
    values.Stuck: codec("stuck", values.Stuck),
    GatewayLoad: ("load", _put_load, _take_load),
    values.Unheard: codec("unheard", values.Unheard),
    values.Noted: codec("noted", values.Noted),
    values.Recorded: codec("recorded", values.Recorded),
    values.Traced: codec("traced", values.Traced),
}
TO_NODE: dict[type, Codec] = {
    values.Peers: codec("peers", values.Peers),
    values.Drain: codec("drain", values.Drain),
    values.Shutdown: codec("shutdown", values.Shutdown),
    placement_values.Retire: codec("retire", placement_values.Retire),
    values.Serve: codec("serve", values.Serve),
    values.Record: codec("record", values.Record),
    values.Gateways: ("gateways", _put_gateways, _take_gateways),
    values.AttentionNodes: codec("attention_nodes", values.AttentionNodes),
    values.QueryAnswer: codec("query_answer", values.QueryAnswer),
}
PLACED: dict[type, PlacedCodec] = {
    values.Assigned: ("assigned", _put_assigned, _take_assigned),
    placement_values.FillSlots: ("fill_slots", _put_fill, _take_fill),
    placement_values.Adopt: ("adopt", _put_adopt, _take_adopt),
}
