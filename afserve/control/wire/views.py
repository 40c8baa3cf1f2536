"""What gateways show of the cluster, as bytes and back: the answer to one question, not a message of its own."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import chain

from google.protobuf.message import DecodeError

from afserve.control.backend import ClusterView, IncidentView, NodeView
from afserve.control.wire import control_pb2 as pb
from afserve.control.wire.fields import Proto, put_stats, take_stats
from afserve.errors import ProtocolError


def encode_view(view: ClusterView) -> bytes:
    proto = pb.ClusterView(
        epoch=view.epoch,
        picked=dict(view.picked),
        balance=view.balance,
        decisions=view.decisions,
        moves=view.moves,
        layers=len(view.routed),
        routed=list(chain.from_iterable(view.routed)),
        incidents=[pb.IncidentView(**asdict(incident)) for incident in view.incidents],
        reloaded_bytes=view.reloaded_bytes,
        resent_rows=view.resent_rows,
        stalled=dict(view.stalled),
        wanted=dict(view.wanted),
        absent=view.absent,
    )
    for role, causes in view.lost.items():
        for cause, count in causes.items():
            proto.lost.add(role=role, cause=cause, count=count)
    for node in view.nodes:
        _put_node(node, proto.nodes.add())
    data: bytes = proto.SerializeToString()
    return data


def decode_view(data: bytes) -> ClusterView:
    """Raises ProtocolError for bytes that are none."""
    try:
        proto = pb.ClusterView.FromString(data)
        nodes = tuple(_take_node(node) for node in proto.nodes)
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"{len(data)} bytes are no view of the cluster: {error}") from error
    if proto.layers and len(proto.routed) % proto.layers:
        raise ProtocolError(f"{len(proto.routed)} counts are not {proto.layers} layers of the same size")
    width = len(proto.routed) // proto.layers if proto.layers else 0
    return ClusterView(
        proto.epoch,
        nodes,
        dict(proto.picked),
        tuple(proto.balance),
        tuple(proto.decisions),
        proto.moves,
        tuple(tuple(proto.routed[y * width : (y + 1) * width]) for y in range(proto.layers)),
        incidents=tuple(_take_incident(incident) for incident in proto.incidents),
        lost=_take_lost(proto),
        reloaded_bytes=proto.reloaded_bytes,
        resent_rows=proto.resent_rows,
        stalled=dict(proto.stalled),
        wanted=dict(proto.wanted),
        absent=tuple(proto.absent),
    )


def _take_incident(proto: Proto) -> IncidentView:
    return IncidentView(*(getattr(proto, field.name) for field in fields(IncidentView)))


def _take_lost(proto: Proto) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for lost in proto.lost:
        found.setdefault(lost.role, {})[lost.cause] = lost.count
    return found


def _put_node(node: NodeView, proto: Proto) -> None:
    proto.name, proto.role, proto.state, proto.pid = node.name, node.role, node.state, node.pid
    proto.heartbeat_age, proto.resident_bytes = node.heartbeat_age, node.resident_bytes
    proto.phase = node.phase
    put_stats(node.stats, proto)


def _take_node(proto: Proto) -> NodeView:
    return NodeView(
        proto.name,
        proto.role,
        proto.state,
        proto.pid,
        proto.heartbeat_age,
        proto.resident_bytes,
        take_stats(proto),
        proto.phase,
    )


def encode_recordings(packed: Sequence[bytes]) -> bytes:
    data: bytes = pb.Recordings(data=packed).SerializeToString()
    return data


def decode_recordings(data: bytes) -> tuple[bytes, ...]:
    """Raises ProtocolError for bytes that are none."""
    try:
        return tuple(pb.Recordings.FromString(data).data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes are no recordings of nodes: {error}") from error
