"""Replays: the flow of requests against the simulator that plays each, what is paid for, and what rivals do."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from afserve.control.pilot.classes import ClassAim
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import Policy, rules_for
from afserve.control.pilot.replay.counts import Packet
from afserve.control.pilot.replay.days import MadeDay, burst_spans, made_day
from afserve.control.pilot.replay.events import EventRun
from afserve.control.pilot.replay.flow import FlowRun
from afserve.control.pilot.replay.rivals import demand_of, fixed, oracle, replicas
from afserve.control.pilot.replay.run import World, play
from afserve.control.pilot.replay.tabled import TabledModel, TabledStages
from afserve.control.pilot.sizes import Limits, PoolSizes, TargetTimes
from afserve.placement.planner.simulate.phase_stages import pieces_on_gpu
from bench.goodput import tables

TABLES = tables("h200")
STAGES = TabledStages(TABLES, pieces_on_gpu(TABLES.chip, 7168, "fp8", 1 / 4))
WANTED = TargetTimes(2.0, 0.05)
LIMITS = Limits(STAGES.least(), PoolSizes(40, 40, 40), 64)
PROMPTS, ANSWERS = [300, 1800, 700, 2400, 500], [40, 260, 120, 90, 400]


def steady(rate, count=1200):
    return [Packet(number / rate, PROMPTS[number % 5], ANSWERS[number % 5]) for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, rate", [(PoolSizes(4, 4, 10), 15), (PoolSizes(8, 4, 16), 40), (PoolSizes(14, 6, 20), 70)]
)
def test_the_flow_is_what_the_event_simulator_plays(sizes, rate):
    packets, loads = steady(rate), []
    for run in (FlowRun(STAGES, packets, WANTED, sizes), EventRun(STAGES, packets, WANTED, sizes)):
        while not run.over:
            run.advance(run.now + 10)
        loads.append(run.counts.load())
        assert loads[-1].came == loads[-1].first == loads[-1].ended == len(packets)
    flow, events = loads
    assert flow.prompt_tokens == events.prompt_tokens and flow.rest_tokens == events.rest_tokens
    assert flow.rest_seconds / flow.rest_tokens == pytest.approx(
        events.rest_seconds / events.rest_tokens, rel=0.1
    )
    assert flow.first_seconds / flow.first == pytest.approx(events.first_seconds / events.first, abs=0.15)
    assert flow.prefill_busy == pytest.approx(events.prefill_busy, rel=0.25)


@pytest.mark.parametrize("kind", [FlowRun, EventRun])
def test_every_request_is_counted_once_and_memory_comes_back(kind):
    run = kind(STAGES, steady(30, 400), WANTED, PoolSizes(4, 2, 12))
    run.advance(5)
    run.resize(PoolSizes(6, 3, 14))
    run.advance(9)
    run.resize(PoolSizes(5, 2, 14))
    while not run.over:
        run.advance(run.now + 7)
    counts = run.counts
    assert counts.came == counts.ended == 400 and 0 <= counts.met <= 400
    assert counts.answer_tokens == sum(one.answer for one in run.packets)
    assert run.running == pytest.approx(0) and run.queued == pytest.approx(0, abs=1e-3)


def test_devices_are_paid_for_from_when_they_are_asked_for():
    world, asked = World(STAGES, WANTED, start=30.0), iter([PoolSizes(5, 2, 12)])

    def once(seen):
        return next(asked, None)

    found = play(world, steady(10, 1000), PoolSizes(4, 2, 12), once)
    assert found.changes == ((0.0, PoolSizes(4, 2, 12)), (10.0, PoolSizes(5, 2, 12)))
    played = math.ceil((1000 - 1) / 10 / world.look) * world.look
    assert found.device_hours == pytest.approx((19 * played - 10) / 3600, rel=0.01)


def test_devices_that_read_decode_at_once_where_one_pool_gives_what_the_other_gets():
    looks, asked = [], iter([PoolSizes(3, 4, 12)])

    def once(seen):
        looks.append((seen.sizes, seen.settled))
        return next(asked, None)

    found = play(World(STAGES, WANTED, start=30.0), steady(10, 600), PoolSizes(4, 2, 12), once)
    assert looks[:2] == [(PoolSizes(4, 2, 12), True), (PoolSizes(3, 3, 12), False)]
    assert looks[-1] == (PoolSizes(3, 4, 12), True) and found.changes[-1] == (10.0, PoolSizes(3, 4, 12))
    played = math.ceil((600 - 1) / 10 / 10) * 10
    assert found.device_hours == pytest.approx((19 * played - 10) / 3600, rel=0.01), "three are one more"


def rates(packets, seconds):
    """Requests per second, by so many seconds of a day."""
    found = [0.0] * int(86_400 / seconds)
    for one in packets:
        found[int(one.at // seconds)] += one.weight / seconds
    return found


@pytest.mark.slow
def test_a_made_day_has_the_requests_and_the_shape_that_it_says():
    packets = made_day(MadeDay(peak=4, trough=0.25, unevenness=0.0), PROMPTS, ANSWERS)
    assert all(a.at <= b.at for a, b in itertools.pairwise(packets))
    by_hour = rates(packets, 3600)
    assert max(by_hour) == pytest.approx(4, rel=0.06) and min(by_hour) == pytest.approx(1, rel=0.08)
    assert by_hour.index(min(by_hour)) in (2, 3, 4, 5)
    bursty = MadeDay(peak=40, trough=1.0, unevenness=0.0, bursts=12, hours=6, seed=2)
    bursts = made_day(bursty, PROMPTS, ANSWERS)
    assert bursts[:500] == made_day(bursty, PROMPTS, ANSWERS)[:500]
    assert 4 <= sum(one > 70 for one in rates(bursts, 60)) <= 60


@pytest.mark.slow
def test_clumped_arrivals_have_the_rate_and_the_variation_that_they_say():
    day = MadeDay(peak=6, trough=1.0, unevenness=0.0, hours=4, seed=1, clumping=2.0)
    packets = made_day(day, PROMPTS, ANSWERS)
    between = np.diff([one.at for one in packets])
    assert len(packets) == pytest.approx(6 * 4 * 3600, rel=0.03) and (between >= 0).all()
    assert between.std() / between.mean() == pytest.approx(2.0, rel=0.05)
    bursty = replace(day, bursts=24)
    spans, by_minute = burst_spans(bursty), rates(made_day(bursty, PROMPTS, ANSWERS), 60)
    inside = [by_minute[int((begin + end) // 120)] for begin, end in spans if end < 4 * 3600]
    assert len(spans) >= 2 and min(inside) > 8


@pytest.mark.slow
@pytest.mark.parametrize("peak", [6, 80])
def test_counts_of_clumped_arrivals_vary_as_much_where_requests_travel_together(peak):
    """Of a renewal process the variance of counts over their mean is the square of the variation between arrivals."""
    day = MadeDay(peak=peak, trough=1.0, unevenness=0.0, hours=3, seed=1, clumping=2.0)
    packets = made_day(day, PROMPTS, ANSWERS)
    counts = 20 * np.array(rates(packets, 20)[: 3 * 180])
    assert counts.mean() == pytest.approx(20 * peak, rel=0.03)
    assert counts.var() / counts.mean() == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize(("peak", "weight"), [(4, 1), (40, 5), (320, 10), (1280, 20)])
def test_packets_are_small_until_there_are_many(peak, weight):
    assert {one.weight for one in made_day(MadeDay(peak, hours=0.1), PROMPTS, ANSWERS)} == {weight}


@pytest.mark.slow
def test_bursts_that_overlap_double_the_rate_once():
    day = MadeDay(peak=8, trough=1.0, unevenness=0.0, bursts=2000, hours=3, seed=1)
    assert max(rates(made_day(day, PROMPTS, ANSWERS), 600)) == pytest.approx(16, rel=0.05)


CHAT, BULK = ClassAim("chat", -10, ttft=1.0), ClassAim("bulk", 10, ttft=60.0)


def test_classes_have_their_turn_and_are_counted_by_their_own_times():
    packets = [replace(one, kind=number % 2) for number, one in enumerate(steady(36, 1200))]
    counted = []
    for one_class in (CHAT, replace(CHAT, priority=BULK.priority)):
        run = FlowRun(STAGES, packets, WANTED, PoolSizes(3, 3, 12), classes=(one_class, BULK))
        while not run.over:
            run.advance(run.now + 10)
        counted.append(run.counts)
    first, alike = counted
    chat, bulk = first.of_classes().values()
    assert chat.came == chat.first == chat.rest == bulk.came == 600
    assert first.first_late == chat.first_late + bulk.first_late
    assert chat.first_late < 10 < alike.of_classes()["chat"].first_late, "readers fall behind, not for chat"
    assert first.first_seconds == pytest.approx(alike.first_seconds, rel=0.05), "somebody waits as long"


@pytest.mark.long
def test_a_pilot_on_an_afternoon_serves_as_many_as_one_who_knows_it():
    packets = made_day(MadeDay(peak=60, trough=0.3, hours=8, seed=5), PROMPTS, ANSWERS)
    world, planner = World(STAGES, WANTED, tick=2.0), Planner(TabledModel(STAGES), WANTED, LIMITS)
    whole = demand_of(packets[:2000], packets[2000].at)
    assert whole is not None
    policy = Policy(Planner(TabledModel(STAGES), WANTED, LIMITS), rules_for(600))

    def look(seen):
        advice = policy.look(seen)
        return advice and advice.new

    piloted = play(world, packets, planner.best_effort(whole), look)
    knowing = oracle(world, packets, planner, 1.3)
    assert piloted.met >= 0.97 * knowing.met
    assert piloted.change_count <= 1.5 * piloted.hours * 6
    still = fixed(world, packets, planner, 0.98 * knowing.met)
    assert piloted.device_hours < still.device_hours
    whole_ones = replicas(world, packets, PoolSizes(3, 1, 8), 60, (2, 6), 240.0)
    assert all(sizes.experts % 8 == 0 for _, sizes in whole_ones.changes)


@pytest.mark.slow
def test_the_oracle_has_room_for_each_minute_and_no_more():
    packets = steady(5, 300) + [replace(one, at=one.at + 60) for one in steady(40, 2400)]
    planner = Planner(TabledModel(STAGES), WANTED, LIMITS)
    found = oracle(World(STAGES, WANTED), packets, planner, 1.2)
    assert found.met > 0.97
    totals = [sizes.total for _, sizes in found.changes]
    assert totals[-1] > totals[0]
