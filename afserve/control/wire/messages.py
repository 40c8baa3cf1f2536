"""The control plane's values as protobuf bytes and back: the envelopes, in which each value has a field of its own.

`encode_*` and `decode_*` are handed to gRPC as serializers. Bytes that no correct peer sends raise
ProtocolError before anything of them is used.
"""

from typing import Any

from google.protobuf.message import DecodeError

from afserve import errors
from afserve.control.wire import control_pb2 as pb
from afserve.control.wire.fields import Codec, Proto
from afserve.control.wire.node_messages import FROM_NODE, PLACED, TO_NODE, PlacedCodec
from afserve.control.wire.placements import Memo, SaidLast
from afserve.control.wire.request_messages import FROM_ATTENTION, TO_ATTENTION
from afserve.control.wire.request_values import FromAttention, ToAttention
from afserve.control.wire.values import FromNode, ToNode
from afserve.errors import ProtocolError

_to_many: Memo[bytes] = Memo()  # a thousand nodes are told of a thousand peers with one message


def encode_from_node(value: FromNode) -> bytes:
    return _encode(pb.FromNode(), value, FROM_NODE)


def decode_from_node(data: bytes) -> FromNode:
    decoded: FromNode = _decode(pb.FromNode, data, FROM_NODE)
    return decoded


def encode_to_node(value: ToNode, last: SaidLast | None = None) -> bytes:
    """`last` is this end's of the stream that it goes over; None where it is the only message."""
    if (placed := PLACED.get(type(value))) is not None:
        return _encode(pb.ToNode(), value, {type(value): _over(placed, last or SaidLast())})
    return _to_many.get(id(value), lambda: _encode(pb.ToNode(), value, TO_NODE), (value,))


def decode_to_node(data: bytes, last: SaidLast | None = None) -> ToNode:
    """`last` as in `encode_to_node`, of the other end."""
    last = last or SaidLast()
    table = TO_NODE | {kind: _over(placed, last) for kind, placed in PLACED.items()}
    decoded: ToNode = _decode(pb.ToNode, data, table)
    return decoded


def encode_from_attention(value: FromAttention) -> bytes:
    return _encode(pb.FromAttention(), value, FROM_ATTENTION)


def decode_from_attention(data: bytes) -> FromAttention:
    decoded: FromAttention = _decode(pb.FromAttention, data, FROM_ATTENTION)
    return decoded


def encode_to_attention(value: ToAttention) -> bytes:
    return _encode(pb.ToAttention(), value, TO_ATTENTION)


def decode_to_attention(data: bytes) -> ToAttention:
    decoded: ToAttention = _decode(pb.ToAttention, data, TO_ATTENTION)
    return decoded


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


def _over(placed: PlacedCodec, last: SaidLast) -> Codec:
    """For one end of one stream."""
    name, put, take = placed
    return name, lambda value, proto: put(value, proto, last), lambda proto: take(proto, last)
