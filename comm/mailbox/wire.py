"""The bytes of one message: a 64-byte header, then a payload whose size follows from the number of rows in the header.

It encodes what this node sends and checks, field by field, what another node sent. The payload is not looked at before
the header fits what both ends agreed on. It knows no memory, no flags and no peers.

    header 64 | weights R*K f32 | slots R*K i32 | scales R*S f32 (fp8) | pad to 64 | rows R*H      (dispatch)
    header 64 | rows R*H                                                                           (combine)

At its end an answer's header says how many rows the call had that it is of (`Header.call`). That only advises:
any number is taken, and who answers without Python says 0.
"""

import struct
from dataclasses import dataclass

import torch

from afserve.comm.transport import SCALE_BLOCK, Box, Header, Kind, Layout, WireType
from afserve.errors import ConfigError, ProtocolError

MAGIC = 0x41465356  # "AFSV"
VERSION = 2
HEADER_BYTES = 64
SEQUENCES = 1 << 32  # sequence numbers wrap here

_HEADER = struct.Struct("<IHBBIIIHHHHIQ20xI")
_PARTS = struct.Struct("<8sIII8sIQ20xI")  # the same bytes, what never changes in a box as two strings
_CALL = struct.Struct("<I")
_CALL_AT = _HEADER.size - _CALL.size
_NAMES = ("magic", "version", "kind", "wire type", "box", "sequence")
_KIND = 6  # offset of the kind's byte
_LINE = 64
LONGEST_REASON = 512


def following(sequence: int) -> int:
    return (sequence + 1) % SEQUENCES


