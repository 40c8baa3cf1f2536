"""What gateways show of the cluster, as bytes and back: the answer to one question, not a message of its own."""

from collections.abc import Sequence
from itertools import chain

from google.protobuf.message import DecodeError

from afserve.control.wire import control_pb2 as pb
from afserve.control.wire.fields import Proto, put_fields, take_fields
from afserve.control.wire.view_values import ClusterView
from afserve.errors import ProtocolError

_OWN_FORM = {"routed", "lost"}
# What a gateway counts itself, and nobody asks of the controller.
_NOTHING: dict[str, object] = {"waiting": 0, "moved": {}, "refusing": "", "refused": {}}


def encode_view(view: ClusterView) -> bytes:
    proto = pb.ClusterView(layers=len(view.routed), routed=list(chain.from_iterable(view.routed)))
    put_fields(view, proto, leave=_OWN_FORM | _NOTHING.keys())
    for role, causes in view.lost.items():
        for cause, count in causes.items():
            proto.lost.add(role=role, cause=cause, count=count)
    data: bytes = proto.SerializeToString()
    return data


def decode_view(data: bytes) -> ClusterView:
    """Raises ProtocolError for bytes that are none."""
    try:
        return _take_view(pb.ClusterView.FromString(data))
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"{len(data)} bytes are no view of the cluster: {error}") from error


def _take_view(proto: Proto) -> ClusterView:
    if proto.layers and len(proto.routed) % proto.layers:
        raise ValueError(f"{len(proto.routed)} counts are not {proto.layers} layers of the same size")
    width = len(proto.routed) // proto.layers if proto.layers else 0
    routed = tuple(tuple(proto.routed[y * width : (y + 1) * width]) for y in range(proto.layers))
    return take_fields(ClusterView, proto, routed=routed, lost=_take_lost(proto), **_NOTHING)


def _take_lost(proto: Proto) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for lost in proto.lost:
        found.setdefault(lost.role, {})[lost.cause] = lost.count
    return found


def encode_recordings(packed: Sequence[bytes]) -> bytes:
    data: bytes = pb.Recordings(data=packed).SerializeToString()
    return data


def decode_recordings(data: bytes) -> tuple[bytes, ...]:
    """Raises ProtocolError for bytes that are none."""
    try:
        return tuple(pb.Recordings.FromString(data).data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes are no recordings of nodes: {error}") from error
