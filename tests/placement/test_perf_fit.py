"""Fits recover what they are given, refuse nothing silently, and predict rows they have not seen."""

import json

import numpy as np
import pytest

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.errors import ConfigError
from afserve.placement.planner.perf.attention import Precision, attention_step
from afserve.placement.planner.perf.calibration import fit_calibration, read_calibration
from afserve.placement.planner.perf.ffn import expert_layer
from afserve.placement.planner.perf.fit import fit_positive
from bench.planner_curves import fit_decode_attention, fit_experts, fit_link


def test_positive_fit_recovers_parameters_in_spite_of_broken_rows() -> None:
    rng = np.random.default_rng(0)
    size = np.geomspace(1e3, 1e9, 200)
    truth = 1e-5 + size / 3e11
    measured = truth * np.exp(rng.normal(0, 0.03, 200))
    measured[::20] *= 10
    fit = fit_positive(lambda v: v[0] + size / v[1], measured, np.array([1e-4, 1e10]))
    assert fit.values == pytest.approx([1e-5, 3e11], rel=0.05)
    assert fit.spread == pytest.approx(0.03, rel=0.5)


def test_decode_attention_curve_from_synthetic_kernel_rows() -> None:
    chip, rows = load_hardware("h200"), []
    for batch in (1, 8, 64, 256):
        for step in (511, 4095, 16383):
            read = batch * (step + 1) * 2 * 8 * 128 * 2.0
            latency = 1e3 * (1.2e-5 + read / (chip.bandwidth * 0.8))
            rows.append(
                {
                    "batch_size": str(batch),
                    "step": str(step),
                    "num_heads": "16",
                    "num_key_value_heads": "8",
                    "head_dim": "128",
                    "latency": str(latency),
                }
            )
    curve = fit_decode_attention(rows, chip, 2.0, "synthetic")
    assert curve.memory == pytest.approx(0.8, rel=0.03)
    assert curve.launch == pytest.approx(1.2e-5, rel=0.2)


def test_expert_curve_prices_weights_once_and_rows_each() -> None:
    chip, rows = load_hardware("h200"), []
    for tokens in (1, 4, 16, 64, 256, 1024, 4096):
        active = min(64, tokens * 8)
        read = active * 3 * 2048 * 768 * 2 + tokens * 8 * 2 * (2 * 2048 + 3 * 768)
        latency = 1e3 * (3e-5 + read / (chip.bandwidth * 0.8))
        rows.append(
            {
                "num_tokens": str(tokens),
                "hidden_size": "2048",
                "inter_size": "768",
                "topk": "8",
                "num_experts": "64",
                "moe_tp_size": "1",
                "moe_ep_size": "1",
                "distribution": "balanced",
                "latency": str(latency),
            }
        )
    assert fit_experts(rows, chip, "bf16", "synthetic").spread < 0.1


def test_link_curve() -> None:
    size = np.geomspace(1e3, 1e8, 30)
    curve = fit_link(size, 1e-5 + size / (450e9 * 0.6), 450e9, "synthetic")
    assert (curve.launch, curve.memory) == pytest.approx((1e-5, 0.6), rel=0.02)


def test_bundled_curves_are_shares_of_peaks_with_sources() -> None:
    curves = load_curves("h200")
    for name, curve in curves.curves.items():
        assert 0 < curve.memory <= 1.05, name
        assert 0 < curve.compute <= 1.1, name
        assert curve.source, name
    assert curves.pick("core", "fp4", "mla") is curves.curves["core.mla.fp8"]
    assert curves.pick("experts", "fp4") is curves.curves["experts.int4"]
    assert curves.pick("core", "bf16", "mfa") is curves.curves["core.mla.bf16"]


def calibration_lines(noise: float) -> tuple[list[str], object, object]:
    """Stage times a machine with known curves would measure, as JSON lines."""
    rng = np.random.default_rng(3)
    shape, chip, truth = load_model("qwen3-30b-a3b"), load_hardware("cpu-host"), load_curves("h200")
    width = Precision("bf16", "bf16", "bf16")
    lines = [json.dumps({"part": "machine", "threads": 2})]
    for requests in (1, 4, 16, 64):
        for context in (64, 512, 2048):
            times = attention_step(shape, chip, truth, width, np.array([float(requests)]), float(context), 1)
            seconds = float(times.moe_layers[0]) / 48 * float(np.exp(rng.normal(0, noise)))
            lines.append(
                json.dumps(
                    {"part": "attention", "requests": requests, "context": context, "seconds": seconds}
                )
            )
        for rows, active in ((8 * requests, min(8 * requests, 60)), (16 * requests, min(16 * requests, 100))):
            layer = expert_layer(
                shape, chip, truth, "bf16", np.array([float(rows)]), np.array([float(active)])
            )
            seconds = float(layer[0]) * float(np.exp(rng.normal(0, noise)))
            lines.append(json.dumps({"part": "experts", "rows": rows, "active": active, "seconds": seconds}))
        exchange = {"part": "exchange", "requests": requests, "bytes": 4096 * requests}
        lines.append(json.dumps(exchange | {"seconds": 3e-5 + requests * 1e-6}))
        lines.append(json.dumps({"part": "step", "requests": requests, "seconds": 1e-3 + 1e-5 * requests}))
    return lines, shape, chip


@pytest.mark.slow
def test_calibration_reproduces_its_stage_times() -> None:
    lines, shape, chip = calibration_lines(0.03)
    width = Precision("bf16", "bf16", "bf16")
    curves = fit_calibration("c", read_calibration("c.jsonl", lines), shape, chip, width)
    errors = []
    for line in map(json.loads, lines):
        if line["part"] == "attention":
            times = attention_step(
                shape, chip, curves, width, np.array([float(line["requests"])]), line["context"], 1
            )
            errors.append(float(times.moe_layers[0]) / 48 / line["seconds"] - 1)
    assert np.median(np.abs(errors)) < 0.06


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "c.jsonl:1: not JSON"),
        (["[" * 100_000], "c.jsonl:1: not JSON"),
        (
            ['{"part": "attention", "requests": 1, "context": -4, "seconds": 1}'],
            "c.jsonl:1: context must be at least 0",
        ),
        (['{"part": "experts", "rows": 1, "active": 1}'], "c.jsonl:1: seconds is missing"),
        ([], "0 attention measurements"),
    ],
)
def test_malformed_calibration_names_file_and_line(lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_calibration("c.jsonl", lines)
