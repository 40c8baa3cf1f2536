"""Curves from a machine's own rows: steps with the control plane, kernels and links, slow machines."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afserve.cli.main import run
from afserve.cli.plan.catalog import load_hardware, load_model
from afserve.errors import ConfigError
from afserve.placement.planner.perf.attention import Precision, attention_step
from afserve.placement.planner.perf.calibration import fit_calibration, read_calibration
from afserve.placement.planner.perf.calibration_served import bend_through
from afserve.placement.planner.perf.curve import CurveSet
from afserve.placement.planner.perf.drafting import DRAFTERS, NO_DRAFTS, Drafts
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.ffn import distinct_targets, expert_layer, transfer
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages, colocated_stages
from afserve.placement.planner.perf.workload import fixed_context

WIDTH = Precision("bf16", "bf16", "bf16")
SHAPE, CHIP = load_model("qwen3-30b-a3b"), load_hardware("cpu-host")
REQUESTS = (1, 2, 4, 8, 16, 32, 64)


def attention_seconds(requests: int, context: int) -> float:
    """Two slow cores: 20 GB/s and 200 GFLOP/s on weights, one layer."""
    weights = sum(group.weight_elems for group in SHAPE.attention) / SHAPE.layers
    cache = SHAPE.kv_elems(context) / SHAPE.layers * requests
    return 5e-5 + max(2 * weights / 20e9, 2 * weights * requests / 200e9) + 2 * cache / 10e9


def expert_seconds(rows: int, active: int) -> float:
    return 2e-5 + active * 2 * SHAPE.experts.elems / 15e9 + 2 * SHAPE.experts.elems * rows / 400e9


def lines(*others: dict[str, object]) -> list[str]:
    rows: list[dict[str, object]] = list(others)
    for requests in REQUESTS:
        for context in (96, 512):
            seconds = attention_seconds(requests, context)
            rows.append({"part": "attention", "requests": requests, "context": context, "seconds": seconds})
        for active in (min(8 * requests, 100), min(4 * requests, 60)):
            seconds = expert_seconds(8 * requests, active)
            rows.append({"part": "experts", "rows": 8 * requests, "active": active, "seconds": seconds})
    return [json.dumps(row) for row in rows]


def fitted(*others: dict[str, object]) -> CurveSet:
    return fit_calibration("c", read_calibration("c", lines(*others)), SHAPE, CHIP, WIDTH)


def per_request(part: str, seconds: Callable[[int], float]) -> list[dict[str, object]]:
    return [{"part": part, "requests": n, "seconds": seconds(n)} for n in REQUESTS]


@pytest.mark.slow
def test_a_machine_far_below_the_chip_file_is_met() -> None:
    curves = fitted()
    errors = []
    for requests in REQUESTS:
        times = attention_step(SHAPE, CHIP, curves, WIDTH, np.array([float(requests)]), 96.0, 1)
        errors.append(float(times.moe_layers[0]) / SHAPE.layers / attention_seconds(requests, 96) - 1)
        rows, active = 8 * requests, min(8 * requests, 100)
        layer = expert_layer(SHAPE, CHIP, curves, "bf16", np.array([float(rows)]), np.array([float(active)]))
        errors.append(float(layer[0]) / expert_seconds(rows, active) - 1)
    assert np.median(np.abs(errors)) < 0.06
    assert np.max(np.abs(errors)) < 0.2


SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 512, "vocab_size": 4096,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 1024, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip


MEASURED = {
    "attention": (
        (1, 96, 67), (2, 96, 82), (4, 96, 134), (8, 96, 236), (16, 96, 513), (32, 96, 846), (64, 96, 1610),
        (1, 256, 78), (4, 256, 177), (16, 256, 658),
    ),
    "experts": (
        (4, 4, 192), (1.9, 1.9, 67), (4, 4, 216), (8, 7.4, 388), (3.8, 3.5, 144), (8, 6, 285), (16, 13, 582),
        (8.9, 7.2, 271), (16, 7.5, 361), (32, 20.8, 867), (15.8, 10.4, 363), (32, 8, 428), (64, 28.8, 1108),
        (31.1, 14.1, 562), (64, 8, 817), (128, 31.6, 1789), (65.2, 15.8, 872), (128, 8, 1437), (256, 32, 3047),
        (124.8, 16, 1574), (256, 8, 3116),
    ),
}  # fmt: skip
"""Microseconds on one core of a virtual machine: of (requests, context), of (rows, active)."""
LATER = ((8, 320, 364), (8, 512, 426), (32, 320, 1360), (32, 512, 2000), (64, 320, 3036), (64, 512, 4084))
"""What attention halves of other sizes took there, minutes before."""


def test_a_core_at_a_thousandth_of_the_host_is_met_where_it_was_not_measured(tmp_path: Path) -> None:
    """Shares of the host's peaks that were held near each other put everything on requests, and nothing on context."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    shape = load_model(str(tmp_path))
    measured = read_calibration("c", lines())
    for part, names in (("attention", ("requests", "context")), ("experts", ("rows", "active"))):
        measured[part] = [
            dict(zip(names, row[:2], strict=True)) | {"seconds": 1e-6 * row[2]} for row in MEASURED[part]
        ]
    curves = fit_calibration("c", measured, shape, CHIP, WIDTH)
    assert curves.curves["core"].spread < 0.05 and curves.curves["experts"].spread < 0.12
    for requests, context, took in LATER:
        times = attention_step(shape, CHIP, curves, WIDTH, np.array([float(requests)]), float(context), 1)
        assert float(times.moe_layers[0]) / shape.layers == pytest.approx(1e-6 * took, rel=0.2)


