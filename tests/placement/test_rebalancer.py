"""The rebalancer against simulated traffic: calm under noise, quick after a switch, right after a loss."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.problem import MovePrice, Nodes, Problem
from afserve.placement.placement import FREE
from afserve.placement.rebalance.rebalancer import Action, Rebalancer, RebalanceRules, imbalance, imbalances
from afserve.placement.rebalance.stats import RoutingStats

LAYERS, EXPERTS, TICK = 3, 32, 0.25


def domain(seed: int):
    load = np.random.default_rng(seed).lognormal(0, 1.1, (LAYERS, EXPERTS))
    return load / load.sum(1, keepdims=True)


class Traffic:
    """Rows of a domain, drawn layer by layer; time passes in ticks."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows, self.rng, self.now = rows, np.random.default_rng(seed), 0.0
        self.stats = RoutingStats(LAYERS, EXPERTS)

    def flow(self, share_LE, seconds: float, core: Rebalancer | None = None):
        decisions = []
        for _ in range(int(seconds / TICK)):
            self.now += TICK
            self.stats.merge(np.array([self.rng.multinomial(self.rows, row) for row in share_LE]))
            self.stats.advance_windows(self.now)
            decision = core.decide(self.now, self.stats) if core else None
            if decision and decision.placement is not None:
                core.settle(decision.placement)
            decisions += [decision] if decision else []
        return decisions


def started(rows: int = 20_000, rules: RebalanceRules | None = None, seed: int = 1, slots: int = 40):
    nodes = Nodes.even(4, slots)
    placement = balance(Problem(domain(seed)[None] * 1e6, nodes)).placement(1)
    return Rebalancer(placement, nodes, rules), Traffic(rows)


@pytest.mark.parametrize("rows", [3, 30, 300, 20_000])
def test_noise_moves_nothing(rows):
    core, traffic = started(rows)
    decisions = traffic.flow(domain(1), 90, core)
    assert {d.action for d in decisions} == {Action.STAY}
    assert core.placement.epoch == 1
    assert len(decisions) > 100


def test_a_switch_of_domain_is_followed_within_seconds():
    core, traffic = started()
    traffic.flow(domain(1), 20, core)
    switch = traffic.now
    before = imbalance(core.placement, domain(2), core.nodes)
    decisions = traffic.flow(domain(2), 20, core)
    acted = [d for d in decisions if d.action is not Action.STAY]
    assert before > 1.2
    assert acted[0].now - switch <= 3.0
    good = next(d for d in decisions if imbalance(core.placement, domain(2), core.nodes) < 1.1)
    assert good
    assert imbalance(core.placement, domain(2), core.nodes) < 1.1
    assert sum(d.moves for d in acted) <= 8 * LAYERS * len(acted)
    calm = traffic.flow(domain(2), 30, core)
    assert {d.action for d in calm} == {Action.STAY}


def test_epochs_only_rise_and_every_step_is_a_valid_placement():
    core, traffic = started()
    epochs = [core.placement.epoch]
    for seed in (2, 3, 4):
        for decision in traffic.flow(domain(seed), 12, core):
            if decision.placement is not None:
                epochs.append(decision.placement.epoch)
                assert (decision.placement.nodes, decision.placement.experts) == (4, EXPERTS)
    assert len(epochs) >= 4
    assert all(a < b for a, b in itertools.pairwise(epochs))


def test_nothing_is_decided_while_a_move_is_under_way():
    core, traffic = started()
    traffic.flow(domain(2), 10)
    decision = None
    while decision is None or decision.placement is None:
        traffic.now += 0.5
        decision = core.decide(traffic.now, traffic.stats)
    assert core.decide(traffic.now + 60, traffic.stats) is None
    core.settle(decision.placement)
    assert core.decide(traffic.now + 60, traffic.stats) is not None


