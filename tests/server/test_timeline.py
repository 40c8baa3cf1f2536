"""The picture of the last steps: every clock brought into one, and each span, trip and share where it belongs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.server.live.timeline import MOST_STEPS, Call, Trip, picture, shifts
from afserve.tracing.recording import Recording

LANE, AWAY = "micro-batch 0", "micro-batch 0, with the experts"


def exchange(attention, expert, number, at, travel, computing, clocks):
    """One dispatch at `at` in true time, as both ends' clocks see it."""
    name = f"{attention}.{expert}.{number}"
    here, there = clocks[attention], clocks[expert]
    end = at + 2 * travel + computing
    trip = Trip(f"attention-{attention}", LANE, 0, at + here, end + here, (name,))
    start = at + travel + there
    return trip, Call(f"expert-{expert}", 0, 1, start, start + computing, (name,))


durations = st.floats(1e-5, 1e-2)


@given(
    st.lists(st.sampled_from([0.0, 0.0, 55.5, -3e5]), min_size=4, max_size=4),
    st.lists(st.tuples(durations, durations, durations), min_size=4, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_no_row_is_computed_before_it_was_sent_or_after_it_was_added(offsets, legs):
    clocks = {0: offsets[0], 1: offsets[1], 2: offsets[2], 3: offsets[3]}
    at, trips, calls = 1.0, [], []
    for number, (pause, travel, computing) in enumerate(legs):
        at += pause
        attention, expert = (0, 2) if number % 4 == 0 else (0, 3) if number % 4 == 1 else (1, 2 + number % 2)
        trip, call = exchange(attention, expert, number, at, travel, computing, clocks)
        trips.append(trip)
        calls.append(call)
    moved = shifts(trips, calls)
    by_name = {trip.messages[0]: trip for trip in trips}
    for call in calls:
        trip = by_name[call.messages[0]]
        assert trip.start + moved[trip.node] <= call.start + moved[call.node] + 1e-5
        assert call.end + moved[call.node] <= trip.end + moved[trip.node] + 1e-5
    for node, index in (("attention-0", 0), ("attention-1", 1), ("expert-2", 2), ("expert-3", 3)):
        if clocks[index] == clocks[0]:
            assert moved[node] == pytest.approx(0.0, abs=1e-9)  # whoever has the first one's clock keeps it


def recorded():
    """Two micro-batches' worth of one lane over two expert nodes, the second of another host."""
    attention = Recording(
        "attention-0",
        10.0,
        10.010,
        (
            (LANE, "schedule", 10.001, 10.0012, {}),
            (LANE, "attend", 10.001, 10.002, {}),
            ("waiting", "wait", 10.002, 10.005, {}),
            (AWAY, "layer 4", 10.0018, 10.005, {"layer": 4, "messages": ["a", "b"]}),
            (LANE, "sample", 10.0055, 10.006, {}),
            (LANE, "attend", 10.005, 10.006, {}),
        ),
    )
    near = Recording(
        "expert-0",
        9.9,
        10.02,
        (("experts", "layer 4: 3 rows of 1", 10.0022, 10.003, {"layer": 4, "rows": 3, "messages": ["a"]}),),
    )
    far = Recording(
        "expert-1",
        509.9,
        510.02,
        (
            (
                "experts",
                "layer 4: 2 rows of 1",
                510.0030,
                510.0046,
                {"layer": 4, "rows": 2, "messages": ["b"]},
            ),
        ),
    )
    return [one.pack() for one in (attention, near, far)]


def test_a_picture_has_every_span_and_share():
    drawn = picture(recorded())
    assert drawn["micros"] == 10_000 and drawn["steps"] == [6000]
    attention, near, far = drawn["nodes"]
    assert [node["name"] for node in drawn["nodes"]] == ["attention-0", "expert-0", "expert-1"]
    assert attention["lanes"] == [
        {
            "name": LANE,
            "spans": [
                (1000, 2000, "attend", 0, 0),
                (1000, 1200, "own", 0, 0),
                (5000, 6000, "attend", 0, 0),
                (5500, 6000, "own", 0, 0),
            ],
        }
    ]
    assert attention["waits"] == [(2000, 5000)]
    assert (attention["busy"], attention["waiting"]) == (pytest.approx(0.2), pytest.approx(0.3))
    assert near["lanes"][0]["spans"] == [(2200, 3000, "experts", 4, 3)] and near["busy"] == pytest.approx(
        0.08
    )
    (span,) = far["lanes"][0]["spans"]
    assert span[1] - span[0] == 1600 and 1800 <= span[0] <= 3400, "between its dispatch and its sum"
    (trip,) = drawn["trips"]
    assert (trip["layer"], trip["start"], trip["end"], trip["nodes"]) == (4, 1800, 5000, 2)
    assert {name: start for name, start, _ in trip["by"]} == {"expert-0": 2200, "expert-1": span[0]}
    assert attention["last"] == ("expert-1", 1.0) if span[1] > 3000 else ("expert-0", 1.0)


def test_earlier_steps_are_left_out_and_what_crosses_the_edge_is_cut():
    steps = [
        (LANE, name, at + start / 1e3, at + end / 1e3, {})
        for at in range(20)
        for name, start, end in (("sample", 900, 1000), ("attend", 0, 1000))
    ]
    steps.append(("micro-batch 1", "attend", 13.5, 14.5, {}))
    drawn = picture([Recording("attention-0", -1.0, 20.5, steps).pack()])
    assert drawn["micros"] == 6_500_000 and len(drawn["steps"]) == MOST_STEPS
    first, second = (lane["spans"] for lane in drawn["nodes"][0]["lanes"])
    assert [span[:2] for span in first if span[2] == "attend"] == [
        (at * 1_000_000, (at + 1) * 1_000_000) for at in range(MOST_STEPS)
    ]
    assert [span[:2] for span in second] == [(0, 500_000)]


@pytest.mark.parametrize("packed", [[], [Recording("attention-0", 0.0, 1.0, ()).pack()], recorded()[1:]])
def test_nothing_is_drawn_where_nothing_of_attention_nodes_ran(packed):
    assert picture(packed) == {"micros": 0, "steps": [], "nodes": [], "trips": []}
