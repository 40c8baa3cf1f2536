"""M2N against an oracle that computes every expert in place: any A:F, replicas, wire type, order, number of rows."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.m2n.bank import LocalBankLink
from afserve.comm.transport import WireType
from afserve.placement.placement import FREE, LayerPlacement, Placement

EXPERTS, LAYERS = 8, 2


@st.composite
def placements(draw):
    """Every expert on one or more nodes, with uneven shares; free slots between."""
    nodes = draw(st.integers(1, 4))
    layers = []
    for _ in range(LAYERS):
        homes = [draw(st.sets(st.integers(0, nodes - 1), min_size=1)) for _ in range(EXPERTS)]
        slots, share = [], []
        for node in range(nodes):
            held = [e for e in range(EXPERTS) if node in homes[e]]
            row = draw(st.permutations(held + [FREE] * (9 - len(held))))
            slots.append(tuple(row))
            share.append(tuple(0.0 if e == FREE else 1.0 / len(homes[e]) for e in row))
        layers.append(LayerPlacement(tuple(slots), tuple(share)))
    return Placement(draw(st.integers(0, 5)), nodes, EXPERTS, tuple(layers))


@pytest.mark.slow
@given(placement=placements(), attention=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=40, deadline=None)
def test_sums_are_the_oracles(open_cluster, placement, attention, seed, data):
    cluster = open_cluster("local", attention, placement)
    flying = []
    for a, m in itertools.product(range(attention), range(2)):
        layer, rows = data.draw(st.integers(0, LAYERS - 1)), data.draw(st.integers(0, 8))
        batch = cluster.rows(rows, seed + 10 * a + m)
        flying.append((a, layer, batch, cluster.links[a].dispatch(*batch, layer=layer, micro_batch=m)))
    for a, layer, batch, ticket in data.draw(st.permutations(flying)):
        y_TH = cluster.finish(cluster.links[a], ticket)
        assert torch.equal(y_TH, cluster.expected(layer, *batch))
    cluster.close()


@pytest.mark.parametrize("kind", ["local", "shm"])
@pytest.mark.parametrize("wire", [WireType.FLOAT32, WireType.BFLOAT16, WireType.FLOAT16])
def test_wire_types(build_cluster, kind, wire):
    cluster = build_cluster(kind, 2, wire=wire)
    for a in range(2):
        batch = cluster.rows(5, a)
        ticket = cluster.links[a].dispatch(*batch, layer=1, micro_batch=0)
        assert torch.equal(cluster.finish(cluster.links[a], ticket), cluster.expected(1, *batch))


def test_all_rows_to_one_node_leaves_the_other_alone(build_cluster):
    cluster = build_cluster()
    x_TH, _, weight_TK = cluster.rows(6, 1)
    expert_TK = torch.tensor([[0, 1, 2]] * 6, dtype=torch.int32)
    ticket = cluster.links[0].dispatch(x_TH, expert_TK, weight_TK, layer=0, micro_batch=0)
    assert torch.equal(
        cluster.finish(cluster.links[0], ticket), cluster.expected(0, x_TH, expert_TK, weight_TK)
    )
    assert [len(bank.calls) for bank in cluster.banks] == [1, 0]


def test_no_rows_is_answered_without_a_message(build_cluster):
    cluster = build_cluster()
    ticket = cluster.links[0].dispatch(*cluster.rows(0, 1), layer=0, micro_batch=0)
    assert cluster.links[0].ready(ticket)
    assert cluster.links[0].combine(ticket).shape == (0, 8)
    assert not any(bank.calls for bank in cluster.banks)


def test_a_choice_of_no_expert_adds_nothing(build_cluster):
    cluster = build_cluster()
    x_TH, expert_TK, weight_TK = cluster.rows(4, 1)
    expert_TK[1] = -1
    expert_TK[2, 1] = -1
    ticket = cluster.links[0].dispatch(x_TH, expert_TK, weight_TK, layer=0, micro_batch=0)
    y_TH = cluster.finish(cluster.links[0], ticket)
    expected_TH = cluster.expected(0, x_TH, expert_TK, weight_TK)
    assert torch.equal(y_TH, expected_TH)
    assert not y_TH[1].any()


def test_who_refuses_an_epoch_is_asked_again_once_it_is_dialled_anew(build_cluster):
    """An attention node that the others have gone on without is not ended by that."""
    cluster = build_cluster()
    link, batch = cluster.links[0], cluster.rows(3, 1)
    link.adopt(cluster.placement.with_epoch(7))
    ticket = link.dispatch(*batch, layer=0, micro_batch=0)
    for _ in range(4):
        assert not link.ready(ticket)
        cluster.turn()
    assert link.present == frozenset() and link.recovery().given_up_rows == 0
    for node in cluster.nodes:
        node.accept(7)
    for expert, address in enumerate(cluster.addresses):
        link.attach(link.dial(expert, address, 1.0))
    assert torch.equal(cluster.finish(link, ticket), cluster.expected(0, *batch))


def test_one_of_two_that_refuses_keeps_what_the_other_has_answered(build_cluster):
    cluster = build_cluster()
    link, batch = cluster.links[0], cluster.rows(6, 1)
    cluster.nodes[1].retire(0)
    ticket = link.dispatch(*batch, layer=0, micro_batch=0)
    for _ in range(4):
        assert not link.ready(ticket)
        cluster.turn()
    assert link.present == {0}
    cluster.nodes[1].accept(0)
    link.attach(link.dial(1, cluster.addresses[1], 1.0))
    assert torch.equal(cluster.finish(link, ticket), cluster.expected(0, *batch))
    assert cluster.nodes[0].stats().messages == 1, "it was asked once"


def test_who_refuses_for_too_long_is_named_at_the_deadline(build_cluster):
    cluster = build_cluster(options={"deadline": 2.0})
    link = cluster.links[0]
    link.adopt(cluster.placement.with_epoch(7))
    ticket = link.dispatch(*cluster.rows(3, 1), layer=0, micro_batch=0)
    assert torch.isnan(cluster.finish(link, ticket, seconds=0.1)).all()
    assert "routed under epoch 7" in link.take_given_up(0)[0]


def test_who_owes_an_answer_is_named_at_the_deadline(build_cluster):
    cluster = build_cluster(options={"deadline": 2.0})
    x_TH, expert_TK, weight_TK = cluster.rows(4, 1)
    expert_TK[0] = torch.tensor([0, 1, 3])
    batch = x_TH, expert_TK, weight_TK
    ticket = cluster.links[0].dispatch(*batch, layer=1, micro_batch=1)
    cluster.nodes[0].poll()
    cluster.links[0].wait([ticket], 0.0)
    link = cluster.links[0]
    assert not link.ready(ticket) and link.owing() == {1: 0.0}
    cluster.clock.advance(2.5)
    assert link.owing() == {1: 2.5}
    link.wait([ticket], 0.0)
    assert link.ready(ticket) and link.owing() == {}
    y_TH, late_T = link.combine(ticket), (expert_TK >= 4).any(1)
    assert late_T.any() and not late_T.all()
    assert torch.isnan(y_TH).all(1).tolist() == late_T.tolist()
    assert torch.equal(y_TH[~late_T], cluster.expected(1, *batch)[~late_T])
    why = link.take_given_up(1)
    assert sorted(why) == late_T.nonzero()[:, 0].tolist()
    assert all(re.fullmatch(r"expert-1 did not answer for expert [4-7] within 2 s", w) for w in why.values())
    assert link.take_given_up(1) == {} and link.recovery().given_up_rows == len(why)
    ticket = link.dispatch(*batch, layer=1, micro_batch=1)  # its late answer is not taken for the next one's
    assert torch.equal(cluster.finish(link, ticket), cluster.expected(1, *batch))


def test_a_closed_node_is_named(build_cluster):
    cluster = build_cluster()
    ticket = cluster.links[0].dispatch(*cluster.rows(4, 1), layer=1, micro_batch=1)
    cluster.nodes[0].poll()
    cluster.nodes[1].close()
    link = cluster.links[0]
    link.wait([ticket], 1.0)
    assert not link.ready(ticket) and link.owing() == {}
    cluster.clock.advance(30.0)
    assert link.ready(ticket) and torch.isnan(link.combine(ticket)).any()
    assert "expert-1: it has closed its transport" in next(iter(link.take_given_up(1).values()))


def test_fp8_rows_are_close_and_scaled_per_block():
    from afserve.comm.mailbox.fp8 import dequantise, quantise

    generator = torch.Generator().manual_seed(1)
    x_RH = torch.randn(5, 300, generator=generator) * torch.tensor([1e-4, 1.0, 30.0, 1e4, 0.0])[:, None]
    value_RH, scale_RS = torch.empty(5, 300, dtype=torch.float8_e4m3fn), torch.empty(5, 3)
    quantise(x_RH, value_RH, scale_RS)
    back_RH = dequantise(value_RH, scale_RS)
    block = torch.stack([part.abs().amax(1) for part in x_RH.split(128, dim=1)], dim=1)
    bound_RH = block.repeat_interleave(128, dim=1)[:, :300] / 448 * 16 + x_RH.abs() / 15
    assert ((back_RH - x_RH).abs() <= bound_RH).all()
    assert not back_RH[4].any()


def test_a_bank_in_process_is_the_same_kind_of_link(build_cluster):
    cluster = build_cluster()
    link = LocalBankLink(cluster.oracle)
    batch = cluster.rows(5, 3)
    ticket = link.dispatch(*batch, layer=1, micro_batch=0)
    link.wait([ticket], 0.0)
    assert link.ready(ticket)
    assert torch.equal(link.combine(ticket), cluster.expected(1, *batch))