@pytest.mark.slow
def test_a_step_carries_its_head_its_own_work_and_the_control_plane() -> None:
    alone = fitted(*per_request("step", lambda n: 5e-2 + 1e-3 * n))
    served = fitted(
        *per_request("step", lambda n: 5e-2 + 1e-3 * n), *per_request("control", lambda n: 2e-3 + 1e-4 * n)
    )
    for requests in (1.0, 16.0, 64.0):
        batch = np.array([requests])
        with_control = attention_step(SHAPE, CHIP, served, WIDTH, batch, 96.0, 1).outside
        without = attention_step(SHAPE, CHIP, alone, WIDTH, batch, 96.0, 1).outside
        assert float((with_control - without)[0]) == pytest.approx(2e-3 + 1e-4 * requests, rel=0.02)
        assert float(without[0]) == pytest.approx(5e-2 + 1e-3 * requests, rel=0.1)


@pytest.mark.slow
def test_the_control_plane_is_met_by_whole_steps() -> None:
    """One served step measured 5 % too fast leaves a difference of nothing; the line hardly moves."""
    rows = served_steps()
    rows[-2] |= {"seconds": 5e-5, "served": engine_step(REQUESTS[-2]) + 5e-5}
    step = fitted(*rows).curves["step"]
    assert step.launch == pytest.approx(1e-3, rel=0.2)
    assert step.per_group == pytest.approx(2e-5, rel=0.2)


@pytest.mark.slow
def test_a_slower_served_run_is_not_the_control_planes() -> None:
    """The machine was a quarter slower while it served, at every size."""
    rows = served_steps()
    for row in rows:
        served = 1.25 * engine_step(int(str(row["requests"]))) + float(str(row["seconds"]))
        row |= {"seconds": served - engine_step(int(str(row["requests"]))), "served": served}
    step = fitted(*rows).curves["step"]
    assert step.launch == pytest.approx(1e-3, rel=0.2)
    assert step.per_group == pytest.approx(2e-5, rel=0.5)


def engine_step(requests: int) -> float:
    return 3e-3 * requests**0.6


def served_steps() -> list[dict[str, object]]:
    return [
        {
            "part": "control",
            "requests": n,
            "seconds": 1e-3 + 2e-5 * n,
            "served": engine_step(n) + 1e-3 + 2e-5 * n,
        }
        for n in REQUESTS
    ]


