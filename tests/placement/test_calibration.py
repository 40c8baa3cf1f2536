"""Curves from a machine's own rows: steps with the control plane, kernels and links, slow machines."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from afserve.cli.catalog import load_hardware, load_model
from afserve.placement.calibration import fit_calibration, read_calibration
from afserve.placement.perf_attention import Precision, attention_step
from afserve.placement.perf_curve import CurveSet
from afserve.placement.perf_ffn import expert_layer, transfer

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


def test_kernels_and_the_link_add_up_to_the_exchange() -> None:
    kernels: list[dict[str, object]] = [
        {"part": "kernel", "bytes": 4096 * n, "peers": peers, "seconds": 8e-6 + 3e-6 * (peers - 1)}
        for n in REQUESTS
        for peers in (1, 2)
    ]
    whole: list[dict[str, object]] = [
        {"part": "exchange", "bytes": 4096 * n, "seconds": 5e-5 + 4096 * n / 5e9} for n in REQUESTS
    ]
    curves = fitted(*kernels, *whole)
    kernel = curves.pick("exchange", "bf16")
    assert kernel.launch == pytest.approx(8e-6)
    assert kernel.per_group == pytest.approx(3e-6)
    for n in REQUESTS:
        size = np.array([4096.0 * n])
        passed = float(transfer(CHIP, CHIP, curves, size, size)[0])
        assert passed + 2 * kernel.launch == pytest.approx(5e-5 + 4096 * n / 5e9, rel=0.02)


def test_what_was_not_measured_costs_nothing() -> None:
    curves = fitted().curves
    for name in ("step", "gateway", "exchange"):
        assert (curves[name].launch, curves[name].per_group) == (0.0, 0.0)


def test_the_gateway_is_a_line() -> None:
    gateway = fitted(*per_request("gateway", lambda n: 2e-4 + 2e-5 * n)).curves["gateway"]
    assert gateway.launch == pytest.approx(2e-4, rel=0.01)
    assert gateway.per_group == pytest.approx(2e-5, rel=0.01)
