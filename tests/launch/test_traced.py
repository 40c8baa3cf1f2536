"""Parts of a trace that came from several hosts become one, in the controller's clock."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.control.traces import SUFFIX, TraceFiles, read_life
from afserve.launch.run.traced import write_parts
from afserve.member import attention_life, expert_life
from afserve.tracing.trace import Trace, merge
from afserve.tracing.trace_part import TracePart
from tests.arrows import backwards

OWN = "the controller's"
SECONDS = st.floats(-1e5, 1e5)
DELAY = st.floats(1e-5, 5e-3)


def attention(began, number=0, count=20):
    """Rows that are sent every 10 ms, and their sums 4 ms later: one part in the node's clock that began so."""
    slices, arrows = [], []
    for step in range(count):
        at, name = began + 0.01 * step, f"{number}.0.0.{step}"
        slices.append(("0", "attend", at - 1e-3, at, {}))
        slices.append(("0, with the experts", "layer 0", at, at + 4e-3, {"layer": 0, "messages": [name]}))
        arrows += [(name, "s", "0, with the experts", at), (name, "f", "0, with the experts", at + 4e-3)]
    return slices, arrows


def expert(began, number=0, count=20):
    slices, arrows = [], []
    for step in range(count):
        at, name = began + 0.01 * step + 1e-3, f"{number}.0.0.{step}"
        slices.append(("experts", "layer 0", at, at + 2e-3, {"layer": 0, "rows": 1, "messages": [name]}))
        arrows.append((name, "t", "experts", at))
    return slices, arrows


def keep(files, life, host, clock, shift, drawn, began, delay):
    """In the controller's clock it began at `began`; the node's clock shows `shift` more."""
    slices, arrows = drawn(began + shift)
    sent = began + 0.5
    files.keep(life, host, TracePart(sent + shift, clock, slices, arrows).pack(), sent + delay)


def merged(folder):
    write_parts(folder, OWN)
    out = folder / "out.json"
    assert merge(list(folder.glob("*.trace")), out) == 0
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return out, [{**e, "process": names[e["pid"]]} for e in events if e["ph"] == "X"]


def starts(events, process, name):
    return [e["ts"] / 1e6 for e in events if (e["process"], e["name"]) == (process, name)]


@settings(max_examples=60, deadline=None)
@given(SECONDS, SECONDS, DELAY, DELAY)
def test_no_row_arrives_before_it_was_sent_whatever_clocks_say(tmp_path_factory, first, second, slow, slower):
    folder = tmp_path_factory.mktemp("parts")
    files = TraceFiles(folder)
    keep(files, attention_life(0, 0), "a", "clock of a", first, attention, 1000.0, slow)
    keep(files, expert_life(0, 0), "b", "clock of b", second, expert, 1000.0, slower)
    out, events = merged(folder)
    assert backwards(out) == []
    begun = starts(events, "attention-0 on a", "layer 0")[0]
    assert (
        1000.0 - 1e-4 <= begun <= 1000.0 + slow + 5e-3
    )  # of the controller's clock, but for what was on its way


def test_whoever_shares_the_controllers_clock_is_not_moved(tmp_path):
    files = TraceFiles(tmp_path)
    keep(files, attention_life(0, 0), "here", OWN, 0.0, attention, 1000.0, 0.2)
    keep(files, expert_life(0, 0), "b", "clock of b", 77.0, expert, 1000.0, 0.3)
    out, events = merged(tmp_path)
    assert backwards(out) == []
    assert starts(events, "attention-0 on here", "layer 0")[0] == pytest.approx(1000.0, abs=1e-6)
    assert starts(events, "expert-0 on b", "layer 0")[0] == pytest.approx(1000.001, abs=1e-3)


