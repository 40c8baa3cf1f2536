"""Where experts go when nodes are lost: survivors untouched, biggest first, always a placement that can be reached."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.placement.migrate import stages
from afserve.placement.placement import FREE, LayerPlacement, Placement
from afserve.placement.recovery import homeless, in_parts, recovered
from tests.work import Calls


@st.composite
def losses(draw):
    """(placement, lost, slots, load_LE): random replicas, random holes, random losses that leave a survivor."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, experts, layers = draw(st.integers(2, 6)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    width = -(-experts // nodes) + draw(st.integers(0, 3))
    tables = [_layer(rng, nodes, experts, width) for _ in range(layers)]
    placement = Placement(int(rng.integers(9)), nodes, experts, tuple(tables))
    lost = frozenset(int(n) for n in rng.permutation(nodes)[: draw(st.integers(1, nodes - 1))])
    load_LE = rng.integers(0, 50, (layers, experts)) * 1.0
    slots = width + draw(st.integers(0, experts))
    return placement, lost, slots, draw(st.sampled_from([None, load_LE]))


def _layer(rng, nodes, experts, width):
    slots = [[FREE] * width for _ in range(nodes)]
    places = [(n, s) for n in range(nodes) for s in range(width)]
    rng.shuffle(places)
    for number, (node, slot) in enumerate(places):
        expert = number if number < experts else int(rng.integers(experts))
        if expert not in slots[node] and (number < experts or rng.random() < 0.6):
            slots[node][slot] = expert
    missing = set(range(experts)) - {e for row in slots for e in row}
    assert not missing
    total = {e: sum(row.count(e) for row in slots) for e in range(experts)}
    share = [[0.0 if e == FREE else 1 / total[e] for e in row] for row in slots]
    return LayerPlacement(tuple(map(tuple, slots)), tuple(map(tuple, share)))


@settings(max_examples=300, deadline=None)
@given(losses())
def test_survivors_keep_what_they_have_and_every_expert_that_fits_is_placed(found):
    placement, lost, slots, load_LE = found
    answer = recovered(placement, lost, slots, load_LE)
    order, homeless = set(answer.order), set(answer.homeless)
    assert not order & homeless and answer.placement.epoch == placement.epoch + 1
    for number, (old, new) in enumerate(zip(placement.layers, answer.placement.layers, strict=True)):
        before = {e for n, row in enumerate(old.slots) for e in row if n not in lost} - {FREE}
        alone = set(range(placement.experts)) - before
        assert {e for layer, e in order | homeless if layer == number} == alone
        unused = 0
        for node, row in enumerate(new.slots):
            if node in lost:
                assert set(row) - {FREE} <= {e for layer, e in homeless if layer == number}
                continue
            for was, held in zip(old.slots[node], row, strict=False):
                gave_way = held in alone and len(old.replicas(was)) > 1
                assert held == was or was == FREE or gave_way
            assert sum(e != FREE for e in row) <= slots
            unused += slots - sum(e != FREE for e in row)
        free_at_first = (slots * (placement.nodes - len(lost))) - sum(
            e != FREE for n, row in enumerate(old.slots) if n not in lost for e in row
        )
        if len(alone) <= free_at_first:  # nobody had to give way
            for node, row in enumerate(old.slots):
                assert node in lost or new.slots[node][: len(row)] == tuple(
                    e if e != FREE else new.slots[node][s] for s, e in enumerate(row)
                )
        if any(layer == number for layer, _ in homeless):
            assert unused == 0 and all(
                len([n for n, _, _ in new.replicas(e) if n not in lost]) == 1 for e in before
            )


@settings(max_examples=200, deadline=None)
@given(losses())
def test_rows_that_a_loss_does_not_concern_stay_the_same_objects(found):
    """Thousands of streams say what has changed: a share that is rounded anew would be said too."""
    placement, lost, slots, load_LE = found
    answer = recovered(placement, lost, slots, load_LE)
    if slots > placement.slots_per_node() or answer.homeless:
        return
    for old, new in zip(placement.layers, answer.placement.layers, strict=True):
        concerned = {e for n in lost for e in old.slots[n]} - {FREE}
        concerned |= {e for was, row in zip(old.slots, new.slots, strict=True) for e in {*was} ^ {*row}}
        for node, row in enumerate(old.slots):
            if node not in lost and not concerned & {*row, *new.slots[node]}:
                assert new.slots[node] is row and new.share[node] is old.share[node]


