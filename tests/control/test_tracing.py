"""A node sends what it draws once, in parts of bounded size; hostile parts are refused as a whole."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.control.node.tracing import TraceSender
from afserve.errors import ProtocolError
from afserve.trace import Trace
from afserve.trace_part import MOST_EVENTS, TracePart, own_clock


def test_everything_is_sent_once_and_in_order():
    trace, told = Trace("expert-0"), []
    sender = TraceSender(trace, told.append, FakeClock())
    sender.look()
    assert told == []
    for number in range(MOST_EVENTS + 7):
        trace.slice("experts", f"layer {number}", 1.0, 2.0, {"layer": number})
        trace.arrow(f"0.0.0.{number}", "t", "experts", 1.5)
    trace.instant("lost", 3.0)
    sender.look()
    sender.look()
    parts = [TracePart.unpack(each.data) for each in told]
    assert max(len(p.slices) + len(p.arrows) + len(p.instants) for p in parts) <= MOST_EVENTS
    assert [s for p in parts for s in p.slices] == list(trace.slices)
    assert [a for p in parts for a in p.arrows] == list(trace.arrows)
    assert [i for p in parts for i in p.instants] == [("lost", 3.0)]
    assert {p.clock for p in parts} == {own_clock()}


def test_the_rest_is_sent_at_the_end_and_what_found_no_room_is_counted():
    trace, told = Trace("expert-0", most_events=2), []
    sender = TraceSender(trace, told.append)
    sender.start()
    for _ in range(5):
        trace.slice("experts", "layer 0", 1.0, 2.0)
    sender.close()
    parts = [TracePart.unpack(each.data) for each in told]
    assert sum(len(p.slices) for p in parts) == 2 and parts[-1].dropped == 3


@given(st.binary(max_size=200))
def test_bytes_of_strangers_are_refused(data):
    for hostile in (data, zlib.compress(data)):
        with pytest.raises(ProtocolError):
            TracePart.unpack(hostile)


@pytest.mark.parametrize(
    "text",
    [
        '[1.0,"c",[],[],[],-1]',
        '[NaN,"c",[],[],[],0]',
        '[1.0,"c",[["t","n",0,1,{"layer":0.5}]],[],[],0]',
        '[1.0,"c",[],[["id","x","t",1.0]],[],0]',
        '[1.0,"c",[],[["id",["s"],"t",1.0]],[],0]',
        '[1.0,"c",[],[],[["n"]],0]',
        '[1.0,"c",5,[],[],0]',
    ],
)
def test_parts_that_no_node_packs_are_refused(text):
    with pytest.raises(ProtocolError, match="no part of a trace"):
        TracePart.unpack(zlib.compress(text.encode()))


def test_a_part_that_unpacks_to_much_more_is_refused():
    with pytest.raises(ProtocolError, match="characters"):
        TracePart.unpack(zlib.compress(b" " * (64 << 20)))