@pytest.mark.slow
def test_halves_that_share_caches_are_met_together() -> None:
    """Whole engine steps take 0.2 ms a layer longer than their halves: colocated that counts, apart it does not."""
    one, requests = np.ones(1), np.array([float(n) for n in REQUESTS])
    apart = Setting(SHAPE, fitted(), fixed_context(96), WIDTH, Routing(0.0))
    parts = colocated_stages(apart, CHIP, 1, 1, one, requests).tpot
    longer = 2e-4 * SHAPE.experts.layers
    rows: list[dict[str, object]] = [
        {"part": "control", "requests": n, "seconds": 1e-3, "served": float(part) + longer + 1e-3}
        for n, part in zip(REQUESTS, parts, strict=True)
    ]
    curves = fitted(*rows)
    together = Setting(SHAPE, curves, fixed_context(96), WIDTH, Routing(0.0))
    found = colocated_stages(together, CHIP, 1, 1, one, requests)
    step = curves.curves["step"]
    assert found.tpot - parts - step.launch - step.per_group * requests == pytest.approx(longer, rel=0.2)
    disaggregated = [afd_stages(s, CHIP, CHIP, 1, 2, one, one, requests).attention for s in (apart, together)]
    assert disaggregated[0] == pytest.approx(disaggregated[1])


def in_one_call(share: float) -> list[dict[str, object]]:
    return [
        {
            "part": "whole",
            "requests": n,
            "peers": 1,
            "bytes": 4096 * n,
            "half": share * attention_seconds(n, 96),
            "kernel": 2e-6,
            "seconds": 1e-5,
        }
        for n in REQUESTS[::2]
    ]


@pytest.mark.slow
def test_colocated_steps_are_one_call_and_others_are_not() -> None:
    """Halves take four fifths of what they take one by one."""
    one, requests = np.ones(1), np.array([1.0, 8.0, 64.0])
    before, after = (
        Setting(SHAPE, curves, fixed_context(96), WIDTH, Routing(0.0))
        for curves in (fitted(), fitted(*in_one_call(0.8)))
    )
    found = [colocated_stages(setting, CHIP, 1, 1, one, requests).attention for setting in (before, after)]
    assert found[1] / found[0] == pytest.approx(0.8, rel=0.02)
    apart = [afd_stages(setting, CHIP, CHIP, 1, 2, one, one, requests).tpot for setting in (before, after)]
    assert apart[0] == pytest.approx(apart[1])
    assert before.in_one_call is before


@pytest.mark.parametrize("name", ["attention", "experts", "micro_batches"])
@pytest.mark.parametrize("count", [0.5, 1e6])
def test_a_run_of_half_a_node_or_a_million_is_refused(name: str, count: float) -> None:
    row = {"part": "run", "requests": 8, "context": 96, "attention": 2, "experts": 1, "micro_batches": 2}
    with pytest.raises(ConfigError, match=f"c:1: {name} must be"):
        fitted(row | {"seconds": 1e-3, name: count})


@pytest.mark.parametrize("row", [{"half": 0}, {"kernel": -1}, {"peers": 0}, {"half": "x"}])
def test_a_step_in_one_call_of_nothing_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="c:1: "):
        fitted(in_one_call(1.0)[0] | row)


@pytest.mark.slow
def test_served_runs_say_what_stages_leave_out() -> None:
    """Runs take a fifth longer than their stages: so do all plans of the kind, and no others."""
    one, requests = np.ones(1), np.array([1.0, 8.0, 64.0])
    setting = Setting(SHAPE, fitted(), fixed_context(96), WIDTH, Routing())
    rows = []
    for n in (2, 12, 48):
        tpot = float(colocated_stages(setting, CHIP, 1, 1, one, np.array([float(n)])).tpot[0])
        rows.append(
            {"part": "run", "requests": n, "context": 96, "attention": 1, "experts": 0, "seconds": 1.2 * tpot}
        )
    served = Setting(SHAPE, fitted(*rows), fixed_context(96), WIDTH, Routing())
    before, after = (colocated_stages(s, CHIP, 1, 1, one, requests) for s in (setting, served))
    assert after.tpot / before.tpot == pytest.approx(1.2, rel=1e-3)
    apart = [afd_stages(s, CHIP, CHIP, 1, 2, one, one, requests).tpot for s in (setting, served)]
    assert apart[0] == pytest.approx(apart[1])


