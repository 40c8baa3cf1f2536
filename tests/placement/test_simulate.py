"""The discrete-event runs: equal to the closed form where it holds, sane where it does not."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.workload import Lengths, fixed_context, from_lengths
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.search import DevicePool as Offered
from afserve.placement.planner.search import Targets
from afserve.placement.planner.simulate.layer_stages import StageTable
from afserve.placement.planner.simulate.layers import Played, Script, Simulation, perfetto_json
from afserve.placement.planner.simulate.ranks import arrivals_for, rank_of
from afserve.placement.planner.simulate.requests import (
    Arrivals,
    PrefillPool,
    Rank,
    ServedRequests,
    goodput,
    poisson,
    read_first,
    serve,
)


def planned(model: str, pools: dict[str, int], context: float, tpot: float = 0.05) -> tuple[Question, Plan]:
    setting = Setting(load_model(model), load_curves("h200"), fixed_context(context), routing=Routing(0.4))
    chips = tuple(Offered(load_hardware(name), count) for name, count in pools.items())
    asked = Question(setting, chips, Targets(tpot), kinds=("afd",))
    return asked, answer(asked).plans[0]


def play(asked: Question, plan: Plan, random: bool = False, **more: object) -> Played:
    chips = {pool.chip.name: pool.chip for pool in asked.pools}
    stages = StageTable(
        asked.setting,
        plan,
        chips[plan.attention.hardware],
        chips[plan.experts.hardware],
        random_lengths=random,
        random_routing=random,
    )
    simulation = Simulation(
        Script(plan.ranks, plan.micro_batches, plan.layers, steps=5, warm=2, **more), stages
    )
    shares = list(simulation.play())
    assert shares == sorted(shares)
    return simulation.result


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pools", "context"),
    [
        ("deepseek-v3", {"h800": 16, "h20": 24}, 4096),
        ("qwen3-235b-a22b", {"h20": 32}, 8192),
        ("minimax-m2", {"gb200": 24}, 8192),
        ("mixtral-8x22b", {"h20": 8, "l40s": 16}, 2048),
    ],
)
def test_closed_form_and_simulation_agree_within_five_percent(
    model: str, pools: dict[str, int], context: float
) -> None:
    asked, plan = planned(model, pools, context)
    for candidate in [plan, *answer(asked).plans[1:4]]:
        played = play(asked, candidate)
        assert np.mean(played.step_seconds) == pytest.approx(candidate.tpot, rel=0.05)
        idle = candidate.bubbles()
        assert played.busy["experts"] == pytest.approx(1 - idle["experts"], abs=0.06)


@pytest.mark.slow
def test_the_experts_links_are_shared() -> None:
    """Ranks that send at once get through one after the other where the other end is slower than their own links."""
    asked, plan = planned("deepseek-v3", {"h800": 16, "h20": 24}, 4096)
    chips = {pool.chip.name: pool.chip for pool in asked.pools}
    narrow = replace(chips["h20"], network=chips["h20"].network / 20)
    calm, slow = (
        StageTable(asked.setting, plan, chips[plan.attention.hardware], there, random_lengths=False)
        for there in (chips["h20"], narrow)
    )
    assert slow.dispatch.own == calm.dispatch.own
    assert slow.dispatch.shared == pytest.approx(20 * calm.dispatch.shared, rel=0.2)
    assert slow.dispatch.seconds(plan.ranks) > calm.dispatch.seconds(plan.ranks)


def test_one_pool_reads_the_prompts_of_all_ranks() -> None:
    sent = [Arrivals(np.array([0.0, 0.1]), np.array([10.0, 10.0]), np.ones(2)) for _ in range(2)]
    one, other = read_first(PrefillPool(workers=1, busy=0.1, latency=0.2), sent)
    assert one.asked is not None and other.asked is not None
    ready = np.sort(np.concatenate([one.seconds, other.seconds]))
    assert ready == pytest.approx([2.0, 3.0, 4.0, 5.0])
    assert sorted([*one.asked, *other.asked]) == [0.0, 0.0, 0.1, 0.1]


@pytest.mark.slow
def test_stragglers_and_impatience_cost_time() -> None:
    asked, plan = planned("deepseek-v3", {"h800": 16, "h20": 24}, 4096)
    calm, jitter = play(asked, plan), play(asked, plan, jitter=0.05)
    hasty = play(asked, plan, jitter=0.05, patience=0.25)
    times = [float(np.mean(found.step_seconds)) for found in (calm, jitter, hasty)]
    assert times[0] < times[1] < times[2]


@pytest.mark.slow
def test_same_seed_same_run() -> None:
    asked, plan = planned("qwen3-235b-a22b", {"h20": 16}, 8192)
    uneven = replace(asked.setting, workload=replace(asked.setting.workload, context_deviation=4000.0))
    asked = replace(asked, setting=uneven)
    first, second = (play(asked, plan, random=True, jitter=0.02, seed=7) for _ in range(2))
    assert first.step_seconds == second.step_seconds
    assert play(asked, plan, random=True, jitter=0.02, seed=8).step_seconds != first.step_seconds


@pytest.mark.slow
def test_timeline_opens_as_trace_events() -> None:
    asked, plan = planned("qwen3-235b-a22b", {"h20": 16}, 8192)
    spans = play(asked, plan).spans
    by_station: dict[str, list] = {}
    for span in spans:
        by_station.setdefault(span.station, []).append(span)
    for boxes in by_station.values():
        boxes.sort(key=lambda span: span.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(boxes))
    events = json.loads(perfetto_json(spans))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_a_rank_serves_every_request_and_counts_by_hand() -> None:
    rank = Rank(slots=2, step=np.array([0.1, 0.1, 0.2]), factors=np.ones(1), prompt_second=0.01)
    arrivals = Arrivals(np.array([0.0, 0.0, 0.0]), np.array([10.0, 10.0, 10.0]), np.array([2.0, 2.0, 1.0]))
    done = ServedRequests()
    list(serve(rank, arrivals, np.random.default_rng(0), done))
    # two start together: 0.2 + 0.2 of prompts, then a step of 0.2; the third starts when both have left
    assert done.ttft == pytest.approx([0.4, 0.4, 0.6 + 0.1 + 0.1])
    assert done.tpot == pytest.approx([0.2, 0.2, 0.0])
    assert done.tokens == 5
    assert goodput(done, tpot=1.0, ttft=0.5) == pytest.approx(2 / 0.8)


def test_a_step_with_draft_tokens_ends_no_later_for_how_floats_add_up() -> None:
    """Nine tokens, 1.8 a step: five steps, though what is left after these, taken off one by one, is above 0."""
    rank = Rank(1, np.full(2, 0.1), np.ones(1), prompt_second=0.0, tokens_per_step=1.8)
    done = ServedRequests()
    list(serve(rank, Arrivals(np.zeros(1), np.ones(1), np.full(1, 9.0)), np.random.default_rng(0), done))
    assert done.ended == pytest.approx([0.5])


@pytest.mark.slow
def test_light_load_meets_targets_and_heavy_load_queues() -> None:
    asked, plan = planned("qwen3-235b-a22b", {"h20": 32}, 8192)
    lengths = from_lengths(Lengths(1000, 500, "lognormal"), Lengths(100, 50, "lognormal"))
    asked = replace(asked, setting=replace(asked.setting, workload=lengths))
    waits = []
    for load in (0.2, 3.0):
        rng = np.random.default_rng(0)
        done = ServedRequests()
        rank = rank_of(asked, plan, None)
        list(serve(rank, arrivals_for(asked, plan, load, 300, 0, rng), rng, done))
        assert len(done.ttft) == 300
        waits.append(float(np.percentile(done.ttft, 99)))
    assert waits[1] > 3 * waits[0]


def test_poisson_rate() -> None:
    found = poisson(10.0, 5000, np.array([5.0]), np.array([7.0]), np.random.default_rng(0))
    assert 5000 / found.seconds[-1] == pytest.approx(10, rel=0.05)
