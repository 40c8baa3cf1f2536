"""Bytes that no correct peer sends, in every received field: refused by name, nothing else touched."""

import itertools
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.mailbox.segment import PAGE, Segment, SegmentMap, read_terms
from afserve.comm.mailbox.wire import HEADER_BYTES, Frame, decode, encode
from afserve.comm.transport import Box, Kind
from afserve.comm.transports.local import LocalTransport
from afserve.errors import DispatchRefused, ProtocolError, RendezvousError
from afserve.placement.placement import Placement
from tests.comm.conformance import LAYOUT

BOX = Box(0, 0, 0)
PLACEMENT = Placement.contiguous(layers=LAYOUT.layers, experts=5, nodes=1)
FIELDS = {  # name: (offset, struct code)
    "magic": (0, "<I"),
    "version": (4, "<H"),
    "kind": (6, "<B"),
    "wire type": (7, "<B"),
    "sequence": (12, "<I"),
    "layer": (16, "<I"),
    "box": (20, "<H"),
    "rows": (28, "<I"),
    "payload bytes": (32, "<Q"),
}


def pair():
    segment = Segment.private(SegmentMap(LAYOUT, 0, 1))
    expert, attention = LocalTransport([segment], None), LocalTransport([segment], 0)
    return ExpertPort(expert), ExpertLink(attention, attention=0, layout=LAYOUT, placement=PLACEMENT), segment


def dispatch(link, rows=3):
    expert_TK = torch.tensor([[0, 1, 4]] * rows, dtype=torch.int32)
    return link.dispatch(torch.ones(rows, 24), expert_TK, torch.ones(rows, 3), layer=1, micro_batch=0)


def region(segment, kind):
    start = segment.map.mailbox(BOX, kind)
    return segment.memory_B[start : start + Frame(kind, LAYOUT).capacity]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [0, 1, 2, 3, 5, 100, 255, (1 << 16) - 1, (1 << 32) - 1, (1 << 63)])
def test_a_wrong_header_field_is_named(field, value):
    port, link, segment = pair()
    dispatch(link)
    offset, code = FIELDS[field]
    memory_B = region(segment, Kind.DISPATCH)
    raw = memory_B.numpy().data
    value &= (1 << 8 * struct.calcsize(code)) - 1
    same = struct.unpack_from(code, raw, offset)[0] == value
    struct.pack_into(code, raw, offset, value)
    if field == "layer" and value < LAYOUT.layers:
        same = True
    arrivals = port.poll()
    assert bool(arrivals) == same
    if not same:
        reason = segment.memory_B[segment.map.mailbox(BOX, Kind.COMBINE) :].numpy().data[64:300]
        name = "payload bytes" if field == "rows" and value <= LAYOUT.max_rows else field
        assert name.encode() in bytes(reason)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_bytes_in_a_dispatch(data):
    port, link, segment = pair()
    dispatch(link)
    memory_B = region(segment, Kind.DISPATCH)
    raw = memory_B.numpy().data
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.binary(min_size=1, max_size=40))
        at = data.draw(st.integers(0, len(raw) - len(part)))
        raw[at : at + len(part)] = part
    untouched = segment.memory_B.clone()
    for arrival in port.poll():
        assert arrival.header.rows <= LAYOUT.max_rows and arrival.header.layer < LAYOUT.layers
        assert arrival.x_RH.shape == (arrival.header.rows, LAYOUT.hidden)
        assert int(arrival.slot_RK.min()) >= -1 and int(arrival.slot_RK.max()) < LAYOUT.slots
    _only_the_answer_changed(segment, untouched)


def _only_the_answer_changed(segment, before):
    start = segment.map.mailbox(BOX, Kind.COMBINE)
    end = start + Frame(Kind.COMBINE, LAYOUT).capacity
    flag, bell = segment.map.flag(BOX, Kind.COMBINE), segment.map.record(0)
    differs = (segment.memory_B != before).nonzero().flatten().tolist()
    assert all(start <= at < end or flag <= at < flag + 64 or bell <= at < bell + 64 for at in differs)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_bytes_in_a_combine(data):
    port, link, segment = pair()
    ticket = dispatch(link)
    (arrival,) = port.poll()
    port.reply(arrival).fill_(1.0)
    port.send(arrival)
    raw = region(segment, Kind.COMBINE).numpy().data
    part = data.draw(st.binary(min_size=1, max_size=64))
    at = data.draw(st.integers(0, HEADER_BYTES))
    raw[at : at + len(part)] = part
    try:
        assert link.combine(ticket).shape == (3, 24)
    except ProtocolError as error:
        assert "attention-0, expert-0" in error.message


@given(value=st.integers(0, (1 << 32) - 1))
def test_any_flag_value(value):
    port, link, segment = pair()
    ticket = dispatch(link)
    segment.memory_B[segment.map.flag(BOX, Kind.COMBINE) :][:4].numpy().data[:] = value.to_bytes(4, "little")
    with suppress(ProtocolError):
        assert not link.ready(ticket)
    segment.memory_B[segment.map.flag(BOX, Kind.DISPATCH) :][:4].numpy().data[:] = value.to_bytes(4, "little")
    assert len(port.poll()) == (value == 1)


@given(raw=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header(raw):
    with pytest.raises(ProtocolError):
        decode(memoryview(raw), BOX, Frame(Kind.DISPATCH, LAYOUT), 0)


def test_an_answer_to_something_else_is_refused():
    port, link, _ = pair()
    ticket = dispatch(link)
    (arrival,) = port.poll()
    wrong = type(arrival)(
        arrival.box, arrival.header._replace(rows=2), arrival.x_RH, arrival.slot_RK, arrival.weight_RK
    )
    port.reply(wrong)
    port.send(wrong)
    with pytest.raises(ProtocolError, match="does not answer"):
        link.combine(ticket)


def test_a_hostile_reason_is_shortened_and_made_printable():
    port, link, _ = pair()
    dispatch(link)
    (arrival,) = port.poll()
    port.refuse(arrival.box, "\x1b[31m" + "x" * 10_000)
    with pytest.raises(DispatchRefused) as refused:
        link._transport.take(arrival.box)
    assert "\x1b" not in refused.value.message and len(refused.value.message) < 1000


@given(raw=st.binary(min_size=64, max_size=64))
def test_any_first_page(raw):
    raw = raw.ljust(PAGE, b"\1")
    with pytest.raises(RendezvousError, match="expert-3"):
        read_terms(memoryview(raw), "expert-3")


def test_headers_come_back_as_they_were():
    from afserve.comm.transport import Header

    memory = memoryview(bytearray(HEADER_BYTES))
    frame = Frame(Kind.DISPATCH, LAYOUT)
    header = Header(Kind.DISPATCH, (1 << 32) - 1, (1 << 32) - 1, 3, 6, LAYOUT.dispatch_wire)
    box = Box(65535, 65535, 3)
    encode(memory, box, header, frame.span(6).end - HEADER_BYTES)
    assert decode(memory, box, frame, (1 << 32) - 1) == header


def test_places_do_not_overlap():
    where = SegmentMap(LAYOUT, 0, 3)
    spans = [(where.record(a), 64) for a in (None, 0, 1, 2)]
    for box in where.boxes():
        for kind in (Kind.DISPATCH, Kind.COMBINE):
            spans.append((where.flag(box, kind), 64))
            spans.append((where.mailbox(box, kind), Frame(kind, LAYOUT).capacity))
    spans.sort()
    assert spans[0][0] >= PAGE
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= where.total_bytes