def aligned(count: int, to: int = _LINE) -> int:
    return -(-count // to) * to


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Byte offsets of a message's parts from its first byte; `end` is the message's length."""

    weight: int
    slot: int
    scale: int
    x: int
    end: int


class Frame:
    """The shape of one direction's messages; `scales` are scale blocks per row, 0 unless rows travel in FLOAT8."""

    def __init__(self, kind: Kind, layout: Layout) -> None:
        self.kind = kind
        self.layout = layout
        self.wire = layout.dispatch_wire if kind is Kind.DISPATCH else layout.combine_wire
        self.scales = -(-layout.hidden // SCALE_BLOCK) if self.wire is WireType.FLOAT8 else 0
        self._choice_bytes = 4 * layout.top_k if kind is Kind.DISPATCH else 0
        self._row_bytes = layout.hidden * _size(self.wire)

    @property
    def capacity(self) -> int:
        """Bytes of the largest message."""
        return self.span(self.layout.max_rows).end

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    def span(self, rows: int) -> MessageSpan:
        slot = HEADER_BYTES + rows * self._choice_bytes
        scale = slot + rows * self._choice_bytes
        x = aligned(scale + 4 * rows * self.scales)
        return MessageSpan(HEADER_BYTES, slot, scale, x, x + rows * self._row_bytes)

    def payload(self, rows: int) -> int:
        """Bytes after the header; the same as `span(rows).end - HEADER_BYTES`."""
        return aligned(rows * (2 * self._choice_bytes + 4 * self.scales)) + rows * self._row_bytes


def _size(wire: WireType) -> int:
    return torch.empty((), dtype=wire.dtype).element_size()


def encode(memory: memoryview, box: Box, header: Header, payload: int) -> None:
    """Write the header at the start of `memory`."""
    _HEADER.pack_into(
        memory,
        0,
        MAGIC,
        VERSION,
        header.kind,
        header.wire,
        header.epoch,
        header.sequence,
        header.layer,
        *box,
        0,
        header.rows,
        payload,
        header.call,
    )


def decode(memory: memoryview, box: Box, frame: Frame, sequence: int) -> Header:
    """Copy the header out once and check every field. Raises ProtocolError naming the first that is wrong."""
    magic, version, kind, wire, epoch, number, layer, a, f, m, spare, rows, payload, call = (
        _HEADER.unpack_from(memory)
    )
    layout = frame.layout
    given = (magic, version, kind, wire, (a, f, m, spare), number)
    expected = (MAGIC, VERSION, frame.kind, frame.wire, (*box, 0), sequence)
    if given != expected:
        for field, value, right in zip(_NAMES, given, expected, strict=True):
            _same(box, field, value, right)
    _below(box, "layer", layer, layout.layers)
    _below(box, "rows", rows, layout.max_rows + 1)
    _same(box, "payload bytes", payload, frame.payload(rows))
    return Header(frame.kind, epoch, number, layer, rows, frame.wire, call)


def rows_of(memory: memoryview) -> int:
    """The rows field as it stands, unchecked."""
    return int(_HEADER.unpack_from(memory)[11])


def call_of(memory: memoryview) -> int:
    """What an answer's header says of its call; anything."""
    return int(_CALL.unpack_from(memory, _CALL_AT)[0])


def clear_call(memory: memoryview) -> None:
    """Whoever writes the next header leaves that out."""
    _CALL.pack_into(memory, _CALL_AT, 0)


class Codec:
    """encode and decode for one direction of one box, with what never changes there packed once."""

    def __init__(self, box: Box, frame: Frame) -> None:
        self._box, self._frame = box, frame
        self._layers, self._max_rows = frame.layout.layers, frame.layout.max_rows
        packed = _HEADER.pack(MAGIC, VERSION, frame.kind, frame.wire, 0, 0, 0, *box, 0, 0, 0, 0)
        self._first, self._where = packed[:8], packed[20:28]

    @property
    def constant(self) -> tuple[bytes, bytes]:
        """The eight bytes at the start of every header of this box, and the eight that say which box."""
        return self._first, self._where

    def write(self, memory: memoryview, header: Header, payload: int) -> None:
        _, epoch, sequence, layer, rows, _, call = header
        _PARTS.pack_into(memory, 0, self._first, epoch, sequence, layer, self._where, rows, payload, call)

    def read(self, memory: memoryview, sequence: int) -> Header:
        """As `decode`, which is left to find the name of what is wrong."""
        frame = self._frame
        first, epoch, number, layer, where, rows, payload, call = _PARTS.unpack_from(memory)
        if (
            first != self._first
            or where != self._where
            or number != sequence
            or layer >= self._layers
            or rows > self._max_rows
            or payload != frame.payload(rows)
        ):
            return decode(memory, self._box, frame, sequence)
        return Header(frame.kind, epoch, number, layer, rows, frame.wire, call)


def encode_refusal(memory: memoryview, box: Box, frame: Frame, sequence: int, reason: str) -> int:
    """Write a whole refusal, header and text, and return its length; the text is cut to what fits."""
    text = reason.encode("ascii", "replace")[: _longest_reason(frame)]
    header = Header(Kind.REFUSAL, 0, sequence, 0, 0, frame.wire)
    encode(memory, box, header, len(text))
    memory[HEADER_BYTES : HEADER_BYTES + len(text)] = text
    return HEADER_BYTES + len(text)


def refusal(memory: memoryview, box: Box, frame: Frame, sequence: int) -> str | None:
    """The reason if a refusal of that number lies in `memory`; its text is only ever shown."""
    if memory[_KIND] != Kind.REFUSAL or frame.kind is not Kind.COMBINE:
        return None
    fields = _HEADER.unpack_from(memory)
    number, payload = fields[5], fields[12]
    if number != sequence:
        return None
    if payload > _longest_reason(frame):
        raise ProtocolError(f"{name(box)}: a refusal of {payload} bytes, at most {_longest_reason(frame)}")
    text = bytes(memory[HEADER_BYTES : HEADER_BYTES + payload]).decode("ascii", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def extent(memory: memoryview) -> tuple[int, int]:
    """(micro-batch, payload bytes) as they stand, unchecked: for a stream that has to know where a message ends."""
    fields = _HEADER.unpack_from(memory)
    return int(fields[9]), int(fields[12])


def sequence_of(memory: memoryview) -> int:
    """The sequence field as it stands, unchecked."""
    return int(_HEADER.unpack_from(memory)[5])


def _longest_reason(frame: Frame) -> int:
    return min(LONGEST_REASON, frame.capacity - HEADER_BYTES)


def check_layout(layout: Layout) -> None:
    """Raises ConfigError on sizes that no memory can be laid out for."""
    for field in ("hidden", "top_k", "max_rows", "micro_batches", "layers", "slots"):
        value = getattr(layout, field)
        if not 1 <= value < 1 << 24:
            raise ConfigError(f"transport layout: {field} = {value} is outside [1, {1 << 24})", param=field)
    if layout.combine_wire is WireType.FLOAT8:
        raise ConfigError(
            "transport layout: partial sums travel as bf16, fp16 or fp32, not fp8", param="combine_wire"
        )


def name(box: Box) -> str:
    return f"message of attention-{box.attention}, expert-{box.expert}, micro-batch {box.micro_batch}"


def _same(box: Box, field: str, value: object, expected: object) -> None:
    if value != expected:
        raise ProtocolError(f"{name(box)}: {field} is {value!r}, expected {expected!r}")


def _below(box: Box, field: str, value: int, limit: int) -> None:
    if value >= limit:
        raise ProtocolError(f"{name(box)}: {field} {value} is outside [0, {limit})")