def test_an_abandoned_move_leaves_what_stands_and_never_reuses_its_epoch():
    core, traffic = started()
    in_force = core.placement
    decision = next(d for d in traffic.flow(domain(2), 6, core) if d.placement is not None)
    core.settle(in_force)
    assert core.placement is in_force
    later = next(d for d in traffic.flow(domain(2), 6, core) if d.placement is not None)
    assert later.placement.epoch > decision.placement.epoch > in_force.epoch


def lost(core, traffic, node):
    """What is decided when a node has died."""
    nodes = replace(core.nodes, dead=core.nodes.dead | {node})
    return core.replace_nodes(nodes, core.placement, traffic.now, traffic.stats)


def test_a_lost_node_is_answered_at_once_even_during_a_move():
    core, traffic = started(slots=64)
    traffic.flow(domain(1), 5)
    first = lost(core, traffic, 2)
    assert first.action is Action.RESCUE
    assert "3 nodes are to hold the experts" in first.reason
    assert all(set(layer.slots[2]) == {FREE} for layer in first.placement.layers)
    second = lost(core, traffic, 0)
    assert second.placement.epoch > first.placement.epoch
    assert all(set(layer.slots[0]) == set(layer.slots[2]) == {FREE} for layer in second.placement.layers)


def test_a_loss_that_nothing_can_hold_is_said_not_raised():
    core, traffic = started(slots=40)
    traffic.flow(domain(1), 5)
    decision = lost(core, traffic, 2)
    assert decision.placement is None
    assert "30 slots cannot hold 32 experts" in decision.reason
    assert all(d.placement is None for d in traffic.flow(domain(2), 5, core))
    core.nodes = replace(core.nodes, dead=frozenset())
    assert any(d.placement is not None for d in traffic.flow(domain(2), 5, core))


def test_shares_are_tried_before_weights():
    core, traffic = started()
    tilted = domain(1) ** 1.15
    tilted /= tilted.sum(1, keepdims=True)
    decisions = [d for d in traffic.flow(tilted, 10, core) if d.action is not Action.STAY]
    assert all(d.moves == 0 for d in decisions if d.action is Action.SHARES)
    if decisions:
        assert decisions[0].action is Action.SHARES


@pytest.mark.slow
def test_a_dear_move_is_not_made():
    price = MovePrice(expert_bytes=1e15, link_bytes_per_s=1e9)
    core, traffic = started(rules=RebalanceRules(price=price))
    decisions = traffic.flow(domain(2), 15, core)
    assert all(d.moves == 0 for d in decisions)
    assert {d.action for d in decisions} <= {Action.STAY, Action.SHARES}


def test_patience_and_rest_are_told():
    core, traffic = started(rules=RebalanceRules(rest_s=1000.0, patience=3))
    reasons = " | ".join(
        d.reason for d in traffic.flow(domain(2), 4, core) + traffic.flow(domain(3), 6, core)
    )
    assert "check 1 of 3" in reasons
    assert "resting" in reasons
    assert "balanced" in reasons or "reach" in reasons
    assert len(core.decisions) > 5


def test_imbalance_without_rows_is_one():
    core, _ = started()
    assert imbalance(core.placement, np.zeros((LAYERS, EXPERTS)), core.nodes) == 1.0
    assert imbalances(core.placement, domain(1), core.nodes) == pytest.approx(1.0)


def test_imbalance_is_never_below_one():
    """The heaviest node of a perfect balance carries the mean, which is another sum of the same numbers."""
    nodes = Nodes((13, 13, 13))
    for seed in range(20):
        load = np.random.default_rng(seed).poisson(50, (1, LAYERS, EXPERTS)) * 0.93
        placement = balance(Problem(load, nodes)).placement()
        found = imbalances(placement, load[0], nodes)
        assert (found >= 1).all() and found == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_asked_to_replan_it_does_so_whatever_the_balance():
    core, traffic = started(300, RebalanceRules(interval_s=1.0, forced=True, least_gain=0.0))
    decisions = traffic.flow(domain(1), 10, core)
    assert len(decisions) == 10
    assert any(d.placement is not None for d in decisions)
    assert all(d.reason.startswith("asked to re-plan every 1 s, ") for d in decisions)
