"""Stage times move the right way, agree with published measurements, and experts are counted right."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.errors import ConfigError
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.drafting import DRAFTERS, Drafts
from afserve.placement.planner.perf.exchange import ExchangeWay, m2n_ways, ways_period
from afserve.placement.planner.perf.experts import (
    Routing,
    _pack,
    _pack_runs,
    _replicas,
    active_experts,
    imbalance,
    largest_normal,
)
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages, colocated_stages
from afserve.placement.planner.perf.workload import fixed_context


def one(value: float) -> np.ndarray:
    return np.array([float(value)])


def setting(model: str, context: float = 4096, **more: object) -> Setting:
    base = Setting(load_model(model), load_curves("h200"), fixed_context(context), routing=Routing(0.4))
    return replace(base, **more)


# tok/s/GPU: arXiv 2507.19427 (peak of 2A2F), and FastAFD's public runs on GB200 with four FFN GPUs
def test_step3_two_by_two_within_fifteen_percent() -> None:
    chip = load_hardware("h800")
    real = setting(
        "step-3", precision=Precision("fp8", "fp8", "fp8"), shared_on_experts=True, exchange_kernels=False
    )
    stages = afd_stages(real, chip, chip, 1, 3, one(16), one(16), one(128))
    assert 6144 / 32 / float(stages.tpot[0]) == pytest.approx(4039, rel=0.15)


@pytest.mark.parametrize(
    ("model", "context", "ranks", "afd", "vllm", "published"),
    [("qwen3-235b-a22b", 16384, 44, 48, 32, 1377 / 954), ("minimax-m2", 8192, 68, 72, 48, 2198 / 1516)],
)
def test_fastafd_speed_up(
    model: str, context: int, ranks: int, afd: int, vllm: int, published: float
) -> None:
    chip = load_hardware("gb200")
    real = setting(model, context, precision=Precision("fp8", "fp8", "bf16"), steps_ahead=True)
    apart = afd_stages(real, chip, chip, 1, 2, one(ranks), one(4), one(afd / 2))
    together = colocated_stages(real, chip, 1, 1, one(4), one(vllm))
    speed_up = afd * ranks / (ranks + 4) / float(apart.tpot[0]) / (vllm / float(together.tpot[0]))
    assert speed_up == pytest.approx(published, rel=0.10)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["deepseek-v3", "qwen3-30b-a3b", "gpt-oss-120b", "minimax-m1"]), st.integers(1, 512))
def test_more_requests_take_longer_but_less_each(model: str, batch: int) -> None:
    chip = load_hardware("h200")
    found = [
        float(afd_stages(setting(model), chip, chip, 1, 2, one(16), one(16), one(b)).iteration[0])
        for b in (batch, 2 * batch)
    ]
    assert found[0] < found[1] <= 2 * found[0] * (1 + 1e-9)


@pytest.mark.parametrize(
    "model", ["deepseek-v3", "step-3", "dbrx", "llama-4-maverick", "glm-5", "qwen3.5-397b-a17b"]
)
def test_every_family_gives_finite_times_and_faster_chips_are_faster(model: str) -> None:
    slow, fast = load_hardware("h20"), load_hardware("b200")
    for precision in (
        Precision("bf16", "bf16", "bf16"),
        Precision("fp8", "fp4", "fp8"),
        Precision("bf16", "int4", "bf16"),
    ):
        real = setting(model, precision=precision)
        first = afd_stages(real, slow, slow, 1, 2, one(8), one(16), one(32))
        second = afd_stages(real, fast, fast, 1, 2, one(8), one(16), one(32))
        assert 0 < float(second.iteration[0]) < float(first.iteration[0]) < 10


def test_draft_tokens_cost_rows_and_bring_tokens() -> None:
    chip = load_hardware("h800")
    plain = colocated_stages(setting("deepseek-v3"), chip, 1, 1, one(64), one(32))
    draft = colocated_stages(
        setting("deepseek-v3", drafts=Drafts(DRAFTERS["mtp"], 1, 1.8)), chip, 1, 1, one(64), one(32)
    )
    assert draft.iteration[0] > plain.iteration[0]
    assert draft.tpot[0] < plain.tpot[0]


def test_random_lengths_slow_the_barrier_by_the_slowest_rank() -> None:
    chip, even = load_hardware("h800"), setting("deepseek-v3")
    uneven = replace(even, workload=replace(even.workload, context_deviation=4096.0))
    p99 = replace(uneven, percentile99=True)
    found = [float(colocated_stages(s, chip, 1, 1, one(144), one(48)).tpot[0]) for s in (even, uneven, p99)]
    assert found == sorted(found)
    assert found[1] > 1.03 * found[0]


def test_active_experts_against_sampling() -> None:
    rng, routing = np.random.default_rng(0), Routing(0.0)
    seen = [len({e for _ in range(20) for e in rng.choice(64, 8, replace=False)}) for _ in range(300)]
    assert float(active_experts(routing, 64, 8, one(20))[0]) == pytest.approx(np.mean(seen), rel=0.01)
    assert float(active_experts(Routing(1.0), 64, 8, one(20))[0]) < float(
        active_experts(routing, 64, 8, one(20))[0]
    )


@given(st.floats(0, 1.2), st.integers(1, 64), st.integers(0, 32))
@settings(max_examples=60, deadline=None)
def test_imbalance_is_between_one_and_the_number_of_devices(
    zipf: float, devices: int, redundant: int
) -> None:
    found = imbalance(Routing(zipf, (), redundant), 64, devices)
    assert 1 - 1e-9 <= found <= devices + 1e-9


def test_replicas_even_out_skew() -> None:
    assert imbalance(Routing(0.8, (), 32), 256, 32) < 0.7 * imbalance(Routing(0.8), 256, 32)


def test_counts_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 experts, the model has 64"):
        Routing(counts=tuple([1.0] * 8)).popularity(64)


def test_largest_of_normals_against_sampling() -> None:
    draws = np.random.default_rng(1).normal(size=(20000, 16)).max(axis=1).mean()
    assert float(largest_normal(one(16))[0]) == pytest.approx(draws, rel=0.02)
    many = np.repeat(np.arange(1.0, 513.0), 4)
    assert largest_normal(many)[::4] == pytest.approx(
        np.array([float(largest_normal(one(n))[0]) for n in range(1, 513)])
    )


@given(
    weights=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=40),
    spare=st.integers(0, 300),
    copies=st.integers(1, 3),
)
def test_spare_slots_go_one_by_one_to_the_hottest_replica(
    weights: list[float], spare: int, copies: int
) -> None:
    popularity = np.array(weights) / sum(weights)
    replicas = np.full(len(weights), copies)
    for _ in range(spare):
        replicas[np.argmax(popularity / replicas)] += 1
    found = _replicas(popularity, spare, copies)
    assert found.sum() == replicas.sum()
    assert np.sort(popularity / found) == pytest.approx(np.sort(popularity / replicas), abs=1e-12)


def test_ranks_whose_cached_tokens_are_evened_out_wait_for_none() -> None:
    chip, even = load_hardware("h800"), setting("deepseek-v3")
    uneven = replace(even, workload=replace(even.workload, context_deviation=4096.0), balances_kv=True)
    found = [float(colocated_stages(s, chip, 1, 1, one(144), one(48)).tpot[0]) for s in (even, uneven)]
    assert found[0] == found[1]


def test_a_broadcast_moves_more_than_rows_to_those_that_need_them() -> None:
    chip, ranks, experts, rows = load_hardware("h800"), one(32), one(32), one(64)
    more = {}
    for model in ("step-3", "deepseek-v3"):
        some = setting(model)
        ways = m2n_ways(some, chip, chip, 1, ranks, experts, rows)
        all_ = m2n_ways(replace(some, broadcasts=True), chip, chip, 1, ranks, experts, rows)
        for few, every in zip(ways, all_, strict=True):
            assert every.seconds > few.seconds and every.inside > few.inside > 0
        more[model] = float(all_[0].inside[0] / ways[0].inside[0])
    assert more["deepseek-v3"] < more["step-3"], "top 8 of 32 devices need more of a host's than top 3"


def test_rows_in_a_latent_are_as_narrow_on_their_way() -> None:
    """Nemotron 3 Super sends 1,024 numbers where its hidden size is 4,096: a quarter of the seconds."""
    chip, ranks, experts, rows = (
        load_hardware("h800"),
        one(32),
        one(32),
        one(1 << 20),
    )  # so many that nothing else counts
    latent = setting("nemotron-3-super-120b-a12b")
    shape = latent.shape
    assert (shape.hidden, shape.expert_row, shape.experts.latent_elems) == (4096, 1024, 2 * 4096 * 1024)
    wide = replace(latent, shape=replace(shape, experts=replace(shape.experts, row=0)))
    for narrow, whole in zip(
        *(m2n_ways(s, chip, chip, 1, ranks, experts, rows) for s in (latent, wide)), strict=True
    ):
        assert float(whole.seconds[0] / narrow.seconds[0]) == pytest.approx(4.0, rel=0.01)


def test_hosts_own_links_are_a_station_of_their_own() -> None:
    """Where the network is the longest station, what fans out behind it does not lengthen it; a round trip has both."""
    network, inside, none = one(100e-6), one(60e-6), one(0.0)
    way, rest = ExchangeWay(network + inside, inside), one(10e-6)
    assert ways_period(rest, rest, (way, way), 4)[0] == pytest.approx(400e-6)
    assert ways_period(rest, rest, (way, way), 1)[0] == pytest.approx(2 * 160e-6 + 20e-6)
    assert ways_period(rest, rest, (ExchangeWay(network, none),) * 2, 4)[0] == pytest.approx(400e-6)
    assert ways_period(rest, rest, (ExchangeWay(inside + network, network),) * 2, 4)[0] == pytest.approx(
        400e-6
    )


@given(
    sizes=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 60)), min_size=1, max_size=20),
    groups=st.integers(1, 30),
    spare=st.integers(0, 3),
)
def test_many_loads_are_packed_as_if_one_by_one(
    sizes: list[tuple[float, int]], groups: int, spare: int
) -> None:
    loads = np.repeat([size for size, _ in sizes], [count for _, count in sizes])
    slots = -(-len(loads) // groups) + spare
    assert _pack_runs(loads, groups, slots) == pytest.approx(_pack(loads, groups, slots), rel=1e-9, abs=1e-12)
