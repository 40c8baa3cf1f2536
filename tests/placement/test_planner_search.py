"""The search against exhaustive enumeration, and its answers: objectives, verdicts, sensitivity, what fails."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.placement.planner.batches import best_batches
from afserve.placement.planner.cluster_file import cluster_toml
from afserve.placement.planner.infeasible import explain
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.room import largest_batch
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.workload import Lengths, fixed_context, from_lengths
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, answer, pareto
from afserve.placement.planner.search import (
    APART,
    BATCH_LIMIT,
    HERE,
    DevicePool,
    GivenLayout,
    PlanFamily,
    Targets,
    families,
)
from afserve.placement.planner.sensitivity import sensitivity, verdict


def question(model: str, pools: dict[str, int], tpot: float = 0.05, **more: object) -> Question:
    setting = Setting(load_model(model), load_curves("h200"), fixed_context(4096), routing=Routing(0.4))
    chips = tuple(DevicePool(load_hardware(name), count) for name, count in pools.items())
    return replace(Question(setting, chips, Targets(tpot)), **more)


def every_batch(limit_L: np.ndarray) -> Iterator[np.ndarray]:
    """Every batch up to the largest limit, 64 of them (B) for all layouts (L) at a time."""
    most = int(limit_L.max(initial=0.0))
    for first in range(1, most + 1, 64):
        tried_B = np.arange(first, min(first + 64, most + 1), dtype=float)
        yield tried_B[:, None] + np.zeros_like(limit_L)


def layouts_of(family: PlanFamily) -> list[tuple[float, float, float]]:
    counts = np.broadcast_to(family.decoders, family.ranks.shape)
    return list(zip(family.ranks, family.expert_devices, counts, strict=True))


def exhaustive_batches(family: PlanFamily, setting: Setting, targets: Targets) -> np.ndarray:
    """Like `best_batches`, by trying every batch up to the memory limit; 0 where none is feasible."""
    limit_L = family.batch_limit(setting)
    best_L = np.zeros_like(limit_L)
    for batch_BL in every_batch(limit_L):
        stages = family.stages(setting, batch_BL)
        keeps_up = (stages.prefill_share < 0.95) | (setting.concurrency > 0)
        in_time = (stages.tpot <= targets.tpot) & (stages.first_token <= targets.ttft)
        fine_BL = in_time & keeps_up & (batch_BL <= limit_L)
        if family.prefill is not None:
            fine_BL &= stages.prefill <= family.left_for_prefill()
        best_L = np.maximum(best_L, np.where(fine_BL, batch_BL, 0.0).max(axis=0))
    return best_L


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pools", "tpot"),
    [("qwen3-30b-a3b", {"l40s": 4, "h20": 2}, 0.03), ("mixtral-8x7b", {"h20": 2, "l20": 3}, 0.05)],
)
@pytest.mark.parametrize("prompts", ["", HERE, APART])
def test_bisection_finds_what_enumeration_finds(
    model: str, pools: dict[str, int], tpot: float, prompts: str
) -> None:
    asked = question(model, pools, tpot)
    setting = (
        replace(asked.setting, workload=from_lengths(Lengths(800), Lengths(200)))
        if prompts
        else asked.setting
    )
    tried = 0
    degrees = (1, 2, 3) if prompts else (1, 2, 3, 4)  # with prompts every batch costs several times as much
    for family in families(list(asked.pools), degrees, ("colocated", "afd"), prompts=(prompts or HERE,)):
        small = replace(setting, precision=Precision("bf16", "bf16", "bf16"))
        wanted = exhaustive_batches(family, small, asked.targets)
        cells = best_batches(family, small, asked.targets)
        found = dict(zip(layouts_of(cells.family), cells.low, strict=True))
        for layout, best in zip(layouts_of(family), wanted, strict=True):
            assert found.get(layout, 0.0) == best
            tried += 1
    assert tried > 50


@pytest.mark.slow
def test_best_plan_is_the_best_of_all_layouts_and_batches() -> None:
    asked = question("qwen3-30b-a3b", {"l40s": 3, "h20": 2}, 0.04)
    best = answer(asked).plans[0]
    least = float("inf")
    for family in families(list(asked.pools), (1, 2, 3), ("colocated", "afd")):
        usd_L = (
            family.ranks * family.tensor_parallel * family.attention.usd_per_hour
            + family.expert_devices * family.experts.usd_per_hour
        )
        limit_L = family.batch_limit(asked.setting)
        for batch_BL in every_batch(limit_L):
            stages = family.stages(asked.setting, batch_BL)
            fine = (batch_BL <= limit_L) & (stages.tpot <= 0.04)
            speed = family.ranks * batch_BL * family.micro_batches / stages.tpot
            least = min(least, float(np.where(fine, usd_L / speed, np.inf).min()))
    assert best.usd_per_hour / best.tok_s == pytest.approx(least, rel=1e-9)


@cache
def winner(objective: str, tokens_per_second: float) -> Plan:
    more = {"objective": objective, "tokens_per_second": tokens_per_second}
    return answer(question("qwen3-235b-a22b", {"h800": 32, "h20": 32}, **more)).plans[0]


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("objective", ("dollar", "device", "watt", "latency", "speed", "count"))
def test_each_objective_wins_its_own_race(objective: str) -> None:
    speed = 20000.0 if objective == "count" else 0.0
    merits = {
        "dollar": lambda p: -p.usd_per_mtok, "device": lambda p: p.tok_s_per_device,
        "watt": lambda p: p.tokens_per_joule, "latency": lambda p: -p.tpot, "count": lambda p: -p.all_devices,
        "speed": lambda p: p.tok_s,
    }  # fmt: skip
    best = winner(objective, speed)
    for other in ("dollar", "device", "watt"):
        rival = winner(other, speed)
        assert merits[objective](best) >= merits[objective](rival) - 1e-9
    assert best.tpot <= 0.05


@pytest.mark.slow
def test_the_least_count_that_fits_is_the_least() -> None:
    asked = question("deepseek-v3", {"h800": 4})
    found = re.search(r"at least (\d+) h800", explain(asked))
    assert found
    least = int(found[1])
    assert not answer(question("deepseek-v3", {"h800": least - 1}, float("inf"))).plans
    assert answer(question("deepseek-v3", {"h800": least}, float("inf"))).plans
    assert "Not even one request fits" in explain(
        replace(asked, setting=replace(asked.setting, workload=fixed_context(1e7)))
    )


@pytest.mark.slow
def test_whole_nodes_are_preferred() -> None:
    best = answer(question("deepseek-v3", {"h800": 64})).plans[0]
    assert best.devices % 8 == 0


@pytest.mark.slow
def test_the_lowest_latency_is_sensitive_at_its_own_batch() -> None:
    asked = question("deepseek-v3", {"h800": 32}, objective="latency")
    best = answer(asked).plans[0]
    assert best.batch == 1
    assert sensitivity(asked, best)["TPOT target"] == 0.0


@pytest.mark.slow
def test_two_pools_of_512_search_every_layout() -> None:
    found = answer(question("deepseek-v3", {"h800": 512, "h20": 512}))
    assert found.tried > 100_000
    assert {plan.kind for plan in found.plans} == {"colocated", "afd"}
    assert all(plan.tpot <= 0.05 for plan in found.plans)


@pytest.mark.slow
def test_step3_conclusions_with_efficiencies_too() -> None:
    asked = question("step-3", {"h800": 512, "h20": 512}, 0.05)
    step3 = answer(replace(asked, setting=replace(asked.setting, workload=fixed_context(8192)))).best("afd")
    assert step3 is not None
    assert (step3.attention.hardware, step3.experts.hardware) == ("h20", "h800")
    assert answer(question("deepseek-v3", {"h800": 64, "h20": 64}, 0.05)).plans[0].kind == "colocated"


@pytest.mark.slow
def test_verdicts_give_a_reason() -> None:
    asked = question("deepseek-v3", {"h800": 64})
    words = verdict(asked, answer(asked))
    assert words.startswith("Do not disaggregate")
    slow = replace(load_hardware("l40s"), network=1e9)
    poor = replace(question("deepseek-v3", {}), pools=(DevicePool(slow, 64),), targets=Targets(0.5))
    assert "link" in verdict(poor, answer(poor))


@pytest.mark.slow
def test_three_pools_each_of_its_own_hardware() -> None:
    asked = question("deepseek-v3", {"h800": 40, "h20": 32}, prompts=(HERE, APART))
    lengths = from_lengths(Lengths(2000), Lengths(500))
    asked = replace(asked, setting=replace(asked.setting, workload=lengths), targets=Targets(0.05, 4.0))
    found = answer(asked)
    best = found.plans[0]
    assert best.prefill is not None and best.prefill_share == 0
    offered = {pool.chip.name: pool.count for pool in asked.pools}
    for plan in found.plans:
        assert all(count <= offered[name] for name, count in plan.devices_used.items()) and plan.ttft <= 4.0
        assert sum(plan.devices_used.values()) == plan.devices
    roles = {(p.prefill.hardware, p.attention.hardware, p.experts.hardware) for p in found.plans if p.prefill}
    assert {("h800", "h20", "h800"), ("h20", "h800", "h800")} <= roles
    here = answer(replace(asked, prompts=(HERE,))).plans[0]
    assert best.usd_per_mtok < here.usd_per_mtok


@pytest.mark.slow
def test_prompts_elsewhere_still_take_the_experts_time() -> None:
    asked = question("deepseek-v3", {"h800": 64}, kinds=("afd",), prompts=(APART,))
    asked = replace(asked, layout=GivenLayout(attention_devices=16, expert_devices=24))
    speeds = [
        answer(
            replace(asked, setting=replace(asked.setting, workload=from_lengths(Lengths(2000), Lengths(out))))
        )
        for out in (100, 1000)
    ]
    short, long = (found.plans[0] for found in speeds)
    assert short.prefill is not None and long.prefill is not None
    assert short.tok_s < long.tok_s
    assert short.prefill.devices / short.tok_s > 5 * long.prefill.devices / long.tok_s


@pytest.mark.slow
def test_sensitivity_names_what_helps() -> None:
    asked = question("deepseek-v3", {"h800": 64})
    changes = sensitivity(asked, answer(asked).plans[0])
    assert changes["bandwidth"] > 0.02
    assert abs(changes["link"]) < 0.02
    assert changes["TPOT target"] > 0


@pytest.mark.slow
def test_pareto_trades_speed_for_throughput() -> None:
    shares, steps = zip(*pareto(question("qwen3-30b-a3b", {"h20": 8}), points=5), strict=True)
    assert shares[-1] == 1.0
    curves = steps[-1]
    assert curves["afd"]
    assert curves["colocated"]
    for plans in curves.values():
        ordered = sorted(plans, key=lambda plan: plan.tpot)
        assert ordered[-1].usd_per_mtok <= ordered[0].usd_per_mtok


@pytest.mark.parametrize(
    ("pools", "change", "words"),
    [
        ({"h800": 4}, {}, "deepseek-v3 does not fit 4 h800: expert weights 6.*It takes at least"),
        (
            {"h800": 32},
            {"targets": Targets(0.002)},
            r"reaches a TPOT of 2 ms: the fastest is .* ms \(\+\d+%\)",
        ),
        ({"h800": 32}, {"tokens_per_second": 1e9}, "sustain at most about"),
    ],
)
def test_impossible_questions_say_what_failed(
    pools: dict[str, int], change: dict[str, object], words: str
) -> None:
    asked = replace(question("deepseek-v3", pools), **change)
    assert not answer(asked).plans
    assert re.search(words, explain(asked))


def test_caches_of_random_lengths_need_more_room_than_the_mean() -> None:
    chip, shape = load_hardware("h20"), load_model("qwen3-235b-a22b")
    even = fixed_context(8192)
    uneven = replace(even, context_deviation=8192.0)
    asked = [Setting(shape, load_curves("h200"), work) for work in (even, uneven)]
    most = [float(largest_batch(one, chip, 1, 0.0)) for one in asked]
    assert most[1] < most[0] <= BATCH_LIMIT
    used = most[1] * 8192 + 2.326 * most[1] ** 0.5 * 8192
    assert used <= most[0] * 8192 * 1.01 + 8192


@pytest.mark.slow
def test_cluster_file_is_toml_with_every_host() -> None:
    plan: Plan | None = answer(question("qwen3-235b-a22b", {"h20": 64})).best("afd")
    assert plan is not None
    table = tomllib.loads(cluster_toml(plan, "qwen3-235b-a22b", {"h20": load_hardware("h20")}))
    assert table["micro_batches"] == plan.micro_batches
    assert table["attention"]["nodes"] == plan.ranks
    by_role = {
        role: sum(h["devices"] for h in table["host"] if h["role"] == role)
        for role in ("attention", "experts")
    }
    assert by_role == {"attention": plan.attention.devices, "experts": plan.experts.devices}
    assert {host["memory_gb"] for host in table["host"]} == {load_hardware("h20").memory / 1e9}