@pytest.mark.parametrize("name", ["requests", "attention", "micro_batches"])
def test_a_run_of_nothing_is_refused(name: str) -> None:
    row = {
        "part": "run",
        "requests": 2,
        "context": 96,
        "attention": 1,
        "experts": 1,
        "micro_batches": 2,
        "seconds": 1e-3,
    }
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        read_calibration("c", lines(row | {name: 0}))


def test_a_ratio_is_as_flat_as_noise_allows() -> None:
    """10 % of noise at one size hardly tilts it; a real slope over many sizes does."""
    ((_, low), (most, high)) = bend_through([(2, 1.0), (12, 1.0), (48, 1.1)])
    assert most == 48
    assert 0.95 < low < high < 1.1
    steep = dict(bend_through([(2.0**n, 2.0 ** (0.2 * n)) for n in range(-3, 10)]))
    assert steep[512] / steep[1] == pytest.approx(2.0 ** (0.2 * 9), rel=0.15)


@pytest.mark.slow
def test_steps_with_drafts_are_measured_by_themselves() -> None:
    """A step that verifies takes 2 ms, 1 ms a draft and 0.1 ms a request over half of its stages; what runs without
    drafts took is none of its, nor is it of them."""
    one, requests = np.ones(1), np.array([1.0, 8.0, 64.0])
    setting = Setting(SHAPE, fitted(), fixed_context(96), WIDTH, Routing())

    def of(asked: Setting, drafts: int) -> np.ndarray:
        more = replace(asked, drafts=Drafts(DRAFTERS["mtp"], drafts, 1.0) if drafts else NO_DRAFTS)
        return colocated_stages(more, CHIP, 1, 1, one, requests).iteration

    def took(step: float, drafts: int, requests: float) -> float:
        return step / 2 + 2e-3 + 1e-3 * drafts + 1e-4 * requests

    rows = [
        {"part": "drafts", "requests": n, "context": 96, "drafts": drafts, "seconds": took(step, drafts, n)}
        for drafts in (1, 3)
        for n, step in zip((1, 8, 64), of(setting, drafts).tolist(), strict=True)
    ]
    run = {"part": "run", "requests": 8, "context": 96, "attention": 1, "experts": 0}
    run["seconds"] = 2 * float(of(setting, 0)[1])
    drafted = Setting(SHAPE, fitted(*rows, run), fixed_context(96), WIDTH, Routing())
    for drafts in (1, 2, 3):
        expected = [
            took(*one) for one in zip(of(setting, drafts).tolist(), [drafts] * 3, requests, strict=True)
        ]
        assert of(drafted, drafts).tolist() == pytest.approx(expected, rel=0.05)
    assert of(drafted, 0) / of(setting, 0) == pytest.approx(2.0, rel=1e-3)
    with pytest.raises(ConfigError, match="drafts must be"):
        fitted(rows[0] | {"drafts": 1.5})


@pytest.mark.slow
def test_what_no_roofline_says_is_kept_by_rows() -> None:
    """Beyond 32 requests everything takes half as long again."""
    rows = [json.loads(line) for line in lines()]
    for row in rows:
        if row["part"] == "attention" and row["requests"] > 32:
            row["seconds"] *= 1.5
    measured = read_calibration("c", [json.dumps(row) for row in rows])
    curves = fit_calibration("c", measured, SHAPE, CHIP, WIDTH)
    for requests, longer in ((32, 1.0), (64, 1.5)):
        times = attention_step(SHAPE, CHIP, curves, WIDTH, np.array([float(requests)]), 96.0, 1)
        found = float(times.moe_layers[0]) / SHAPE.layers
        assert found == pytest.approx(longer * attention_seconds(requests, 96), rel=0.1)


