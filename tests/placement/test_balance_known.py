"""One known load: the bound against exhaustive search, the exact packing, the split of traffic, and EPLB."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.bound import lower_bound
from afserve.placement.optimizer.packing import pack
from afserve.placement.optimizer.problem import Nodes, Problem, scenarios
from afserve.placement.optimizer.split import _mirror, count_replicas, node_load, split
from afserve.placement.placement import FREE
from bench.eplb import eplb


def hall(slots, load, pace):
    """The optimal largest level of a fixed placement: the worst set of experts over the nodes that hold any of it."""
    where = [{n for n, row in enumerate(slots) if e in row} for e in range(len(load))]
    worst = 0.0
    for size in range(1, len(load) + 1):
        for experts in itertools.combinations(range(len(load)), size):
            nodes = set().union(*(where[e] for e in experts))
            worst = max(worst, sum(load[e] for e in experts) / sum(pace[n] for n in nodes))
    return worst


def exhaustive(load, room, pace):
    """The best of all placements, by trying them."""
    choices = [list(itertools.combinations(range(len(load)), min(width, len(load)))) for width in room]
    best = np.inf
    for slots in itertools.product(*choices):
        if len(set().union(*map(set, slots))) == len(load):
            best = min(best, hall(slots, load, pace))
    return best


def level(found, load_LE, nodes):
    return (node_load(found.slot_LNS, found.share_LNS, load_LE) / nodes.pace())[
        :, nodes.usable_slots() > 0
    ].max(1)


CASES = [
    ((2, 2), (1.0, 1.0), 4),
    ((2, 2), (1.0, 1.0), 3),
    ((3, 3), (1.0, 1.0), 4),
    ((2, 2, 2), (1.0, 1.0, 1.0), 5),
    ((2, 2, 2), (1.0, 1.0, 1.0), 3),
    ((1, 1, 1, 1), (1.0, 1.0, 1.0, 1.0), 3),
    ((1, 3), (1.0, 1.0), 3),
    ((2, 3), (1.0, 2.0), 4),
    ((2, 2, 1), (1.0, 0.5, 2.0), 4),
    ((3, 1, 2), (1.0, 1.0, 1.0), 5),
]


@pytest.mark.parametrize(("room", "speed", "experts"), CASES)
@pytest.mark.parametrize("seed", range(6))
def test_bound_is_below_and_plan_near_the_exhaustive_optimum(room, speed, experts, seed):
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0.0, (0.3, 1.0, 2.5)[seed % 3], experts).round(2) * (rng.random(experts) > 0.15)
    nodes = Nodes(room, speed)
    best = exhaustive(load, room, nodes.pace())
    bound = lower_bound(load[None], nodes.usable_slots(), nodes.pace())[0]
    reached = level(balance(Problem(load[None, None], nodes)), load[None], nodes)[0]
    assert bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= reached <= best * 1.08 + 1e-12


@given(st.integers(2, 9), st.integers(2, 6), st.data())
@settings(max_examples=120, deadline=None)
def test_a_spare_slot_per_node_is_always_enough_for_perfect_balance(nodes, width, data):
    experts = data.draw(st.integers(1, nodes * (width - 1)))
    load = np.array(
        data.draw(st.lists(st.integers(0, 10_000), min_size=experts, max_size=experts)), dtype=float
    )
    slot, share, exact = pack(load[None], np.full(nodes, width), np.ones(nodes))
    assert exact.all()
    assert node_load(slot, share, load[None])[0] == pytest.approx(load.sum() / nodes, rel=1e-9, abs=1e-9)
    for row in slot[0]:
        held = row[row != FREE]
        assert len(set(held)) == len(held)
    total = np.bincount(slot[slot != FREE], weights=share[slot != FREE], minlength=experts)
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(8))
def test_split_is_optimal(seed):
    rng = np.random.default_rng(seed)
    nodes, experts = 4, 6
    slots = [tuple(rng.permutation(experts)[:3]) for _ in range(nodes)]
    slots = [tuple(sorted({*row, e})) for row, e in zip(slots, [*range(4)], strict=True)]
    slots += [(4, 5)]
    load, pace = rng.lognormal(0, 1.5, experts), rng.uniform(0.5, 2.0, 5)
    table = np.full((1, 5, 4), FREE)
    for node, row in enumerate(slots):
        table[0, node, : len(row)] = row
    share = split(table, load[None], pace)
    reached = (node_load(table, share, load[None]) / pace).max()
    assert reached == pytest.approx(hall(slots, load, pace), rel=1e-5)
    rough = _mirror(table, load[None], pace, count_replicas(table, experts))
    assert (node_load(table, rough, load[None]) / pace).max() <= reached * 1.05


def test_split_is_the_least_squares_point_too():
    table = np.array([[[0, 1], [1, 2], [2, 0]]])
    share = split(table, np.array([[6.0, 3.0, 3.0]]), np.ones(3))
    assert node_load(table, share, np.array([[6.0, 3.0, 3.0]]))[0] == pytest.approx([4.0, 4.0, 4.0], abs=1e-4)


def test_risk_pulls_the_shares_together():
    table = np.array([[[0, 1], [0, FREE]]])
    load = np.array([[4.0, 2.0]])
    plain = split(table, load, np.ones(2))[0, :, 0]
    wary = split(table, load, np.ones(2), np.array([[10.0, 0.0]]))[0, :, 0]
    assert plain == pytest.approx([0.25, 0.75], abs=1e-4)
    assert 0.25 < wary[0] < 0.5


@pytest.mark.parametrize(("nodes", "slots"), [(4, 16), (4, 18), (4, 20), (8, 24), (3, 17)])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0])
def test_never_worse_than_eplb(nodes, slots, sigma):
    rng = np.random.default_rng(5)
    load_LE = rng.lognormal(0.0, sigma, (6, 16))
    if slots % nodes:
        return
    pool = Nodes.even(nodes, slots)
    ours = level(balance(Problem(load_LE[None], pool)), load_LE, pool)
    theirs = node_load(*eplb(load_LE, nodes, slots), load_LE).max(1)
    assert (ours <= theirs * (1 + 1e-9)).all()


@pytest.mark.parametrize("load", [np.zeros((2, 8)), np.eye(1, 8) * 1000, np.eye(8)[:3] * 7])
def test_extreme_loads_still_give_a_valid_placement(load):
    for slots in (8, 10, 12, 24):
        found = balance(Problem(scenarios(load), Nodes.even(4, slots)))
        placement = found.placement()
        assert placement.experts == 8
        assert found.certificate.gap >= 0


@pytest.mark.slow
def test_the_same_problem_gives_the_same_answer():
    load = np.random.default_rng(1).lognormal(0, 1, (3, 20))
    first, second = (balance(Problem(scenarios(load), Nodes.even(5, 22))) for _ in range(2))
    assert (first.slot_LNS == second.slot_LNS).all()
    assert (first.share_LNS == second.share_LNS).all()


@pytest.mark.parametrize(
    ("loads", "complaint"),
    [
        ([[1, 2], [3]], "ragged"),
        ([[1, -2]], "layer 0, expert 1 are -2"),
        ([[1, float("nan")]], "nan"),
        ([[float("inf"), 1]], "inf"),
        ([1, 2], "shape"),
        ([], "shape"),
        ([["a", "b"]], "ragged or not numbers"),
    ],
)
def test_bad_counts_are_one_clear_error(loads, complaint):
    from afserve.errors import ConfigError

    with pytest.raises(ConfigError, match=complaint):
        scenarios(loads)


@pytest.mark.parametrize("broken", ["singular", "not a number"])
def test_shares_are_whole_where_rounding_leaves_no_step_to_take(broken, monkeypatch):
    """As it is with loads that differ by many powers of ten."""

    def solve(system, right):
        if broken == "singular":
            raise np.linalg.LinAlgError("Singular matrix")
        return np.full_like(right, np.nan)

    monkeypatch.setattr(np.linalg, "solve", solve)
    table = np.array([[[0, 1], [0, 2], [1, 2]]])
    share = split(table, np.array([[6.0, 3.0, 3.0]]), np.ones(3))
    whole = [share[table == expert].sum() for expert in range(3)]
    assert whole == pytest.approx([1.0, 1.0, 1.0]) and (share >= 0.0).all()
