import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.current import count_moves
from afserve.placement.optimizer.exchange import applies, exchanged
from afserve.placement.optimizer.problem import Ints, Nodes, Problem, scenarios


def in_force(layers: int, nodes: int, width: int) -> Ints:
    return np.tile(np.arange(nodes * width).reshape(nodes, width), (layers, 1, 1))


def fullest(slot_LNS: Ints, load_LE: np.ndarray) -> float:
    layer = np.arange(len(slot_LNS))[:, None, None]
    return float(load_LE[layer, slot_LNS].sum(2).max(1).sum())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_every_expert_stays_placed_once_and_the_budget_holds(
    layers: int, nodes: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    slot_LNS, load_LE = in_force(layers, nodes, width), rng.lognormal(0, 1, (layers, nodes * width))
    budgets = [0, 2, 5, layers * nodes * width]
    before = fullest(slot_LNS, load_LE)
    for budget, found in zip(budgets, exchanged(slot_LNS, load_LE, budgets), strict=True):
        assert (np.sort(found.reshape(layers, -1), axis=1) == np.arange(nodes * width)).all()
        assert count_moves(slot_LNS, found, nodes * width).sum() <= budget
        assert fullest(found, load_LE) <= before + 1e-9
        before = fullest(found, load_LE)


@pytest.mark.slow
def test_small_budgets_are_spent_as_well_as_exhaustive_search_would() -> None:
    nodes, width = 3, 2
    gaps = []
    for seed in range(12):
        load_LE = np.random.default_rng(seed).lognormal(0, 1, (1, nodes * width))
        slot_LNS = in_force(1, nodes, width)
        for budget, found in zip((2, 3, 4), exchanged(slot_LNS, load_LE, [2, 3, 4]), strict=True):
            best = min(
                fullest(every, load_LE)
                for order in itertools.permutations(range(nodes * width))
                for every in [np.array(order).reshape(1, nodes, width)]
                if count_moves(slot_LNS, every, nodes * width).sum() <= budget
            )
            gaps.append(fullest(found, load_LE) / best - 1)
    assert np.mean(np.array(gaps) < 1e-9) > 0.9
    assert max(gaps) < 0.1


def test_a_ring_of_three_costs_three_moves() -> None:
    load_LE = np.array(
        [[6.0, 3.0, 5.0, 1.0, 4.0, 2.0]]
    )  # 9, 6, 6: only a ring levels it without a fourth move
    (found,) = exchanged(in_force(1, 3, 2), load_LE, [3])
    assert count_moves(in_force(1, 3, 2), found, 6).sum() <= 3
    assert fullest(found, load_LE) == pytest.approx(7.0)


def test_it_is_not_for_replicas_free_slots_or_unequal_nodes() -> None:
    slot_LNS, load_LE = in_force(1, 2, 3), np.ones((1, 6))
    even, room = np.ones(2), np.array([3, 3])
    assert applies(slot_LNS, load_LE, room, even)
    assert not applies(slot_LNS, np.ones((1, 5)), room, even)
    assert not applies(slot_LNS, load_LE, np.array([3, 4]), even)
    assert not applies(slot_LNS, load_LE, room, np.array([1.0, 2.0]))
    holed = slot_LNS.copy()
    holed[0, 0, 0] = -1
    assert not applies(holed, load_LE, room, even)


@pytest.mark.slow
def test_the_optimizer_uses_it_where_every_slot_is_taken() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.lognormal(0, 1, (2, 3, 32))
    nodes = Nodes.even(4, 32)
    first = balance(Problem(scenarios(old), nodes)).placement()
    found = balance(Problem(scenarios(new), nodes, current=first, moves=18))
    assert found.certificate.moves <= 18
    assert float(np.mean(np.array(found.certificate.max_load) / (new.sum(1) / 4))) < 1.06
