"""Rows prefer replicas on their sender's NUMA node, and an expert's shares are met over all senders."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.binding import seat
from afserve.comm.m2n.near import Near
from afserve.comm.m2n.routes import RouteTable
from afserve.member import attention_node, expert_node
from afserve.placement.placement import FREE, LayerPlacement, Placement

ALL = [Near(own, 2) for own in range(2)]


def replicas(*share):
    """Expert 0 on every node, and on each an expert of its own."""
    slots = tuple((0, 1 + node) for node in range(len(share)))
    return LayerPlacement(slots, tuple((each, 1.0) for each in share))


@st.composite
def layers(draw):
    count = draw(st.integers(1, 4))
    weights = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    return count, replicas(*(weight / sum(weights) for weight in weights))


@given(layers())
def test_shares_are_met_over_all_senders_and_nothing_far_is_taken_that_is_near(drawn):
    count, layer = drawn
    views = [Near(own, count).shares(layer) for own in range(count)]
    nodes = range(len(layer.slots))
    for node in nodes:
        mean = sum(view.share[node][0] for view in views) / count
        assert mean == pytest.approx(layer.share[node][0])
        assert all(view.share[node][1] == pytest.approx(1.0) for view in views), "there is no other replica"
    for own, view in enumerate(views):
        assert sum(view.share[node][0] for node in nodes) == pytest.approx(1.0)
        here = [node for node in nodes if seat(expert_node(node), count) == own]
        held, near = (sum(each.share[node][0] for node in here) for each in (layer, view))
        assert near == pytest.approx(min(1.0, count * held))


def test_free_slots_and_replicas_without_rows_stay_so():
    layer = LayerPlacement(((0, FREE), (0, 1)), ((1.0, 0.0), (0.0, 1.0)))
    assert [near.shares(layer) for near in ALL] == [layer, layer]


def test_a_row_goes_near_until_its_node_is_lost():
    placement = Placement(0, 2, 3, (replicas(0.5, 0.5),))
    x_TH, expert_TK = torch.randn(100, 8), torch.zeros(100, 1, dtype=torch.int32)
    for attention in range(4):
        near = Near.of(attention_node(attention), 2)
        own = next(n for n in range(2) if seat(expert_node(n), 2) == seat(attention_node(attention), 2))
        chosen = RouteTable(placement, 2, near=near).layers[0].owners(x_TH, expert_TK)
        assert (chosen == own).all()
        left = RouteTable(placement, 2, without=frozenset({own}), near=near).layers[0].owners(x_TH, expert_TK)
        assert (left == 1 - own).all()