def test_an_arrow_whose_beginning_nobody_recorded_is_not_drawn(tmp_path):
    """The attention node was killed before it told of its last rows, or lost an expert node while it sent them."""
    files = TraceFiles(tmp_path)
    slices, arrows = attention(1000.0)
    files.keep(attention_life(0, 0), "a", TracePart(1000.5, OWN, slices, arrows[:-4]).pack(), 1000.6)
    keep(files, expert_life(0, 0), "b", OWN, 0.0, expert, 1000.0, 1e-3)
    out, _ = merged(tmp_path)
    drawn = [event["id"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "t"]
    assert drawn == [f"0.0.0.{step}" for step in range(18)] and backwards(out) == []


def test_two_nodes_of_a_host_have_one_clock_and_a_node_without_rows_too(tmp_path):
    files = TraceFiles(tmp_path)
    keep(files, attention_life(0, 0), "a", "clock of a", 5.0, attention, 1000.0, 1e-3)
    idle = TracePart(1005.5, "clock of a", [("experts", "layer 3", 1005.25, 1005.3, {})])
    files.keep(expert_life(7, 0), "a", idle.pack(), 1000.9)  # it came late
    _, events = merged(tmp_path)
    apart = starts(events, "expert-7 on a", "layer 3")[0] - starts(events, "attention-0 on a", "layer 0")[0]
    assert apart == pytest.approx(0.25, abs=1e-6)


def test_lives_of_a_lost_node_are_apart_and_their_names_do_not_mix(tmp_path):
    """The next life numbers its messages from the beginning. What the lost one sent is there."""
    files = TraceFiles(tmp_path)
    for began in (1000.0, 1060.0):
        keep(files, attention_life(0, 0), "a", "clock of a", 9.0, attention, began, 1e-3)
    keep(files, expert_life(0, 0), "b", "clock of b", -40.0, expert, 1000.0, 1e-3)
    keep(files, expert_life(0, 1), "b", "booted anew", 3.0, expert, 1060.0, 1e-3)
    _, events = merged(tmp_path)
    for process, began in (("expert-0 on b", 1000.0), ("expert-0 on b, life 2", 1060.0)):
        found = starts(events, process, "layer 0")
        assert len(found) == 20 and found[0] == pytest.approx(began + 1e-3, abs=3e-3)


def test_a_file_that_ends_within_a_part_keeps_those_before(tmp_path):
    files, life = TraceFiles(tmp_path), expert_life(0, 0)
    keep(files, life, "b", "b", 0.0, expert, 10.0, 1e-3)
    keep(files, life, "b", "b", 0.0, expert, 20.0, 1e-3)
    path = tmp_path / f"expert-0.0{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-3])
    found, host, parts = read_life(path)
    assert (found, host) == (life, "b") and len(list(parts)) == 1


def test_bytes_that_are_no_part_are_left_out(tmp_path, caplog):
    files, life = TraceFiles(tmp_path), expert_life(0, 0)
    files.keep(life, "b", b"nonsense", 1.0)
    keep(files, life, "b", "b", 0.0, expert, 10.0, 1e-3)
    _, events = merged(tmp_path)
    assert len(events) == 20 and "no part of a trace" in caplog.text


def test_no_more_than_there_is_room_for_is_kept_and_it_is_said_once(tmp_path, caplog):
    part = TracePart(1.0, "b", [("experts", "layer 0", 0.5, 0.6, {})]).pack()
    files, life = TraceFiles(tmp_path, most=3 * len(part)), expert_life(0, 0)
    for number in range(9):
        files.keep(life, "b", part, float(number))
    assert len(list(read_life(tmp_path / f"expert-0.0{SUFFIX}")[2])) == 3
    assert caplog.text.count("are kept") == 1


def test_events_that_a_node_had_no_room_for_are_counted(tmp_path):
    files, trace = TraceFiles(tmp_path), Trace("n", most_events=1)
    for _ in range(3):
        trace.slice("experts", "layer 0", 1.0, 2.0)
    part = TracePart(2.0, "b", trace.slices, trace.arrows, trace.instants, trace.dropped)
    files.keep(expert_life(0, 0), "b", part.pack(), 2.0)
    write_parts(tmp_path, OWN)
    assert merge(list(tmp_path.glob("*.trace")), tmp_path / "out.json") == 2
