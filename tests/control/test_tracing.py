"""A node sends what it draws once, in parts of bounded size; hostile parts are refused as a whole."""

import json
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.control.admission import Objectives
from afserve.control.backend import ServedModel
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.node.counts import DrawnCounts
from afserve.control.node.tracing import TraceSender
from afserve.control.wire.values import Traced
from afserve.engine.stats import AttentionStats, HostStats, KvStats, TierStats
from afserve.engine.stats.drafts import DraftStats
from afserve.errors import OverloadedError, ProtocolError
from afserve.tracing.trace import Trace, merge
from afserve.tracing.trace_part import MOST_EVENTS, TracePart, own_clock
from tests.arrows import backwards


@pytest.mark.slow
def test_everything_is_sent_once_and_in_order():
    trace = Trace("expert-0")
    told: list[Traced] = []
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
    trace = Trace("expert-0", most_events=2)
    told: list[Traced] = []
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


@pytest.mark.slow
def test_a_part_that_unpacks_to_much_more_is_refused():
    with pytest.raises(ProtocolError, match="characters"):
        TracePart.unpack(zlib.compress(b" " * (64 << 20)))


def curves(trace, folder):
    """By name, (seconds, values) as a viewer reads them; and the names of tracks."""
    trace.write(folder / "node.trace")
    merge([folder / "node.trace"], folder / "out.json")
    assert backwards(folder / "out.json") == []
    found: dict[str, list[tuple[float, dict[str, int]]]] = {}
    events = json.loads((folder / "out.json").read_text())["traceEvents"]
    for event in events:
        if event["ph"] == "C":
            found.setdefault(event["name"], []).append((event["ts"] / 1e6, event["args"]))
    return found, [e["args"]["name"] for e in events if e["name"] == "thread_name"]


def test_what_a_node_counts_is_drawn_when_it_changes(tmp_path):
    trace, clock = Trace("attention-0"), FakeClock()
    now = clock.now()
    kv = KvStats(500, 900, handed=4, hand_seconds=1.0, peer_tokens=16, oldest_lease=0.25)
    tiers = TierStats(
        9, 90, hit_tokens=32, bytes_read=70, host=HostStats(1, 8, hit_tokens=8, bytes_written=5)
    )
    later = AttentionStats(running=2, waiting=1, queued_tokens=40, prefix_hits=100, kv=kv, tiers=tiers)
    later = replace(later, drafts=DraftStats(3, 9, 5))
    counted = (AttentionStats(), later, replace(later, running=3))
    drawn = DrawnCounts(iter(counted).__next__, trace, clock)
    for stats in counted:
        assert drawn() == stats
        clock.advance(1.0)
    found, tracks = curves(trace, tmp_path)
    assert tracks == []
    assert found["requests"] == [
        (now, {"running": 0, "waiting": 0}),
        (now + 1, {"running": 2, "waiting": 1}),
        (now + 2, {"running": 3, "waiting": 1}),
    ]
    assert found["prompt tokens found"][1:] == [(now + 1, {"memory": 44, "peer": 16, "host": 8, "disk": 32})]
    assert found["KV bytes moved"][1:] == [(now + 1, {"sent": 500, "received": 900})]
    assert found["oldest KV lease, ms"][1:] == [(now + 1, {"lease": 250})]
    assert found["draft tokens"] == [(now + 1, {"drafted": 9, "accepted": 5})]
    assert found["mean hand-over, ms"] == [(now + 1, {"hand-over": 250})]
    assert found["host memory, bytes"] == [(now + 1, {"read": 0, "written": 5})]
    assert found["disk, bytes"] == [(now + 1, {"read": 70, "written": 0})]
    (part,) = sent_parts(trace)
    assert part.slices == tuple(trace.slices)


def sent_parts(trace):
    told: list[Traced] = []
    TraceSender(trace, told.append, FakeClock()).look()
    return [TracePart.unpack(each.data) for each in told]


class RefusingGateway(Gateway):
    def admit(self, prompts, wanted):
        refused = self.admission.refused
        refused["ttft"] = refused.get("ttft", 0) + 1
        raise OverloadedError("ttft: too late")


def test_a_gateway_draws_who_was_refused_and_why(tmp_path):
    trace = Trace("gateway")
    gateway, model = RefusingGateway("token"), ServedModel("m", "/m", 64, 9, 0)
    frontend = Frontend(SimpleNamespace(), gateway, model, trace)
    for _ in range(2):
        with pytest.raises(OverloadedError):
            frontend.admit([[1]], Objectives(ttft=1.0))
    frontend.draw_counts("prefill, sequences by time", {"on_time": 3, "late": 1})
    found, _ = curves(trace, tmp_path)
    assert [values for _, values in found["refused as too late"]] == [{"ttft": 1}, {"ttft": 2}]
    assert [values for _, values in found["prefill, sequences by time"]] == [{"on_time": 3, "late": 1}]
    untraced = Frontend(SimpleNamespace(), gateway, model)
    untraced.draw_counts("prefill, sequences by time", {"on_time": 3, "late": 1})
