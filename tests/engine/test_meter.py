"""What is measured and drawn of a run: consistent sums, and a trace file that a viewer can read."""

import json

import pytest

from afserve.clock import MonotonicClock
from afserve.config import ModelSource
from afserve.tracing.trace import Trace, merge
from tests.arrows import backwards
from tests.engine.driving import collect, config, prompts, requests
from tests.engine.local_cluster import LocalCluster


@pytest.mark.slow
def test_sums_and_trace(tiny_checkpoint, tmp_path, expected):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    cluster = LocalCluster.build(source, config(micro_batches=2), experts=2)
    attention, expert = Trace("attention-0"), Trace("expert-0")
    cluster.attention[0].trace = attention
    cluster.experts[0].trace = expert
    before = MonotonicClock().now()
    assert collect(cluster.run(requests(prompts()))) == expected("v3")
    elapsed = MonotonicClock().now() - before
    stats = cluster.attention[0].stats()
    assert stats.dispatches == stats.steps * len(cluster.attention[0].take_routed().decode_LE)
    assert 0 < stats.busy_seconds < elapsed
    assert stats.under_way_seconds > 0
    for trace in (attention, expert):
        trace.write(tmp_path / f"{trace.process}.trace")
    out = tmp_path / "out.json"
    assert merge(list(tmp_path.glob("*.trace")), out) == 0
    assert backwards(out) == []
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"attention-0", "expert-0"}
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 for e in slices)
    assert {"schedule", "sample", "attend"} <= {e["name"] for e in slices}
    arrows = {kind: {e["id"] for e in events if e["ph"] == kind} for kind in "stf"}
    assert arrows["s"] == arrows["f"]
    assert arrows["t"] == {i for i in arrows["s"] if i.startswith("0.0.")}
    calls = [e["args"] for e in slices if e["name"].startswith("layer") and "rows" in e["args"]]
    away = [e["args"] for e in slices if e["name"].startswith("layer") and "rows" not in e["args"]]
    assert {m for call in calls for m in call["messages"]} == arrows["t"]
    assert {m for trip in away for m in trip["messages"]} == arrows["s"]
    tracks = {(e["pid"], e["tid"]) for e in slices}
    for e in events:
        if e["ph"] in "st":
            assert (e["pid"], e["tid"]) in tracks


def test_a_full_trace_says_what_it_dropped(tmp_path):
    trace = Trace("node", most_events=2)
    for i in range(5):
        trace.slice("t", "x", i, i + 1)
    trace.write(tmp_path / "node.trace")
    assert merge([tmp_path / "node.trace"], tmp_path / "out.json") == 3


def test_an_arrow_that_runs_backwards_is_found(tmp_path):
    attention, expert = Trace("attention-0"), Trace("expert-0")
    for trace in (attention, expert):
        trace.slice("t", "work", 0.0, 10.0)
    attention.arrow("good", "s", "t", 1.0)
    expert.arrow("good", "t", "t", 2.0)
    attention.arrow("good", "f", "t", 3.0)
    attention.arrow("late", "s", "t", 2.5)  # stamped after everything was sent
    expert.arrow("late", "t", "t", 2.0)
    attention.arrow("nowhere", "s", "t", 11.0)
    expert.arrow("of a lost sender", "t", "t", 4.0)  # is not drawn
    for trace in (attention, expert):
        trace.write(tmp_path / f"{trace.process}.trace")
    merge(list(tmp_path.glob("*.trace")), tmp_path / "out.json")
    wrong = backwards(tmp_path / "out.json")
    assert sorted(text.partition(":")[0] for text in wrong) == ["late", "nowhere"]


def test_a_number_that_a_node_s_next_life_uses_again_is_another_arrow(tmp_path):
    """What the second life computed was not sent before its end: the first one's computation is not taken for it."""
    attention, first, second = Trace("attention-0"), Trace("expert-1.0"), Trace("expert-1.1")
    for trace in (attention, first, second):
        trace.slice("t", "work", 0.0, 20.0)
    for start in (1.0, 9.0):
        attention.arrow("0.1.0.1", "s", "t", start)
        attention.arrow("0.1.0.1", "f", "t", start + 0.2)
    first.arrow("0.1.0.1", "t", "t", 1.1)
    second.arrow("0.1.0.2", "t", "t", 9.5)  # of a sender that was lost
    for trace in (attention, first, second):
        trace.write(tmp_path / f"{trace.process}.trace")
    merge(list(tmp_path.glob("*.trace")), tmp_path / "out.json")
    assert backwards(tmp_path / "out.json") == []
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    arrows: dict[str, str] = {}
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]] = arrows.get(event["id"], "") + event["ph"]
    assert sorted("".join(sorted(points)) for points in arrows.values()) == ["fs", "fst"]