@settings(max_examples=200, deadline=None)
@given(losses())
def test_the_order_is_biggest_first_and_the_placement_can_be_reached(found):
    placement, lost, slots, load_LE = found
    answer = recovered(placement, lost, slots, load_LE)
    if load_LE is not None and load_LE.sum(1).all():
        part_LE = load_LE / load_LE.sum(1, keepdims=True)
        parts = [part_LE[at] for at in answer.order]
        assert parts == sorted(parts, reverse=True)
    last = [placement, *stages(placement, answer.placement, slots)][-1]
    for got, want in zip(last.layers, answer.placement.layers, strict=True):
        assert [set(row) - {FREE} for row in got.slots] == [set(row) - {FREE} for row in want.slots]


@settings(max_examples=100, deadline=None)
@given(losses(), st.integers(1, 5))
def test_parts_bring_the_biggest_back_first_and_lead_to_the_whole(found, most):
    placement, lost, slots, load_LE = found
    answer = recovered(placement, lost, slots, load_LE)
    parts = in_parts(placement, answer, most)
    assert parts[-1] == answer.placement and len(parts) == max(1, -(-len(answer.order) // most))
    alive = frozenset(range(placement.nodes)) - lost
    at = placement
    for number, part in enumerate(parts):
        there = answer.order[: most * (number + 1)]
        assert set(homeless(part, alive)) == set(answer.order) - set(there) | set(answer.homeless)
        at = [at, *stages(at, part, slots)][-1]
        assert set(homeless(at, alive)) == set(homeless(part, alive))


def test_experts_go_to_the_survivor_with_the_least_load():
    rows = ((0, 1, FREE, FREE), (2, FREE, FREE, FREE), (3, 4, FREE, FREE))
    share = tuple(tuple(float(e != FREE) for e in row) for row in rows)
    placement = Placement(3, 3, 5, (LayerPlacement(rows, share),))
    answer = recovered(placement, frozenset({2}), 4, np.array([[5.0, 5.0, 4.0, 9.0, 2.0]]))
    assert answer.order == ((0, 3), (0, 4))
    assert answer.placement.layers[0].slots == ((0, 1, 4, FREE), (2, 3, FREE, FREE), (FREE,) * 4)


def test_a_spare_replica_gives_way_and_its_rows_go_to_the_others():
    rows = ((0, 1), (0, 2), (3, 1))
    share = ((0.25, 0.5), (0.75, 1.0), (1.0, 0.5))
    placement = Placement(0, 3, 4, (LayerPlacement(rows, share),))
    answer = recovered(placement, frozenset({2}), 2, np.array([[40.0, 10.0, 10.0, 20.0]]))
    (layer,) = answer.placement.layers
    assert layer.slots == ((3, 1), (0, 2), (FREE, FREE))
    assert layer.share == ((1.0, 1.0), (1.0, 1.0), (0.0, 0.0)) and not answer.homeless


def test_what_finds_no_room_is_named_and_stays_valid():
    placement = Placement.contiguous(layers=2, experts=4, nodes=2)
    answer = recovered(placement, frozenset({1}), 3)
    assert answer.order == ((0, 2), (1, 2)) and answer.homeless == ((0, 3), (1, 3))
    assert answer.placement.layers[0].slots == ((0, 1, 2), (FREE, 3, FREE))


@pytest.mark.parametrize("lost", [frozenset({3}), frozenset(range(8, 16))])
def test_a_large_model_is_recovered_in_a_fraction_of_a_second(lost):
    """58 layers of 256 experts on 144 nodes: what is looked at grows with them, not with pairs of them."""
    placement = Placement.contiguous(layers=58, experts=256, nodes=144, slots_per_node=3)
    load_LE = np.random.default_rng(0).zipf(1.6, (58, 256)).clip(max=1000) * 1.0
    with Calls() as calls:
        answer = recovered(placement, lost, 3, load_LE)
    assert not answer.homeless and calls.made < 10 * 58 * 256