@pytest.mark.slow
def test_kernels_and_the_link_add_up_to_the_exchange() -> None:
    kernels: list[dict[str, object]] = [
        {"part": "kernel", "requests": n, "peers": peers, "seconds": kernel_seconds(n, peers)}
        for n in REQUESTS
        for peers in (1, 2)
    ]
    whole: list[dict[str, object]] = [
        {"part": "exchange", "requests": n, "bytes": 4096 * n, "seconds": direction_seconds(n)}
        for n in REQUESTS
    ]
    answers = per_request("answer", lambda n: 4e-6 + 2e-7 * n)
    curves = fitted(*kernels, *whole, *answers)
    setting = Setting(SHAPE, curves, fixed_context(96), WIDTH)
    for n in REQUESTS:
        size, rows, one = np.array([4096.0 * n]), np.array([float(n)]), np.ones(1)
        passed = 2 * float(transfer(CHIP, CHIP, curves, size, size)[0])
        here = float(setting.exchange_at_attention(rows, one)[0])
        there = float(setting.exchange_at_experts(rows, one)[0])
        assert here == pytest.approx(2 * kernel_seconds(n, 1), rel=0.02)
        assert there == pytest.approx(4e-6 + 2e-7 * n, rel=0.02)
        assert passed + here + there == pytest.approx(2 * direction_seconds(n), rel=0.02)
        assert float(setting.exchange_at_attention(rows, 2 * one)[0]) == pytest.approx(
            2 * kernel_seconds(n, 2), rel=0.02
        )
        assert float(setting.exchange_at_experts(rows, 3 * one)[0]) == pytest.approx(3 * there)


def kernel_seconds(requests: int, peers: int) -> float:
    """A row goes to each peer that holds one of its experts."""
    copies = float(distinct_targets(SHAPE.experts.top_k, float(peers)))
    return 8e-6 + 3e-6 * (peers - 1) + 4e-7 * requests * copies


def direction_seconds(requests: int) -> float:
    return 5e-5 + 4096 * requests / 5e9 + kernel_seconds(requests, 1) + (4e-6 + 2e-7 * requests) / 2


@pytest.mark.slow
def test_what_was_not_measured_costs_nothing() -> None:
    curves = fitted().curves
    for name in ("step", "gateway", "exchange"):
        assert (curves[name].launch, curves[name].per_group) == (0.0, 0.0)


@pytest.mark.slow
def test_the_gateway_is_a_line() -> None:
    gateway = fitted(*per_request("gateway", lambda n: 2e-4 + 2e-5 * n)).curves["gateway"]
    assert gateway.launch == pytest.approx(2e-4, rel=0.01)
    assert gateway.per_group == pytest.approx(2e-5, rel=0.01)


@pytest.mark.slow
def test_a_calibration_is_an_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines()))
    told = []
    for flag in ("--engine", "--curves"):
        code = run(
            f"plan --model qwen3-30b-a3b --precision bf16 --pool cpu-host=2 --context 512 {flag} {file} --json".split()
        )
        told.append(json.loads(capsys.readouterr().out))
        assert code == 0
    assert told[0]["best"] == told[1]["best"]
    assert told[0]["engines"]["afd"]["about"].endswith("mine.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "--kind afd", "--kind colocated"])
def test_a_plan_of_own_curves_says_that_nodes_share_no_cores_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines()))
    asked = f"plan --model qwen3-30b-a3b --pool cpu-host=2 --precision bf16 --engine {file} {kind}"
    assert run(asked.split()) == 0
    assert ("share the cores of one machine" in capsys.readouterr().out) == (kind != "--kind colocated")


@pytest.mark.slow
def test_a_plan_beyond_what_was_measured_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines()))
    asked = f"plan --model qwen3-30b-a3b --pool cpu-host=2 --precision bf16 --engine {file} --kind colocated"
    for more, beyond in (
        ("--context 512 --max-running 32", False),
        ("--context 512", True),
        ("--context 4096 --max-running 32", True),
    ):
        assert run([*asked.split(), *more.split()]) == 0
        assert ("Beyond what was measured it is a guess" in capsys.readouterr().out) == beyond
        assert run([*asked.split(), *more.split(), "--json"]) == 0
        assert (
            any("steps of at most 64 requests" in one for one in json.loads(capsys.readouterr().out)["notes"])
            == beyond
        )
