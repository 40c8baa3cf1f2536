"""Whole messages in one native call: the bytes are those of the Python path, and so is what is refused."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.mailbox.flags import MessageBoard, PlainBoard
from afserve.comm.mailbox.lanes import Lanes
from afserve.comm.mailbox.segment import Segment, SegmentMap
from afserve.comm.mailbox.wire import HEADER_BYTES, Frame, decode
from afserve.comm.native import native_library
from afserve.comm.transport import NO_SLOT, Box, Header, Kind, Layout, WireType
from afserve.comm.transports import connect
from afserve.comm.transports.local import LocalTransport
from afserve.errors import ProtocolError
from tests.comm.conformance import LAYOUT, answer, arrive, content, send

BOX = Box(0, 0, 0)
LONG = Layout(512, 2, 64, 1, 2, 5, WireType.FLOAT32, WireType.FLOAT32)  # a message of many pieces

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library is not built")


def pair(layout=LAYOUT):
    segment = Segment.private(SegmentMap(layout, 0, 1))
    return LocalTransport([segment], None), LocalTransport([segment], 0), segment


def message(layout, seed, rows):
    """x, slots and weights of a dispatch."""
    number_RK = torch.arange(rows * layout.top_k, dtype=torch.int32).view(rows, layout.top_k)
    slot_RK = number_RK % (layout.slots + 1) - 1
    return content(seed, rows, layout.hidden), slot_RK, content(seed + 1, rows, layout.top_k)


def header(end, rows, *, layer=1):
    return Header(Kind.DISPATCH, 7, end.next_sequence(BOX), layer, rows, end.layout.dispatch_wire)


def region(segment, kind):
    start = segment.map.mailbox(BOX, kind)
    return segment.memory_B[start : start + Frame(kind, segment.map.layout).capacity]


@pytest.mark.parametrize("layout", [LAYOUT, LONG], ids=["short", "long"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_call_writes_what_three_do(layout, data):
    rows, seed = data.draw(st.integers(0, layout.max_rows)), data.draw(st.integers(0, 99))
    x_RH, slot_RK, weight_RK = message(layout, seed, rows)
    _, once, there = pair(layout)
    once.send(BOX, header(once, rows), x_RH, slot_RK, weight_RK)
    _, apart, here = pair(layout)
    parcel = apart.stage(BOX, header(apart, rows))
    parcel.x_RH.copy_(x_RH)
    parcel.slot_RK.copy_(slot_RK)
    parcel.weight_RK.copy_(weight_RK)
    apart.post(BOX)
    assert torch.equal(region(there, Kind.DISPATCH), region(here, Kind.DISPATCH))
    assert there.word(BOX, Kind.DISPATCH) == here.word(BOX, Kind.DISPATCH)


def test_rows_that_cannot_be_taken_as_they_lie_travel_all_the_same():
    expert, attention, _ = pair()
    x_RH, slot_RK, weight_RK = message(LAYOUT, 3, 4)
    for given_RH in (x_RH.double(), x_RH.t().contiguous().t()):
        attention.send(BOX, header(attention, 4), given_RH, slot_RK.long(), weight_RK)
        got = arrive(expert, BOX)
        assert torch.equal(got.x_RH, x_RH) and torch.equal(got.slot_RK, slot_RK)
        expert.send(BOX, got.header._replace(kind=Kind.COMBINE), given_RH)
        assert torch.equal(arrive(attention, BOX).x_RH, x_RH)


def test_more_rows_than_fit_are_refused():
    _, attention, segment = pair()
    before = segment.memory_B.clone()
    with pytest.raises(ValueError, match="7 rows in one message, at most 6"):
        attention.send(BOX, header(attention, 7), *message(LAYOUT, 1, 7))
    assert torch.equal(segment.memory_B, before)


@given(raw=st.binary(min_size=1, max_size=44), at=st.integers(0, HEADER_BYTES - 44))
@settings(max_examples=200, deadline=None)
def test_what_is_refused_natively_is_what_python_refuses(raw, at):
    expert, attention, segment = pair()
    attention.send(BOX, header(attention, 3), *message(LAYOUT, 5, 3))
    memory = region(segment, Kind.DISPATCH).numpy().data
    memory[at : at + len(raw)] = raw
    frame = Frame(Kind.DISPATCH, LAYOUT)
    try:
        expected = decode(memory, BOX, frame, 1)
    except ProtocolError:
        expected = None
    good, number, epoch, layer, rows = expert._lanes._board.take(0)
    header_good = expected is not None
    if good:
        assert (number, epoch, layer, rows) == (1, expected.epoch, expected.layer, expected.rows)
    elif header_good:  # a good header of fewer rows: what lies where its slots would be is none
        assert expected.rows != 3


def test_a_bad_message_leaves_no_bad_slot_behind():
    """What was taken before it may still be held."""
    expert, attention, _ = pair()
    attention.send(BOX, header(attention, 3), *message(LAYOUT, 5, 3))
    held = arrive(expert, BOX)
    parcel = attention.stage(BOX, header(attention, 3))
    parcel.slot_RK.fill_(LAYOUT.slots + 100)
    attention.post(BOX)
    with pytest.raises(ProtocolError, match=str(LAYOUT.slots + 100)):
        arrive(expert, BOX)
    assert int(held.slot_RK.min()) >= NO_SLOT and int(held.slot_RK.max()) < LAYOUT.slots


@given(told=st.integers(0, (1 << 64) - 1))
@settings(max_examples=60, deadline=None)
def test_any_progress_is_only_a_hint(told):
    expert, attention, segment = pair()
    at = segment.map.flag(BOX, Kind.DISPATCH) + 8
    segment.memory_B[at : at + 8].numpy().data[:] = told.to_bytes(8, "little")
    before = segment.memory_B.clone()
    board = expert._lanes._board
    assert isinstance(board, MessageBoard)
    assert board.wait([0, 1], 0.0003) == []
    bell = segment.map.record(None)
    changed = (segment.memory_B != before).nonzero().flatten().tolist()
    assert all(bell <= place < bell + 64 for place in changed)
    sent = send(attention, BOX, 4, 3)
    assert torch.equal(arrive(expert, BOX).x_RH, sent.x_RH)


def test_a_waiter_that_spins_gets_whole_messages():
    """Many pieces, while the waiter fetches them; every row is checked."""
    turns = 60
    end, address = connect.listen("shm", expert=0, attention_nodes=1, layout=LONG)
    front = connect.connect([address], attention=0, layout=LONG, timeout=60.0)

    def relay():
        for _ in range(turns):
            got = arrive(end, BOX)
            end.send(BOX, got.header._replace(kind=Kind.COMBINE), got.x_RH)

    thread = threading.Thread(target=relay)
    thread.start()
    for turn in range(turns):
        x_RH, slot_RK, weight_RK = message(LONG, turn, 1 + turn % LONG.max_rows)
        front.send(BOX, header(front, len(x_RH)), x_RH, slot_RK, weight_RK)
        assert torch.equal(arrive(front, BOX).x_RH, x_RH)
    thread.join()
    front.close()
    end.close()


def test_plain_boards_send_in_three_steps(monkeypatch):
    monkeypatch.setattr("afserve.comm.mailbox.lanes.open_board", PlainBoard)
    expert, attention, segment = pair()
    assert Lanes([segment], 0)._carrier is None
    x_RH, slot_RK, weight_RK = message(LAYOUT, 2, 5)
    attention.send(BOX, header(attention, 5), x_RH, slot_RK, weight_RK)
    got = arrive(expert, BOX)
    assert torch.equal(got.x_RH, x_RH) and torch.equal(got.slot_RK, slot_RK)
    answer(expert, BOX, got.header, 1)
    assert arrive(attention, BOX).header.rows == 5


def test_handles_refuse_what_does_not_fit():
    native = native_library()
    memory_B = torch.zeros(4096, dtype=torch.uint8)
    numbers = (b"x" * 8, b"y" * 8, 64, 0, 0, 16, 1, 1)
    address = memory_B.data_ptr()
    with pytest.raises(ValueError, match="smaller than its largest message"):
        native.Mailbox(address, 1024, address, *numbers)
    with pytest.raises(ValueError, match="aligned memory"):
        native.Mailbox(address, 4096, address + 4, *numbers)
    with pytest.raises(ValueError, match="8 bytes"):
        native.Mailbox(address, 4096, address, b"x", *numbers[1:])


def test_an_answer_without_python_says_nothing_of_an_earlier_call():
    expert, attention, _ = pair()
    attention.send(BOX, header(attention, 3), *message(LAYOUT, 5, 3))
    asked = arrive(expert, BOX).header
    expert.stage(BOX, asked._replace(kind=Kind.COMBINE, wire=LAYOUT.combine_wire, call=40))
    expert.post(BOX)
    assert arrive(attention, BOX).header.call == 40
    assert attention._lanes.last_answers([BOX]) == [(3, 40)]
    expert._lanes.outgoing(BOX).tell_no_call()
    assert attention._lanes.last_answers([BOX]) == [(3, 0)]
