"""What the page is sent of the time before it was opened."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from afserve.control.wire.view_values import NodeView
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.server.live.history import KEPT_SECONDS, History
from afserve.server.metrics.key_meter import KeyCounts

LATENCY = {"first_token": {"p50": 0.1, "p90": 0.2, "p99": 0.3}, "inter_token": None}


def view(name, stats):
    return NodeView(name, "attention", "ready", 1, 0.1, 1 << 20, stats)


def stats(generated, prompt=0, used=0):
    return replace(
        AttentionStats(), generated_tokens=generated, prompt_tokens=prompt, kv_blocks=10, kv_blocks_used=used
    )


def test_rates_are_those_since_the_moment_before():
    history = History()
    history.add_sample(100.0, [view("attention-0", stats(10, 5)), view("expert-0", ExpertStats())], LATENCY)
    history.add_sample(102.0, [view("attention-0", stats(30, 9, used=5))], LATENCY)
    assert history.columns() == {
        "at": [102.0], "kv": {"attention-0": [0.5]}, "keys": {},
        "rates": {"generated": [10.0], "prompt": [2.0], "memory": [0.0], "peer": [0.0], "host": [0.0], "disk": [0.0]},
        "first_token": [LATENCY["first_token"]], "inter_token": [None],
    }  # fmt: skip


def test_hits_are_by_tier_and_shares_by_key():
    """A key that asked nothing since has no share, and one whose counts began anew no wrong one."""
    history, node = History(), stats(0)
    history.add_sample(
        100.0,
        [view("attention-0", node)],
        LATENCY,
        {"a": KeyCounts(100, 90), "b": KeyCounts(50, 0), "c": KeyCounts(70, 70)},
    )
    found = replace(node, prefix_hits=600, kv=replace(node.kv, peer_tokens=200))
    later = {"a": KeyCounts(200, 115), "b": KeyCounts(50), "c": KeyCounts(10), "d": KeyCounts(8, 4)}
    history.add_sample(102.0, [view("attention-0", found)], LATENCY, later)
    history.add_sample(104.0, [view("attention-0", found)], LATENCY, later)
    columns = history.columns()
    assert columns["rates"]["memory"] == [200.0, 0.0] and columns["rates"]["peer"] == [100.0, 0.0]
    assert columns["keys"] == {"a": [0.25, None], "d": [0.5, None]}


def test_a_key_that_comes_back_goes_on_from_what_it_had():
    history = History()
    for at, keys in enumerate(({"a": (100, 0)}, {"b": (8, 2)}, {"a": (110, 5)})):
        history.add_sample(float(at), [], LATENCY, {key: KeyCounts(*counts) for key, counts in keys.items()})
    assert history.columns()["keys"] == {"a": [None, 0.5], "b": [0.25, None]}


def test_a_node_that_is_new_or_started_anew_is_no_burst():
    history = History()
    history.add_sample(0.0, [view("attention-0", stats(1000))], LATENCY)
    history.add_sample(2.0, [view("attention-0", stats(4)), view("attention-1", stats(900))], LATENCY)
    assert history.columns()["rates"]["generated"] == [0.0]
    assert history.columns()["kv"].keys() == {"attention-0", "attention-1"}


@given(st.lists(st.tuples(st.floats(-5, 400), st.integers(0, 100), st.integers(0, 3)), max_size=80))
def test_columns_are_of_one_length_and_no_older_than_is_kept(steps):
    history, at, made = History(), 1e9, 0
    for step, grown, node in steps:
        at, made = at + step, made + grown
        history.add_sample(at, [view(f"attention-{node}", stats(made))], LATENCY)
    columns = history.columns()
    times = columns["at"]
    assert all(len(column) == len(times) for column in (*columns["rates"].values(), *columns["kv"].values()))
    assert all(rate >= 0 for rate in columns["rates"]["generated"])
    assert not times or times[-1] - min(times) <= KEPT_SECONDS + 5 * len(steps)
