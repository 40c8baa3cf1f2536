"""A pilot over loads that are told: what it advises, when it keeps still, and what it never does."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.control.pilot.judge import Judge
from afserve.control.pilot.learnt import learnt_of, recall
from afserve.control.pilot.measured import MeasuredModel
from afserve.control.pilot.observed import Observed, PoolLoad
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import Policy, rules_for
from afserve.control.pilot.predict import DAY
from afserve.control.pilot.sizes import Demand, Limits, PoolSizes, TargetTimes
from tests.control.pilot.world import LIMITS, RATES, WANTED, Told


def enough(sizes: PoolSizes, rate: float) -> bool:
    return MeasuredModel(RATES).expect(sizes, Demand(rate, 1000, 100, 1000), WANTED).meets(WANTED)


@pytest.mark.slow
def test_load_that_triples_is_followed_at_once_and_its_fall_after_a_while():
    told = Told()
    told.play(10, 1200)
    before = told.sizes
    assert enough(before, 10)
    more = told.play(30, 300)
    assert more and more[0].at <= 1200 + 70 and enough(told.sizes, 30) and told.sizes.total > before.total
    fallen = told.play(10, 3600)
    assert told.sizes.total < 0.6 * more[-1].new.total and enough(told.sizes, 10)
    assert 1500 + told.rules.again <= fallen[0].at <= 1700, "behind a jump soon, and not at once"
    told.play(30, 1200)
    fallen = told.play(10, 3600)
    assert fallen[0].at >= told.at - 3600 + told.rules.hold / 2, "what lasted was no jump"


def test_for_a_day_behind_a_burst_there_is_room_for_more_prompts():
    told, demand = Told(), Demand(10, 1000, 100, 1000)
    rooms = told.policy.judge.read_room, told.policy.judge.made_room

    def computed(rate, seconds):
        told.play(rate, seconds)
        for room in rooms:
            room.factor = 1.0
        return told.policy._roomy(demand).computed

    assert computed(10, 1200) == 1000
    assert computed(30, 120) == computed(10, 600) == pytest.approx(1150)
    rooms[0].factor = 1.2
    assert told.policy._roomy(demand).computed == pytest.approx(1200)
    told.at += DAY
    assert computed(10, 20) == 1000


@pytest.mark.parametrize(
    "harm",
    [
        {},
        {"tpot_errors": [-0.1]},
        {"ttft_standing": [0.1] * 61},
        {"rates": [math.nan] * 7},
        {"headrooms": [1.1, 9.0]},
        {"shares": ["0.8", 0.8]},
        {"requests": None},
    ],
)
def test_what_was_learnt_is_gone_on_from_and_what_cannot_be_is_refused_as_a_whole(harm):
    told = Told()
    told.play(10, 1200)
    told.play(30, 1200)
    judge, model = told.policy.judge, told.policy._planner.model
    assert isinstance(model, MeasuredModel)
    said = json.loads(json.dumps({**learnt_of(judge, model), **harm}))
    after, rates = Judge(), MeasuredModel()
    if harm:
        with pytest.raises(ValueError, match=next(iter(harm))):
            recall(said, after, rates)
        assert after == Judge() and not rates.ready
        return
    recall(said, after, rates)
    assert judge.tpot.errors and rates.ready and rates.rates == model.rates
    assert learnt_of(after, rates) == said
    assert (after.ttft.width, after.tpot.width) == (judge.ttft.width, judge.tpot.width)


@pytest.mark.parametrize(("ttft", "apart"), [(1.0, 60), (20.0, 300)])
def test_pools_grow_no_sooner_again_than_prompts_are_counted_over(ttft, apart):
    told, rate = Told(wanted=TargetTimes(ttft, 0.05)), 10.0
    told.play(rate, 1200)
    while rate < 40:
        rate *= 1.04
        told.play(rate, 60)
    grown = [one.at for one in told.advices if one.new.total > one.old.total]
    assert apart <= min(b - a for a, b in itertools.pairwise(grown)) < 5 * apart


@pytest.mark.slow
def test_each_pool_follows_its_own_part_of_the_load():
    told = Told(prompt=4000, answer=20)
    told.play(10, 3000)
    reading = told.sizes
    told.prompt, told.answer = 200, 300
    told.play(10, 6000)
    assert reading.prefill > told.sizes.prefill and reading.decode < told.sizes.decode


@pytest.mark.slow
def test_a_steady_load_is_left_alone_once_headroom_that_nobody_needed_is_given_back():
    told = Told()
    told.play(20, 8_000)
    settled = told.sizes
    assert told.play(20, 8_000) == [] and told.sizes == settled


@pytest.mark.slow
def test_who_advises_only_says_it_again_no_sooner_than_it_may_and_is_judged_by_what_did_not_happen():
    told = Told(sizes=PoolSizes(1, 1, 1), follows=False)
    advices = told.play(30, 1500)
    assert len(advices) > 1
    gaps = [later.at - sooner.at for sooner, later in itertools.pairwise(advices)]
    assert min(gaps) >= told.rules.again
    assert len({(one.old, one.new) for one in advices if one.at < 600}) == sum(
        one.at < 600 for one in advices
    )
    assert told.policy.outcomes and not told.policy.outcomes[-1].followed


def test_nothing_is_decided_while_nodes_come_or_go():
    told = Told(sizes=PoolSizes(1, 1, 1))
    told.play(5, 100)
    for _ in range(50):
        told.at += told.step
        told.load = told._later(40)
        assert told.policy.look(told.seen(settled=False)) is None
    told.at += told.step
    assert told.policy.look(told.seen()) is not None


def test_what_a_loss_did_is_no_effect_of_an_advice():
    told = Told()
    told.play(10, 400)
    told.play(30, 80)
    judged = told.policy.judged
    assert told.advices and told.sizes == told.advices[-1].new
    for _ in range(2):
        told.at += told.step
        later = told._later(30)
        told.load = replace(later, rest_seconds=later.rest_seconds + 1e5)
        told.policy.look(told.seen(settled=False))
    told.play(30, 200)
    assert told.policy.judged == judged + 1
    assert told.policy.outcomes[-1].tpot == pytest.approx(RATES.calm_rest, rel=1.0)


@pytest.mark.slow
def test_what_cannot_be_had_is_asked_for_as_far_as_it_can():
    told = Told(sizes=PoolSizes(1, 1, 1), limits=Limits(PoolSizes(1, 1, 1), PoolSizes(9, 9, 9), 12))
    told.play(300, 900)
    assert 10 <= told.sizes.total <= 12 and told.limits.allow(told.sizes)


@pytest.mark.slow
def test_sums_that_fall_as_a_node_goes_say_nothing():
    told = Told()
    told.play(20, 3600)
    told.load = replace(told.load, came=0.0, prefill_busy=0.0, rest_seconds=0.0)
    told.at += told.step
    assert told.policy.look(told.seen()) is None
    assert told.play(20, 1000) == []


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6))
def test_limits_hold_and_changes_are_apart_whatever_comes(seed):
    draw = random.Random(seed)
    least = PoolSizes(draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 4))
    most = least.at_least(PoolSizes(draw.randint(1, 12), draw.randint(1, 12), draw.randint(1, 12)))
    limits = Limits(least, most, draw.randint(least.total, most.total))
    told = Told(
        sizes=limits.nearest(PoolSizes(3, 3, 3)), limits=limits, rules=rules_for(draw.choice((60, 600)))
    )
    for _ in range(4):
        told.prompt, told.answer = draw.choice((50, 900, 8000)), draw.choice((2, 100, 900))
        told.play(draw.choice((0.0, 0.3, 5, 40, 500)), draw.choice((60, 400, 1200)))
    for advice in told.advices:
        assert limits.allow(advice.new) and advice.new != advice.old
        for effect in (advice.after, advice.stay):
            assert effect.ttft_within[0] <= effect.ttft <= effect.ttft_within[1] < math.inf
            assert effect.tpot_within[0] <= effect.tpot <= effect.tpot_within[1] < math.inf
    gaps = [b.at - a.at for a, b in itertools.pairwise(told.advices)]
    assert all(gap >= told.rules.again - 1e-6 for gap in gaps)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e12)] * 6, st.booleans()), min_size=3, max_size=12))
def test_nonsense_leads_to_no_size_beyond_the_limits(rows):
    policy = Policy(Planner(MeasuredModel(), WANTED, LIMITS))
    for number, (came, tokens, first, rest, busy, size, settled) in enumerate(rows):
        load = PoolLoad(
            came, tokens, 0.0, tokens / 2, came, first, 0.0, came, rest, rest, first, 0.0, busy, busy, busy
        )
        sizes = LIMITS.nearest(PoolSizes(*[int(min(size, 1e6))] * 3))
        advice = policy.look(Observed(100.0 * number, sizes, load, settled))
        assert advice is None or LIMITS.allow(advice.new)


def test_the_planner_finds_the_smallest_sizes():
    """Against all of them."""
    limits = Limits(PoolSizes(1, 1, 1), PoolSizes(8, 8, 8), 24)
    planner = Planner(MeasuredModel(RATES), WANTED, limits)
    for rate in (1, 5, 12, 20, 40):
        demand = Demand(rate, 1000, 100, 1000)
        found = planner.smallest(demand)
        every = [PoolSizes(p, d, e) for p in range(1, 9) for d in range(1, 9) for e in range(1, 9)]
        best = min((one.total for one in every if enough(one, rate)), default=None)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert enough(found, rate) and found.total <= best + 1, "a rate is rounded up"


def test_a_pilot_without_targets_keeps_pools_from_being_full():
    planner = Planner(MeasuredModel(RATES), TargetTimes(busy=0.8), LIMITS)
    found = planner.smallest(Demand(50, 1000, 100, 1000))
    assert found is not None
    busy = MeasuredModel(RATES).expect(found, Demand(50, 1000, 100, 1000), TargetTimes()).busy
    assert 0.5 < max(busy) <= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("pools", [PoolSizes(0, 3, 2), PoolSizes(0, 2, 0)])
def test_nodes_that_do_both_are_one_pool(pools):
    limits = Limits(pools.at_most(PoolSizes(0, 1, 1)), PoolSizes(0, 30, 30 if pools.experts else 0), 60)
    told = Told(sizes=pools, limits=limits)
    told.play(5, 2000)
    small = told.sizes
    told.play(50, 1200)
    assert told.sizes.decode > small.decode and told.sizes.prefill == 0
    assert bool(told.sizes.experts) == bool(pools.experts)
