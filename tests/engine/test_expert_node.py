"""The expert node and its soft barrier, by hand-moved clock: what is merged, what is held and for how long."""

import pytest
import torch

from afserve.clock import FakeClock
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transport import Layout, WireType
from afserve.comm.transports import connect
from afserve.engine.expert_node import ExpertNode
from afserve.placement.placement import Placement
from afserve.soft_barrier import SoftBarrier
from afserve.tracing.trace import Trace

LAYERS = 4
MS = 1e-3


class TimedBank(Bank):
    """Doubles its rows; every call takes `seconds` of the fake clock."""

    def __init__(self, clock, seconds=MS):
        self.clock, self.seconds = clock, seconds
        self.calls = []

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False):
        assert not add
        self.calls.append((layer, len(x_RH)))
        self.clock.advance(self.seconds)
        out_RH.copy_(2 * x_RH)


def one_message(waiting, enough):
    """In the place of `WaitingPrompts.sharing`: no two messages share a call."""
    return [next(iter(waiting._by_box.values()))]


class Rig:
    def __init__(self, attention=2, longest_hold=MS, micro_batches=2, prompt_share=1 / 16, bank=TimedBank):
        self.clock = FakeClock()
        self.placement = Placement.contiguous(layers=LAYERS, experts=4, nodes=1)
        wire = WireType.FLOAT32
        layout = Layout(8, 2, 512, micro_batches, LAYERS, 4, wire, wire)
        end, address = connect.listen("local", expert=0, attention_nodes=attention, layout=layout)
        self.bank = bank(self.clock)
        self.node = ExpertNode(
            ExpertPort(end),
            self.bank,
            longest_hold=longest_hold,
            clock=self.clock,
            prompt_share=prompt_share,
        )
        self.links = [
            ExpertLink(
                connect.connect([address], attention=a, layout=layout, timeout=60.0),
                attention=a,
                layout=layout,
                placement=self.placement,
                clock=self.clock,
            )
            for a in range(attention)
        ]

    def send(self, a, layer, micro_batch=0, rows=2):
        x_TH = torch.full((rows, 8), 10.0 * a + layer)
        expert_TK = torch.tensor([[0, 3]] * rows, dtype=torch.int32)
        return self.links[a].dispatch(
            x_TH, expert_TK, torch.ones(rows, 2), layer=layer, micro_batch=micro_batch
        )

    def take(self, a, ticket, layer):
        assert self.links[a].ready(ticket)
        assert (self.links[a].combine(ticket) == 2 * (10.0 * a + layer)).all()


