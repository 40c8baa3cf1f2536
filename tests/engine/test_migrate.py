"""Stages from one placement to another: always valid, never overwriting, always arriving."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ConfigError
from afserve.placement.migrate import fills, stages
from afserve.placement.placement import FREE, LayerPlacement, Placement


def random_placement(rng, nodes, experts, slots, layers, epoch=0):
    def layer():
        rows: list[list[int]] = [[] for _ in range(nodes)]
        for expert in rng.sample(range(experts), experts):
            open_nodes = [r for r in rows if len(r) < slots]
            rng.choice(open_nodes).append(expert)
        for row in rows:
            while len(row) < slots and rng.random() < 0.6:
                extra = rng.randrange(experts)
                if extra not in row:
                    row.append(extra)
        count = {e: sum(e in row for row in rows) for e in range(experts)}
        padded = [row + [FREE] * (slots - len(row)) for row in rows]
        share = [[0.0 if e == FREE else 1 / count[e] for e in row] for row in padded]
        return LayerPlacement(tuple(map(tuple, padded)), tuple(map(tuple, share)))

    return Placement(epoch, nodes, experts, tuple(layer() for _ in range(layers)))


def replicas(placement):
    return [[{e for e in row if e != FREE} for row in layer.slots] for layer in placement.layers]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_stages_arrive_and_never_overwrite(seed, nodes, experts, layers):
    rng = random.Random(seed)
    slots = -(-experts // nodes) + 1
    old = random_placement(rng, nodes, experts, slots, layers, epoch=5)
    target = random_placement(rng, nodes, experts, slots, layers)
    spare = slots + 1
    current = old
    for count, stage in enumerate(stages(old, target, spare)):
        fills(current, stage)  # raises if a slot in use were overwritten; Placement itself checks the rest
        assert stage.epoch == current.epoch + 1
        current = stage
        assert count < 4 * experts + 4, "does not arrive"
    assert replicas(current) == replicas(target)
    for layer, goal in zip(current.layers, target.layers, strict=True):
        for expert in range(experts):
            got = {(n, round(s, 9)) for n, _, s in layer.replicas(expert)}
            assert got == {(n, round(s, 9)) for n, _, s in goal.replicas(expert)}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_a_difference_leads_from_one_placement_to_the_other(seed, nodes, experts, layers):
    rng = random.Random(seed)
    slots = -(-experts // nodes) + 1
    old, new = (random_placement(rng, nodes, experts, slots, layers) for _ in range(2))
    diff = old.diff(new)
    held = {(layer, node, slot): e for node in range(nodes) for layer, slot, e in old.held(node)}
    for fill in diff.fills:
        assert held.get((fill.layer, fill.node, fill.slot), FREE) == fill.replaced
        held[fill.layer, fill.node, fill.slot] = fill.expert
    for node in range(nodes):
        assert all(held[layer, node, slot] == e for layer, slot, e in new.held(node))
    before, after = replicas(old), replicas(new)
    came = [will - was for pair in zip(before, after) for was, will in zip(*pair)]
    assert diff.moves == sum(map(len, came))


def test_no_change_is_no_stage():
    plan = Placement.contiguous(layers=2, experts=5, nodes=2)
    assert list(stages(plan, plan, 4)) == []


def test_two_nodes_swap_through_their_spare_slots():
    old = Placement.contiguous(layers=1, experts=2, nodes=2)
    swapped = Placement(0, 2, 2, (LayerPlacement(((1,), (0,)), ((1.0,), (1.0,))),))
    (stage,) = stages(old, swapped, 2)
    assert stage.layers[0].slots == ((FREE, 1), (FREE, 0))
    assert len(fills(old, stage)) == 2
    with pytest.raises(ConfigError, match="still holds"):
        fills(old, swapped)


def test_a_way_without_a_spare_slot_is_refused():
    old = Placement.contiguous(layers=1, experts=2, nodes=2)
    swapped = Placement(0, 2, 2, (LayerPlacement(((1,), (0,)), ((1.0,), (1.0,))),))
    with pytest.raises(ConfigError, match="node 0: no slot comes free for expert 1"):
        list(stages(old, swapped, 1))


def test_refusals():
    old = Placement.contiguous(layers=1, experts=4, nodes=2)
    with pytest.raises(ConfigError, match="cannot follow"):
        list(stages(old, Placement.contiguous(layers=1, experts=4, nodes=4), 3))
    with pytest.raises(ConfigError, match="needs 2 slots on a node, there are 1"):
        list(stages(old, old, 1))
    swapped = Placement(1, 2, 4, (LayerPlacement(((2, 3), (0, 1)), ((1.0, 1.0), (1.0, 1.0))),))
    with pytest.raises(ConfigError, match="still holds expert 0 in epoch 0"):
        fills(old, swapped)
