"""A node that still answers, but ten times as slowly as before and as its peers, is fenced; noise is not."""

import random

import pytest

from afserve.control.membership.events import Dismiss, Said, Ticked
from afserve.control.membership.recovery import OnLoss
from afserve.control.membership.slowness import Slowness
from afserve.control.wire.values import Heartbeat
from afserve.engine.stats import ExpertStats
from afserve.member import expert_node
from tests.control.test_scaling import served

NODES = 3


class Load:
    """Expert nodes under load: each second `rows` rows in calls of `size`, at a cost per row and per call."""

    def __init__(self, hear):
        self.hear, self.now = hear, 0.0
        self.totals = {index: ExpertStats() for index in range(NODES)}

    def run(self, seconds, factor=lambda index, now: 1.0, rows=400, size=lambda index: 8):
        said = []
        for _ in range(seconds):
            self.now += 1.0
            for index, total in self.totals.items():
                calls = rows // size(index)
                busy = factor(index, self.now) * (calls * 200e-6 + rows * 20e-6)
                self.totals[index] = ExpertStats(
                    total.messages + calls, total.rows + rows, total.calls + calls, total.busy_seconds + busy
                )
                if why := self.hear(index, self.totals[index], self.now):
                    said.append((index, self.now, why))
        return said


@pytest.fixture
def load():
    slowness = Slowness()
    return Load(lambda index, stats, now: slowness.judge_stats(expert_node(index), "host", 0, stats, now))


def only(which, times):
    return lambda index, now: times if index == which else 1.0


def test_who_is_much_slower_for_long_enough_is_named_with_both_ratios(load):
    assert load.run(30) == []
    assert load.run(9, only(1, 12.0)) == []
    index, now, why = load.run(8, only(1, 12.0))[0]
    assert index == 1 and 40.0 <= now <= 46.0
    assert "12 times as long as before, and 12 times as long as its peers" in why


@pytest.mark.parametrize(
    "factor",
    [
        only(1, 8.0),
        lambda index, now: 20.0,
        lambda index, now: 20.0 if index == 1 and now % 10 < 7 else 1.0,
    ],
    ids=["not ten times", "all of them", "now and then"],
)
def test_what_may_be_noise_is_let_be(load, factor):
    assert load.run(30) == [] and load.run(60, factor) == []


def test_random_noise_is_let_be(load):
    dice = random.Random(3)
    assert load.run(300, lambda index, now: dice.lognormvariate(0.0, 1.2)) == []


def test_other_work_for_one_node_is_let_be(load):
    """A few rows per call cost more per row; long prompts cost more per call."""
    assert load.run(30, size=lambda index: 100) == []
    assert load.run(60, size=lambda index: 1 if index == 1 else 100) == []
    assert load.run(60, rows=6400, size=lambda index: 6400 if index == 1 else 100) == []


def test_a_node_without_a_past_or_without_enough_rows_is_let_be(load):
    assert load.run(60, only(1, 20.0)) == [], "it has always been so"
    assert load.run(20, only(1, 400.0), rows=8) == [], "too few rows to tell"


def test_the_next_process_of_a_place_has_the_past_of_the_one_before(load):
    slowness = Slowness()
    generation = 0
    load.hear = lambda index, stats, now: slowness.judge_stats(
        expert_node(index), "host", generation, stats, now
    )
    assert load.run(30) == [] and load.run(20, only(1, 12.0))
    generation = 1
    assert load.run(10, only(1, 12.0)) == [] and load.run(10, only(1, 12.0))


@pytest.mark.parametrize(("experts", "spared"), [(3, True), (2, False)])
def test_the_membership_fences_it_where_the_others_have_room(experts, spared):
    membership, members = served(attention=1, experts=experts, on_loss=OnLoss.RECOVER)
    effects = []

    def hear(index, stats, now):
        if index < experts:
            effects.extend(membership.on(Said(members[expert_node(index)], Heartbeat(1, stats)), now))

    load = Load(hear)
    load.run(12)
    for factor in (only(9, 1.0), only(1, 15.0)):
        for _ in range(20):
            load.run(1, factor)
            membership.on(Said(members[next(iter(members))], Heartbeat(1)), load.now)
            membership.on(Ticked(), load.now)
    dismissed = [effect for effect in effects if isinstance(effect, Dismiss)]
    assert [str(effect.member) for effect in dismissed] == (["expert-1"] if spared else [])