def test_rows_of_one_layer_that_are_there_together_are_one_call():
    rig = Rig(attention=3)
    tickets = [rig.send(a, 1, m, rows=1 + a) for a in range(3) for m in range(2)]
    assert rig.node.poll() == 6
    assert rig.bank.calls == [(1, 12)]
    for number, ticket in enumerate(tickets):
        rig.take(number // 2, ticket, 1)


def test_layers_are_not_mixed():
    rig = Rig(attention=3)
    tickets = [rig.send(a, a % 2) for a in range(3)]
    assert rig.node.poll() == 3
    assert sorted(rig.bank.calls) == [(0, 4), (1, 2)]
    for a, ticket in enumerate(tickets):
        rig.take(a, ticket, a % 2)


def test_a_prompt_chunk_does_not_hold_up_decode():
    rig = Rig(attention=3)
    chunks = [rig.send(a, 1, 0, rows=300) for a in range(2)]
    decode = rig.send(2, 1, 0)
    assert rig.node.poll() == 2
    assert rig.bank.calls == [(1, 2), (1, 300)], "decode first, and not in the chunk's call"
    rig.take(2, decode, 1)
    rig.take(0, chunks[0], 1)
    following = rig.send(2, 2, 0)
    rig.node.wait(0.0)
    assert rig.node.poll() == 2
    assert rig.bank.calls[2:] == [(2, 2), (1, 300)], "what came meanwhile goes before the next chunk"
    rig.take(2, following, 2)
    rig.take(1, chunks[1], 1)
    assert rig.node.poll() == 0


def test_a_node_that_leaves_in_the_middle_of_its_answers():
    rig = Rig()
    kept = rig.send(0, 1)
    for micro_batch in range(2):
        rig.send(1, 1, micro_batch)
    rig.send(1, 1, 0, rows=200)
    rig.links[1].close()
    rig.node.poll()
    rig.take(0, kept, 1)
    assert rig.node.poll() == 0


def test_nothing_to_do_is_nothing_done():
    rig = Rig()
    assert rig.node.poll() == 0
    rig.node.wait(0.0)
    assert rig.node.stats().calls == 0


def warm(rig):
    """Two nodes in step, one millisecond from answer to dispatch."""
    for turn in range(8):
        tickets = [rig.send(a, turn % LAYERS) for a in range(len(rig.links))]
        rig.node.poll()
        for a, ticket in enumerate(tickets):
            rig.take(a, ticket, turn % LAYERS)
        rig.clock.advance(MS)
    rig.bank.calls.clear()


def test_an_expected_companion_is_waited_for():
    rig = Rig()
    warm(rig)
    together = [rig.send(a, 0) for a in range(2)]
    rig.node.poll()
    for a, ticket in enumerate(together):
        rig.take(a, ticket, 0)
    rig.clock.advance(0.8 * MS)
    early = rig.send(1, 1)
    assert rig.node.poll() == 0, "attention-0 was answered for layer 0 and is expected within the hold"
    rig.clock.advance(0.1 * MS)
    joined = rig.send(0, 1)
    assert rig.node.poll() == 2
    assert rig.bank.calls == [(0, 4), (1, 4)]
    rig.take(1, early, 1)
    rig.take(0, joined, 1)
    assert rig.node.stats().hold_seconds == pytest.approx(0.1 * MS)


def test_a_companion_that_does_not_come_is_waited_for_until_its_usual_time():
    rig = Rig()
    warm(rig)
    together = [rig.send(a, 0) for a in range(2)]
    rig.node.poll()
    for a, ticket in enumerate(together):
        rig.take(a, ticket, 0)
    rig.clock.advance(0.8 * MS)
    early = rig.send(1, 1)
    assert rig.node.poll() == 0
    rig.clock.advance(0.21 * MS)
    assert rig.node.poll() == 1
    rig.take(1, early, 1)


def test_no_hold_is_longer_than_its_bound_or_than_one_call():
    barrier = SoftBarrier(LAYERS, longest=0.5 * MS)
    assert barrier.limit == 0.0, "before the first call nothing is known"
    barrier.note_call([], now=0.0, seconds=2 * MS)
    assert barrier.limit == 0.5 * MS
    assert SoftBarrier(LAYERS, longest=0.0).limit == 0.0
    short = SoftBarrier(LAYERS, longest=1.0)
    short.note_call([], now=0.0, seconds=0.2 * MS)
    assert short.limit == pytest.approx(0.2 * MS)


def barrier_of(gaps):
    """One stream per node, each learnt with its own gap; all were answered for layer 0 at time 10."""
    barrier = SoftBarrier(LAYERS, longest=MS)
    for node, gap in enumerate(gaps):
        for turn in range(9):
            now = 0.1 + turn
            barrier.arrived(node, node, turn % LAYERS, now + gap)
            barrier.note_call([node], now + 1.0, MS)
    for node in range(len(gaps)):
        barrier.note_call([node], 10.0, MS)
    return barrier


def test_a_slow_an_idle_and_a_dead_node_are_not_waited_for():
    gap = 0.5 * MS
    barrier = barrier_of([gap, gap, 10 * MS])
    now = 10.0 + gap
    assert barrier.call_time(1, {0}, since=now - 0.2 * MS, now=now - 0.2 * MS) == pytest.approx(
        now, abs=0.01 * MS
    )
    assert barrier.call_time(1, {0, 1}, since=now, now=now) == now, "the slow one is not waited for"
    assert barrier.call_time(1, {0}, since=11.0, now=11.0) == 11.0, "an idle one is not waited for"
    barrier.forget(1)
    early = now - 0.2 * MS
    assert barrier.call_time(1, {0}, since=early, now=early) == early, "a dead one is not waited for"
    assert barrier.call_time(3, {0}, since=early, now=early) == early, "nor one that is at another layer"


def test_the_usual_time_to_a_next_dispatch_is_the_least_of_those_asked_for():
    barrier = barrier_of([3 * MS, 2 * MS, MS])
    assert barrier.usual_gap({2}) == pytest.approx(2 * MS)
    assert barrier.usual_gap({0, 1, 2}) is None and SoftBarrier(LAYERS).usual_gap(()) is None


def test_a_node_that_leaves_takes_its_rows_along():
    rig = Rig()
    warm(rig)
    rig.node.poll()
    kept = rig.send(0, 0)
    rig.send(1, 0)
    rig.links[1].close()
    for _ in range(3):
        rig.node.wait(0.0)
        rig.node.poll()
    rig.take(0, kept, 0)


def test_stats_count_messages_rows_and_calls():
    rig = Rig()
    warm(rig)
    rig.node.wait(0.0)
    stats = rig.node.stats()
    assert (stats.messages, stats.rows, stats.calls) == (16, 32, 8)
    assert stats.busy_seconds == pytest.approx(8 * MS)


def test_a_newer_dispatch_replaces_one_that_was_given_up():
    rig = Rig()
    warm(rig)
    rig.send(0, 0)
    ticket = rig.send(0, 2)
    rig.node.poll()
    rig.take(0, ticket, 2)
    assert [layer for layer, _ in rig.bank.calls] == [2]


def test_messages_that_nobody_told_of_teach_no_gap():
    """The next gap is from the last of them, and their node is one that sends."""
    barrier = SoftBarrier(LAYERS)
    for layer in range(3):
        barrier.arrived("a", 0, layer, 10 * MS * layer)
        barrier.note_call(("a",), 10 * MS * layer + MS, MS)
    usual = barrier.usual_gap(())
    assert usual == pytest.approx(9 * MS)
    barrier.passed("a", 0, 1, 500 * MS, 2 * MS)
    assert barrier.usual_gap(()) == usual and barrier.nodes == 1
    barrier.arrived("a", 0, 2, 509 * MS)
    assert barrier.usual_gap(()) == pytest.approx(9 * MS)
    barrier.passed("b", 1, 0, 510 * MS, MS)
    assert barrier.nodes == 2
    barrier.forget(1)
    assert barrier.nodes == 1


def test_a_trace_says_what_is_a_piece_of_a_prompt():
    rig = Rig(attention=3)
    rig.node.trace = Trace("expert-0")
    rig.send(2, 1)
    rig.send(0, 2, rows=300)
    while rig.node.poll():
        pass
    names = [one[1] for one in rig.node.trace.slices]
    assert names == ["layer 1: 2 rows of 1", "layer 2: 300 of 300 rows of prompts"]


def test_answers_say_how_many_rows_of_others_were_in_their_calls():
    rig = Rig(attention=3)
    tickets = [rig.send(a, 1, rows=1 + a) for a in range(3)]
    rig.node.poll()
    for a, ticket in enumerate(tickets):
        rig.take(a, ticket, 1)
        assert rig.links[a].called.take_others(0) == pytest.approx((6 - (1 + a)) / (1 + a))
        assert rig.links[a].called.take_others(0) == 0.0, "nothing was answered since"
    ticket = rig.send(1, 2, rows=4)
    rig.clock.advance(MS)
    rig.node.poll()
    rig.take(1, ticket, 2)
    assert rig.links[1].called.take_others(0) == 0.0, "alone in its call"
