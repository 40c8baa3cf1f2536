"""Balancing while expert nodes come and go and controllers are lost: whatever the order, thinking about it ends well.

Nothing is a process: `Run` obeys placements as correct nodes would, at once or not before the next mishap.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.control.membership.balancing import BalanceRules, Balancing
from afserve.control.membership.migration import Migration, Phase
from afserve.errors import ConfigError
from afserve.member import NodeId, Role, expert_node
from afserve.placement.optimizer.problem import unthrottled
from afserve.placement.placement import Placement
from afserve.placement.rebalance.stats import RoutedRows

LAYERS, EXPERTS = 2, 6


class Run:
    """One attention node and some expert nodes, of which `here` serve and `leaving` are to go."""

    def __init__(self, seed, nodes, slots, spare, copies):
        self.dice, self.now = random.Random(seed), 0.0
        self.here, self.leaving = set(range(nodes)), set()
        self.start = Placement.contiguous(layers=LAYERS, experts=EXPERTS, nodes=nodes, slots_per_node=slots)
        self.rules = BalanceRules(act=True, every=0.5, copies=copies, spare=spare)
        self.migration = Migration(self.start, self.serving)
        self.balancing = self.balanced()

    def balanced(self):
        balancing = Balancing("m", self.migration, self.rules, self.holders)
        balancing._rebalancer._throttle = unthrottled  # it shares its core with nobody here
        return balancing

    def serving(self, role):
        return [NodeId(role, n) for n in sorted(self.here if role is Role.EXPERT else {0})]

    def holders(self):
        return frozenset(self.here - self.leaving)

    def follow(self, place):
        """Everyone answers what the way there asks, unless it stops half way."""
        if place is None or (place.nodes is not None and place.nodes != self.holders()):
            return
        try:
            self.migration.begin_move(place.placement, self.now, place.route)
        except ConfigError:
            return
        while self.migration.phase is not Phase.STEADY and self.dice.random() < 0.97:
            self.answer()

    def answer(self):
        node, epoch = self.migration.unanswered[0], self.migration.placements[1].epoch
        filling = self.migration.phase is Phase.FILLING
        (self.migration.filled if filling else self.migration.adopted)(node, epoch, self.now)

    def settle(self):
        while self.migration.phase is not Phase.STEADY:
            self.answer()

    def replan(self):
        """As the membership asks where those that hold experts are not those that are to."""
        if not self.migration.steady or not self.holders():
            return
        lost = self.migration.holding - self.here
        try:
            if lost:
                self.follow(self.balancing.plan_without(lost, self.holders(), self.now))
            else:
                self.follow(self.balancing.plan_over(self.holders(), self.now))
        except ConfigError:
            return  # there is no room

    def lost(self):
        if len(self.here) > 1:
            node = self.dice.choice(sorted(self.here))
            self.here.discard(node)
            self.leaving.discard(node)
            self.migration.drop_node(expert_node(node), self.now)
            self.replan()

    def comes(self):
        self.here.add(self.dice.randrange(6))
        self.settle()
        self.replan()

    def goes(self):
        if len(self.here - self.leaving) > 1:
            self.leaving.add(self.dice.choice(sorted(self.here - self.leaving)))
            self.settle()
            self.replan()
            if self.leaving.isdisjoint(self.migration.holding):
                self.here -= self.leaving
                self.leaving.clear()

    def controller_lost(self):
        """The next one knows the numbers of the flags, and what the nodes tell it."""
        before = self.migration
        self.migration = Migration(self.start, self.serving)
        following = before.placements[1] if before.phase is Phase.ADOPTING else None
        missing = before.unanswered if following is not None else []
        newest = max(p.epoch for p in before.placements)
        self.migration.resume(before.placement, following, missing, (), newest, self.now)
        self.balancing = self.balanced()

    def thinks(self):
        self.now += 3.0
        shape = (LAYERS, EXPERTS)
        rows = np.array([[self.dice.choice((0, 1, 400)) for _ in range(EXPERTS)] for _ in range(LAYERS)])
        self.balancing.count_rows(RoutedRows(np.zeros(shape, np.int64), rows.astype(np.int64)), self.now)
        stats = self.balancing.age(self.now)
        assert len(self.balancing.imbalance()) == LAYERS and np.isfinite(self.balancing.imbalance()).all()
        if stats is None:
            return False
        place = self.balancing.decided(self.balancing.think(stats, self.now))
        if place is not None:
            held = {n for n in range(place.placement.nodes) if any(True for _ in place.placement.held(n))}
            assert held <= self.holders(), "experts are put on nodes that there are"
            self.follow(place)
        return True


STEPS = ("lost", "comes", "goes", "controller_lost", "thinks", "settle")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 2),
    st.lists(st.sampled_from(STEPS), max_size=14),
)
@pytest.mark.slow
def test_whoever_comes_and_goes_balance_is_thought_about(seed, nodes, spare, copies, steps):
    run = Run(seed, nodes, -(-EXPERTS // nodes) + 2 + spare, spare, copies)
    for step in steps:
        getattr(run, step)()
        run.thinks()  # raises nothing, and puts nothing where nobody is


@pytest.mark.slow
@pytest.mark.parametrize("goes", [False, True], ids=["it stays", "it goes again"])
def test_a_new_controller_balances_over_a_placement_that_is_wider_than_its_flags(goes):
    run = Run(1, 2, 6, 0, 1)
    run.here.add(2)
    for _ in range(4):
        run.replan()
        run.thinks()
        run.settle()
    assert run.migration.holding == {0, 1, 2}
    if goes:
        run.leaving.add(2)
        run.replan()
        run.settle()
        run.here.discard(2)
        run.leaving.clear()
    assert run.migration.placement.nodes == 3
    run.controller_lost()
    assert run.thinks() and run.migration.placement.nodes == 3
