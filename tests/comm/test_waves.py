"""Lost expert nodes under a link: every choice of every row is in the sum exactly once, whatever happens in between.

The bank's sums are exact in any order, so that one choice that is missing or doubled is another sum.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.m2n.port import ExpertPort
from afserve.comm.m2n.routes import RouteTable
from afserve.comm.m2n.rows import DeviceSplit, Splitter, TorchSplit
from afserve.comm.transports import connect
from afserve.engine.expert_node import ExpertNode
from afserve.placement.placement import FREE, Placement
from tests.comm.conftest import ExactBank
from tests.comm.test_m2n import EXPERTS, LAYERS, placements
from tests.comm.test_staging import LateStage


class OneSplit(Splitter):
    """Always the same way to split, as on a device or without the native library."""

    def __init__(self, kind):
        super().__init__(None)
        self.split = kind


def split_by(link, kind):
    if kind is not None:
        link._splitter = link._recoveries._splitter = OneSplit(kind)


def succeed(cluster, expert, epochs):
    """An expert node with what the placement in force says; its address."""
    end, address = connect.listen("local", expert=expert, attention_nodes=1, layout=cluster.layout)
    held = {(n, s): e for n, s, e in cluster.placement.held(expert)}
    cluster.banks[expert] = ExactBank(held)
    node = ExpertNode(ExpertPort(end), cluster.banks[expert], epoch=epochs[0], clock=cluster.clock)
    for epoch in epochs[1:]:
        node.accept(epoch)
    cluster.nodes[expert] = node
    return address


def lose(cluster, link, expert, closed):
    """Killed, which the link finds out, or stopped, which it is told."""
    if closed:
        cluster.nodes[expert].close()
    else:
        link.lose(expert, "it is silent")


@given(placement=placements(), kind=st.sampled_from([None, TorchSplit, DeviceSplit]), data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_each_choice_counts_once(open_cluster, placement, kind, data):
    stage = LateStage if kind is None and data.draw(st.booleans()) else lambda: None
    cluster = open_cluster("local", 1, placement, options={"stage": stage})
    (link,) = cluster.links
    split_by(link, kind)
    flying, gone = {}, set()
    for turn in range(data.draw(st.integers(4, 25))):
        act = data.draw(st.sampled_from(["send", "poll", "poll", "look", "lose", "succeed", "adopt"]))
        if act == "send" and len(flying) < 2:
            m = next(m for m in range(2) if m not in flying)
            layer, batch = turn % LAYERS, cluster.rows(1 + turn % 8, turn)
            flying[m] = layer, batch, link.dispatch(*batch, layer=layer, micro_batch=m)
        elif act == "poll":
            expert = data.draw(st.integers(0, placement.nodes - 1))
            if expert not in gone:
                cluster.nodes[expert].poll()
                cluster.clock.advance(0.001)
                cluster.nodes[expert].poll()
        elif act == "look":
            link.wait([ticket for *_, ticket in flying.values()], 0.0)
        elif act == "lose" and len(gone) < placement.nodes:
            expert = data.draw(st.sampled_from(sorted(set(range(placement.nodes)) - gone)))
            gone.add(expert)
            lose(cluster, link, expert, data.draw(st.booleans()))
        elif act == "succeed" and gone:
            expert = gone.pop()
            link.attach(link.dial(expert, succeed(cluster, expert, [placement.epoch]), 1.0))
        elif act == "adopt":
            link.adopt(placement)
    for expert in sorted(gone):
        link.attach(link.dial(expert, succeed(cluster, expert, [placement.epoch]), 1.0))
    for m, (layer, batch, ticket) in flying.items():
        assert torch.equal(cluster.finish(link, ticket), cluster.expected(layer, *batch)), f"micro-batch {m}"
    assert link.owing() == {} and link.recovery().given_up_rows == 0
    cluster.close()


@given(placement=placements(), kind=st.sampled_from([None, TorchSplit, DeviceSplit]), data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_rows_are_given_up_or_exact(open_cluster, placement, kind, data):
    """Nodes are lost for good: rows whose experts stood only there have a reason, all others their sum."""
    cluster = open_cluster("local", 1, placement, options={"deadline": 0.5})
    (link,) = cluster.links
    split_by(link, kind)
    gone = data.draw(st.sets(st.integers(0, placement.nodes - 1)))
    batch = cluster.rows(8, data.draw(st.integers(0, 99)))
    before = data.draw(st.booleans())
    ticket = None if before else link.dispatch(*batch, layer=1, micro_batch=0)
    for expert in gone:
        cluster.nodes[expert].close()
        link.lose(expert, "gone for good")
    ticket = ticket or link.dispatch(*batch, layer=1, micro_batch=0)
    y_TH, why = cluster.finish(link, ticket, seconds=0.01), link.take_given_up(0)
    rows = placement.layers[1].slots
    homes = {e: {n for n, row in enumerate(rows) if e in row} for e in range(EXPERTS)}
    late = [row for row, experts in enumerate(batch[1].tolist()) if any(homes[e] <= gone for e in experts)]
    assert sorted(why) == late
    assert all("was on no node for 0.5 s" in reason and "gone for good" in reason for reason in why.values())
    expected_TH = cluster.expected(1, *batch)
    for row in range(8):
        assert torch.isnan(y_TH[row]).all() if row in late else torch.equal(y_TH[row], expected_TH[row])
    cluster.close()


@pytest.mark.slow
@given(placement=placements(), gone=st.sets(st.integers(0, 3), max_size=2))
@settings(max_examples=60, deadline=None)
def test_a_table_without_nodes_routes_to_what_is_left(placement, gone):
    table = RouteTable(placement, 9, without=frozenset(gone))
    generator = torch.Generator().manual_seed(1)
    x_TH, expert_TK = torch.randn(16, 8, generator=generator), torch.randint(-1, EXPERTS, (16, 3))
    for layer, routes in zip(placement.layers, table.layers):
        for choice, slot in zip(
            expert_TK.flatten().tolist(), routes.choose(x_TH, expert_TK).flatten().tolist()
        ):
            left = {(n, s) for n, s, _ in layer.replicas(choice) if n not in gone} if choice >= 0 else set()
            assert divmod(slot, 9) in left if left else slot == -1
        alone = [e for e in range(EXPERTS) if all(n in gone for n, *_ in layer.replicas(e))]
        marked = [] if routes.homeless_E is None else routes.homeless_E.nonzero()[:, 0].tolist()
        assert marked == alone


def test_an_earlier_answer_comes_before_a_wave_to_the_same_node(build_cluster):
    """Expert 0 is on both nodes: what node 1 owed goes to node 0, which still computes its own part."""
    from afserve.placement.placement import LayerPlacement

    layer = LayerPlacement(
        ((0, 1, 2, 3), (0, 4, 5, 6), (7, FREE, FREE, FREE)),
        ((0.0, 1.0, 1.0, 1.0), (1.0,) * 4, (1.0, 0, 0, 0)),
    )
    cluster = build_cluster("local", 1, Placement(0, 3, 8, (layer,)), top_k=2)
    (link,) = cluster.links
    x_TH, _, weight_TK = cluster.rows(3, 1)
    batch = x_TH, torch.tensor([[0, 1], [0, 2], [3, 7]], dtype=torch.int32), weight_TK
    ticket = link.dispatch(*batch, layer=0, micro_batch=0)
    link.lose(1, "it is silent")
    first = ticket.recovery.messages
    assert [(m.box.expert, m.header is not None) for m in first] == [(0, True), (2, True), (0, False)]
    assert link.owing().keys() == {0, 2}
    assert torch.equal(cluster.finish(link, ticket), cluster.expected(0, *batch))
    assert cluster.banks[0].calls == [(0, 3), (0, 2)]
    stats = link.recovery()
    assert (stats.waves, stats.resent_rows) == (1, 2) and stats.stalled["resend"] > 0


def test_an_answer_that_was_there_is_not_asked_for_again(build_cluster):
    cluster = build_cluster()
    (link,) = cluster.links
    batch = cluster.rows(5, 2)
    ticket = link.dispatch(*batch, layer=1, micro_batch=0)
    for node in cluster.nodes:
        node.poll()
        cluster.clock.advance(0.01)
        node.poll()
    for expert in range(2):
        link.lose(expert, "it is silent")
    assert link.ready(ticket) and torch.equal(link.combine(ticket), cluster.expected(1, *batch))
    assert link.recovery().waves == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_nodes_lost_and_replaced_in_any_order(build_cluster, order):
    cluster = build_cluster("local", 1, Placement.contiguous(layers=1, experts=8, nodes=3))
    (link,) = cluster.links
    batch = cluster.rows(8, 5)
    ticket = link.dispatch(*batch, layer=0, micro_batch=1)
    for expert in order:
        lose(cluster, link, expert, closed=True)
    for _ in range(4):
        link.wait([ticket], 0.0)
    assert not link.ready(ticket) and link.owing() == {} and ticket.missing == []
    for expert in reversed(order):
        link.attach(link.dial(expert, succeed(cluster, expert, [0]), 1.0))
    assert torch.equal(cluster.finish(link, ticket), cluster.expected(0, *batch))
