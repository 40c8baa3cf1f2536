"""Scenarios, current placements, budgets, prices, dead nodes, protection, memory and time: each wish kept."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ConfigError
from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.problem import MovePrice, Nodes, Problem, TimeModel, scenarios
from afserve.placement.optimizer.split import node_load, split
from afserve.placement.placement import FREE, Placement
from afserve.placement.rebalance.record import read_counts
from bench.eplb import eplb

DATA = (
    Path(__file__).resolve().parents[2].parent
    / "shared"
    / "data"
    / "routing"
    / "olmoe_1b7b_expert_counts.json"
)


def loads(seed, layers=3, experts=20, count=1):
    rng = np.random.default_rng(seed)
    base = rng.lognormal(0, 1, (layers, experts))
    return scenarios(base * rng.lognormal(0, 0.6, (count, layers, experts)) * 1000)


def intact(placement: Placement, problem: Problem) -> None:
    """What the constructor of a Placement does not know: capacity and dead nodes."""
    for layer in placement.layers:
        for node, row in enumerate(layer.slots):
            if problem.memory is None:
                assert len(row) == min(problem.nodes.slots[node], placement.experts)
            if node in problem.nodes.dead:
                assert set(row) <= {FREE}


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_wish_gives_a_valid_placement(data):
    experts, count = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    speed = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=count, max_size=count))
    dead = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    room = sum(min(s, experts) for n, s in enumerate(slots) if n not in dead)
    if room < experts:
        return
    group = tuple(n % 2 for n in range(count))
    nodes = Nodes(tuple(slots), tuple(speed), group, frozenset(dead))
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), experts)
    table = np.array(
        data.draw(st.lists(st.integers(0, 999), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    )
    first = Problem(scenarios(table.reshape(shape)), nodes)
    placement = balance(first).placement(1)
    intact(placement, first)
    moves = data.draw(st.one_of(st.none(), st.integers(0, 6)))
    second = Problem(scenarios(table.reshape(shape)[:, ::-1, ::-1]), nodes, current=placement, moves=moves)
    found = balance(second)
    new = found.placement(2)
    intact(new, second)
    assert placement.diff(new).moves == found.certificate.moves
    assert moves is None or found.certificate.moves <= moves
    assert found.certificate.gap >= -1e-9
    assert found.certificate.gain >= -1e-9


@pytest.mark.parametrize("budget", [0, 1, 5, 20])
def test_a_budget_is_kept_and_more_is_never_worse(budget):
    nodes = Nodes.even(5, 25)
    current = balance(Problem(loads(1), nodes)).placement()
    found = balance(Problem(loads(2), nodes, current=current, moves=budget))
    assert current.diff(found.placement(1)).moves == found.certificate.moves <= budget
    stay = balance(Problem(loads(2), nodes, current=current, moves=0))
    assert sum(found.certificate.max_load) <= sum(stay.certificate.max_load) * (1 + 1e-9)
    assert stay.placement(0).slot_array().tolist() == current.slot_array().tolist()


def test_what_is_balanced_is_not_worth_moving():
    nodes = Nodes.even(5, 25)
    current = balance(Problem(loads(1), nodes)).placement()
    found = balance(Problem(loads(1), nodes, current=current))
    assert not found.certificate.worth_moving
    assert found.certificate.moves == 0
    assert "not worth moving" in found.certificate.reason


@pytest.mark.slow
def test_a_price_decides_between_moving_and_staying():
    nodes = Nodes.even(5, 25)
    current = balance(Problem(loads(1), nodes)).placement()
    cheap = balance(Problem(loads(2), nodes, current=current, price=MovePrice(1e6, 1e10)))
    dear = balance(Problem(loads(2), nodes, current=current, price=MovePrice(1e15, 1e9)))
    assert cheap.certificate.worth_moving
    assert cheap.certificate.moves > 0
    assert not dear.certificate.worth_moving
    assert dear.certificate.moves == 0
    middle = balance(Problem(loads(2), nodes, current=current, price=MovePrice(1.5e10, 1e10)))
    assert middle.certificate.moves < cheap.certificate.moves


def test_a_dead_node_is_emptied_and_its_experts_live_elsewhere():
    nodes = Nodes.even(4, 28)
    current = balance(Problem(loads(1), nodes)).placement()
    alone = {e for e in range(20) if all(n == 2 for n, _, _ in current.layers[0].replicas(e))}
    assert alone
    found = balance(Problem(loads(1), Nodes.even(4, 28, dead=frozenset({2})), current=current, moves=0))
    placement = found.placement(1)
    assert set(placement.layers[0].slots[2]) == {FREE}
    assert found.certificate.moves >= len(alone)
    assert "forced" in found.certificate.reason


@pytest.mark.parametrize("current", [False, True])
def test_protected_experts_survive_any_one_node_and_rack(current):
    nodes = Nodes.even(6, 30, groups=3)
    chosen = frozenset((layer, expert) for layer in range(3) for expert in range(0, 20, 3))
    in_force = balance(Problem(loads(1), nodes)).placement() if current else None
    placement = balance(Problem(loads(1), nodes, protect=chosen, current=in_force)).placement()
    for layer, expert in chosen:
        homes = {node for node, _, _ in placement.layers[layer].replicas(expert)}
        assert len(homes) >= 2
        if not current:
            assert len({nodes.group[n] for n in homes}) >= 2


def test_replicas_of_a_known_load_stand_in_different_racks():
    load = np.random.default_rng(8).lognormal(0, 0.5, (1, 6, 40))
    found = {g: balance(Problem(load, Nodes.even(8, 48, groups=g))) for g in (1, 4)}
    together = {}
    for groups, plan in found.items():
        placement, rack = plan.placement(), Nodes.even(8, 48, groups=4).group
        homes = [{rack[n] for n, _, _ in y.replicas(e)} for y in placement.layers for e in range(40)]
        copies = [len(y.replicas(e)) for y in placement.layers for e in range(40)]
        together[groups] = sum(c > 1 and len(h) == 1 for c, h in zip(copies, homes, strict=True))
        assert plan.certificate.gap == pytest.approx(0.0, abs=1e-9)
    assert together[4] < together[1]
    assert together[4] <= 1


def test_faster_nodes_get_more_rows():
    nodes = Nodes((7, 7, 7, 7), (2.0, 2.0, 1.0, 1.0))
    found = balance(Problem(loads(4), nodes))
    rows = node_load(found.slot_LNS, found.share_LNS, loads(4)[0])
    assert found.certificate.gap < 1e-3
    assert rows[:, 0] == pytest.approx(2 * rows[:, 3], rel=1e-2)


def test_memory_goes_to_the_layers_that_gain():
    load = loads(3, layers=4)
    load[:, 1] = 100.0
    found = balance(Problem(load, Nodes.even(4, 4 * 20), memory=22))
    widths = found.width_LN[:, 0]
    assert widths.sum() <= 22
    assert widths[1] == widths.min()
    assert found.placement().layers[0].slots
    with pytest.raises(ConfigError, match="memory budget of 19"):
        balance(Problem(load, Nodes.even(4, 80), memory=19))


def test_time_model_prefers_whole_experts_when_activation_dominates():
    load, nodes = loads(5), Nodes.even(4, 28)
    row_bound = balance(Problem(load, nodes, time=TimeModel(1e-6, 1e-9, rows=4096)))
    weight_bound = balance(Problem(load, nodes, time=TimeModel(1e-9, 1e-5, rows=64)))
    assert row_bound.certificate.gap < 0.01
    used = (weight_bound.share_LNS > 0).sum()
    assert used <= (row_bound.share_LNS > 0).sum()
    rows_only = balance(Problem(load, nodes))
    from afserve.placement.optimizer.task import BalanceTask

    task = BalanceTask(Problem(load, nodes))
    model = TimeModel(1e-9, 1e-5, rows=64)
    naive = task.step_seconds(rows_only.slot_LNS, rows_only.share_LNS, model).sum()
    assert sum(weight_bound.certificate.seconds) <= naive
    assert sum(weight_bound.certificate.seconds_bound) <= sum(weight_bound.certificate.seconds)


def test_scenarios_are_weighed_and_scaled_alike():
    short, long = loads(1)[0], loads(2)[0] * 1000
    both = scenarios([short, long])
    assert both.sum(2)[0] == pytest.approx(both.sum(2)[1])
    nodes = Nodes.even(5, 30)
    one = balance(Problem(both, nodes, (1.0, 0.0), prior=0.0))
    ratio = node_load(one.slot_LNS, one.share_LNS, both[0])
    assert (ratio.max(1) / ratio.mean(1)).mean() < 1.2


@pytest.mark.skipif(not DATA.exists(), reason="recorded routing is not here")
def test_unseen_domains_are_better_balanced_than_with_eplb():
    table = read_counts(DATA.read_text())
    ours, theirs = [], []
    for unseen, load in table.items():
        seen = scenarios([table[d] for d in table if d != unseen])
        for nodes, slots in ((8, 72), (16, 80), (16, 96), (32, 96), (32, 128)):
            found = balance(Problem(seen, Nodes.even(nodes, slots)))
            level = node_load(found.slot_LNS, split(found.slot_LNS, load, np.ones(nodes)), load)
            ours += list(level.max(1) / level.mean(1))
            peer = node_load(*eplb(seen.mean(0), nodes, slots), load)
            theirs += list(peer.max(1) / peer.mean(1))
    assert np.mean(ours) - 1 < 0.75 * (np.mean(theirs) - 1)
    assert max(ours) - 1 < 0.75 * (max(theirs) - 1)


@pytest.mark.parametrize(
    ("wish", "complaint"),
    [
        ({"nodes": Nodes.even(5, 19)}, "20 experts need at least 20 slots, not 19"),
        ({"nodes": Nodes.even(8, 4)}, "not 4 on 8 live nodes"),
        ({"nodes": Nodes.even(5, 24, dead=frozenset({0}))}, "not 19 on 4 live nodes"),
        ({"moves": 3}, "needs the current placement"),
        ({"current": Placement.contiguous(layers=3, experts=21, nodes=5)}, "another model"),
        ({"current": Placement.contiguous(layers=2, experts=20, nodes=5)}, "another model"),
        ({"current": Placement.contiguous(layers=3, experts=20, nodes=4)}, "for 4 expert nodes, here are 5"),
        ({"current": Placement.contiguous(layers=3, experts=20, nodes=5), "moves": -1}, "0 or more"),
        ({"weight_C": (1.0, 2.0)}, "2 scenario weights for 1"),
        ({"protect": frozenset({(0, 99)})}, "no expert 99 in layer 0"),
        ({"protect": frozenset((0, e) for e in range(20))}, "needs 40 slots"),
    ],
)
def test_wishes_that_cannot_be_kept_are_one_clear_error(wish, complaint):
    asked = {"load_CLE": loads(1), "nodes": Nodes.even(5, 25)} | wish
    with pytest.raises(ConfigError, match=complaint):
        Problem(**asked)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (lambda: Nodes(()), "at least one"),
        (lambda: Nodes((2, -1)), "-1 slots"),
        (lambda: Nodes((2, 2), (1.0,)), "1 values of speed"),
        (lambda: Nodes((2, 2), (1.0, 0.0)), "above 0"),
        (lambda: Nodes((2, 2), dead=frozenset({2})), "dead nodes"),
        (lambda: Nodes.even(0, 4), "at least one"),
        (lambda: Nodes.even(4, 8, groups=5), "5 groups"),
    ],
)
def test_bad_nodes_are_one_clear_error(bad, complaint):
    with pytest.raises(ConfigError, match=complaint):
        bad()


def test_the_placement_file_carries_the_certificate():
    found = balance(Problem(loads(1), Nodes.even(5, 25)))
    raw = json.loads(found.placement(3).to_json())
    assert [y["max_load"] for y in raw["layers"]] == list(found.certificate.max_load)
    assert all(y["lower_bound"] <= y["max_load"] for y in raw["layers"])
