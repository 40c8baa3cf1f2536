import numpy as np
import pytest

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.problem import Nodes, Problem, scenarios
from afserve.placement.optimizer.split import count_replicas
from afserve.placement.optimizer.uncertainty import uncertainty, with_unseen


def drawn(seed: int, count: int, layers: int = 6, experts: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 1, (count, layers, experts))


def test_one_scenario_says_little_of_the_next() -> None:
    assert uncertainty(drawn(0, 1)) == pytest.approx(4.0)


def test_scenarios_that_agree_are_trusted_and_those_that_do_not_are_not() -> None:
    base = drawn(1, 1)
    alike = scenarios(base * np.random.default_rng(2).lognormal(0, 0.1, (3, *base.shape[1:])))
    apart = scenarios(drawn(3, 3))
    assert uncertainty(alike) < 0.2 < 2.0 < uncertainty(apart)
    assert uncertainty(np.repeat(base, 3, 0)) < uncertainty(alike)


@pytest.mark.parametrize("load_CLE", [np.zeros((2, 3, 4)), np.ones((2, 3, 4)), np.ones((1, 3, 4))])
def test_loads_without_skew_or_rows_give_a_finite_weight(load_CLE: np.ndarray) -> None:
    assert 0 <= uncertainty(load_CLE) <= 100


def test_the_unseen_weighs_what_it_is_said_to() -> None:
    load_CLE = drawn(4, 2)
    wary_CLE, wary_C = with_unseen(load_CLE, np.array([0.5, 0.5]), 3.0)
    assert wary_C.sum() == pytest.approx(1.0)
    assert wary_C[-1] == pytest.approx(0.75)
    assert np.ptp(wary_CLE[-1], axis=1) == pytest.approx(0.0)


def test_in_doubt_every_node_gets_as_many_experts_that_no_split_can_shift() -> None:
    nodes, slots, experts = 8, 48, 32
    placed = balance(Problem(drawn(5, 1), Nodes.even(nodes, slots), prior=4.0))
    copies_LE = count_replicas(placed.slot_LNS, experts)
    layer = np.arange(len(copies_LE))[:, None, None]
    whole_LN = (copies_LE[layer, placed.slot_LNS] == 1).sum(2)
    assert int(np.ptp(whole_LN, axis=1).max()) <= 1


def test_scenarios_that_agree_are_placed_nearly_as_well_as_a_known_load() -> None:
    base = drawn(6, 1)
    alike = scenarios(np.repeat(base, 3, 0))
    placed = balance(Problem(alike, Nodes.even(8, 48)))
    level = np.array(placed.certificate.max_load) / (base[0].sum(1) / 8)
    assert float(level.mean()) < 1.1
