"""What a node says of itself while it steps: every row once, and heartbeats of frozen snapshots only."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.config import ModelSource
from afserve.control.node.heartbeat import HeartbeatThread, heartbeat_seconds
from afserve.control.node.report import Reporter
from afserve.control.node.stream import ControlStream
from afserve.control.wire.desired import MOST_HEARTBEATS, shortest_silence
from afserve.control.wire.placement_values import Routed
from afserve.control.wire.values import Heartbeat
from afserve.engine.build import colocated
from afserve.engine.stats import AttentionStats
from afserve.families.table import load_spec
from afserve.placement.rebalance.stats import RoutedRows
from tests.engine.driving import LENGTHS, NEW, config, prompts, requests


class Stream(ControlStream):
    """One that connects to nobody: what was sent on it."""

    def __init__(self):
        super().__init__("127.0.0.1:9", "token")
        self.sent = []

    def send(self, value):
        self.sent.append(value)

    def of(self, kind):
        return [value for value in self.sent if isinstance(value, kind)]


@pytest.mark.slow
def test_rows_are_neither_lost_nor_doubled_while_heartbeats_go_out(tiny_checkpoint):
    """The heartbeat thread runs as fast as it can beside the steps; it used to fold and clear the steps' own lists."""
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    node, stream = colocated(source, config(micro_batches=2)), Stream()
    heartbeat, clock = HeartbeatThread(stream, AttentionStats(), 0.0002), FakeClock()
    report = Reporter(heartbeat, stream, node.stats, node.take_routed, clock=clock)
    heartbeat.start()
    for request in requests(prompts()):
        node.submit(request)
    while node.busy:
        node.step()
        clock.advance(0.05)
        report()
    report(at_once=True)
    deadline = time.monotonic() + 20
    while stream.sent and stream.of(Heartbeat)[-1:] and stream.of(Heartbeat)[-1].stats != node.stats():
        assert time.monotonic() < deadline, "no heartbeat brought the last snapshot"
        time.sleep(0.001)
    heartbeat.stop()
    spec = load_spec(source.path)
    told = stream.of(Routed)
    assert len(told) > 3
    assert all((part >= 0).all() for value in told for part in (value.rows.prefill_LE, value.rows.decode_LE))
    decoded = sum(value.rows.decode_LE for value in told).sum(1)
    prefilled = sum(value.rows.prefill_LE for value in told).sum(1)
    assert (prefilled == sum(LENGTHS) * spec.top_k).all()
    assert (decoded == len(LENGTHS) * (NEW - 1) * spec.top_k).all()
    generated = [beat.stats.generated_tokens for beat in stream.of(Heartbeat)]
    assert generated == sorted(generated)


def test_a_heartbeat_never_calls_into_the_node():
    stream, asked = Stream(), set()

    def stats():
        asked.add(threading.current_thread())
        return AttentionStats(running=len(asked))

    heartbeat, clock = HeartbeatThread(stream, AttentionStats(), 0.001), FakeClock()
    report = Reporter(heartbeat, stream, stats, clock=clock)
    heartbeat.start()
    deadline = time.monotonic() + 20
    while len(stream.of(Heartbeat)) < 20 and time.monotonic() < deadline:
        clock.advance(0.01)
        report()
        time.sleep(0.001)
    heartbeat.stop()
    assert asked == {threading.current_thread()}
    assert len(stream.of(Heartbeat)) >= 20


def test_nothing_is_said_twice_nor_too_often():
    stream, clock, calls = Stream(), FakeClock(), []
    left = [np.array([[3, 0]])]

    def routed():
        calls.append(clock.now())
        rows = left.pop() if left else np.array([[0, 0]])
        return RoutedRows(np.zeros_like(rows), rows)

    report = Reporter(HeartbeatThread(stream, AttentionStats(), 1.0), stream, AttentionStats, routed, clock)
    for _ in range(410):
        clock.advance(0.01)
        report()
    assert len(calls) == 4, "once per heartbeat"
    assert len(stream.of(Routed)) == 1


def test_a_change_that_should_be_seen_has_a_heartbeat_of_its_own():
    sent = Stream()
    heartbeat, clock = HeartbeatThread(sent, AttentionStats(), 60.0), FakeClock()
    report = Reporter(heartbeat, sent, lambda: AttentionStats(running=3), clock=clock)
    heartbeat.start()
    try:
        for _ in range(5):
            report(soon=True)
        until = time.monotonic() + 20
        while not sent.of(Heartbeat) and time.monotonic() < until:
            time.sleep(0.01)
        assert [beat.stats.running for beat in sent.of(Heartbeat)] == [3], (
            "five changes in a moment are one heartbeat"
        )
    finally:
        heartbeat.stop()


@pytest.mark.parametrize(
    "silence, nodes, seconds", [(1.0, 5, 1 / 3), (10.0, 5, 1.0), (1.0, 300, 1 / 3), (6.0, 9, 1.0)]
)
def test_a_node_says_three_heartbeats_while_it_may_be_silent(silence, nodes, seconds):
    assert heartbeat_seconds(silence, nodes) == pytest.approx(seconds)


@given(nodes=st.integers(1, 2048), asked=st.floats(0.2, 3600.0))
def test_all_nodes_together_say_no_more_heartbeats_than_the_controller_takes(nodes, asked):
    silence = max(asked, shortest_silence(nodes))
    seconds = heartbeat_seconds(silence, nodes)
    assert seconds <= silence / 3
    assert nodes / seconds <= MOST_HEARTBEATS * 1.001
