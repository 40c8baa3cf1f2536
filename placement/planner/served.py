"""Measured end-to-end times of other engines (vLLM, SGLang, TensorRT-LLM) as features, to check the planner with them.

A row is one served configuration under a fixed number of concurrent requests. Its TPOT is one decode step plus the
prompts that run between steps. Each part is bytes, FLOPs or counts of the model's shape, divided by the chip's peaks,
times a rate that is fitted per engine. It opens no files.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.hardware import PRECISIONS, Hardware
from afserve.placement.planner.kv import USABLE
from afserve.placement.planner.perf_experts import Routing, active_experts
from afserve.placement.planner.shape import ModelShape

Array = NDArray[np.float64]
DECODE = (
    "layer", "message", "weights", "cache", "pairs", "products", "expert_weights", "expert_products", "moved",
    "active", "step", "request",
)  # fmt: skip
PREFILL = ("products", "expert_products", "pairs", "moved", "layer", "weights")
ROUTING = Routing(zipf=0.6)
"""OLMoE's measured counts inside one text domain look like a power law of exponent 0.6 (median of 12)."""


@dataclass(frozen=True, slots=True)
class ServedRow:
    """`devices` of one instance; data_parallel: attention is replicated, not split. disaggregated: prompts elsewhere.
    concurrency is per decode worker. tpot, ttft in seconds as measured. series: everything but the concurrency.
    release: the engine's version. limit: requests an engine was configured to decode at once, infinite where unknown.
    """

    name: str
    shape: ModelShape
    chip: Hardware
    engine: str
    weights: str
    experts: str
    kv: str
    devices: int
    data_parallel: bool
    expert_parallel: bool
    concurrency: float
    prompt: float
    answer: float
    tpot: float
    ttft: float
    series: str
    release: str = ""
    disaggregated: bool = False
    prefill_devices: int = 0
    prefill_workers: int = 1
    decode_workers: int = 1
    limit: float = float("inf")

    @property
    def labels(self) -> tuple[str, str, str, str]:
        """What gets a fitted factor of its own, beside the engine's rates."""
        pair = f"{self.engine} {self.shape.name}"
        return self.chip.name, pair, f"{self.engine} {self.experts}", f"{pair} {self.release}"

    @property
    def running(self) -> float:
        """Requests that are decoded at once, by memory and by the engine's limit; others wait. Weights that should not
        fit at all did: what is assumed of the row is wrong then, and says nothing about room."""
        shape = self.shape
        weights = (
            shape.attention_elems * PRECISIONS[self.weights] / (1 if self.data_parallel else self.devices)
        )
        held = shape.expert_elems * PRECISIONS[self.experts] / self.devices
        each = shape.kv_elems(self.prompt + self.answer / 2) * PRECISIONS[self.kv]
        split = (
            self.devices if self.data_parallel else min(self.devices, *(g.kv_heads for g in shape.attention))
        )
        room = (self.chip.memory * USABLE - weights - held) * split / each
        return float(np.clip(room if room > 0 else np.inf, 1.0, min(self.concurrency, self.limit)))


def decode_features(row: ServedRow) -> Array:
    """Counts of one decode step on one device, in the order of DECODE; bytes and FLOPs as seconds at the peak."""
    shape, chip, n = row.shape, row.chip, row.devices
    moe, running = shape.experts, row.running
    split = 1 if row.data_parallel else n
    batch = max(running / n, 1.0) if row.data_parallel else running
    context = row.prompt + row.answer / 2
    projected = sum(group.layers * group.weight_elems for group in shape.attention)
    dense = moe.layers * moe.shared_elems + shape.dense_layers * shape.dense_elems
    width = PRECISIONS[row.weights]
    active = float(active_experts(ROUTING, moe.experts, moe.top_k, np.array([running]))[0])
    peak, narrow = chip.flops("bf16"), chip.flops(row.weights)
    return np.array(
        [
            shape.layers,
            2.0 * shape.layers * (n > 1),
            ((projected + dense) * width / split + shape.vocab * shape.hidden * 2 / n) / chip.bandwidth,
            batch * _cache(row, context, split) / chip.bandwidth,
            batch * _pairs(row, context) / split / peak,
            2 * batch * (projected + dense) / split / narrow,
            moe.layers * active * moe.elems * PRECISIONS[row.experts] / n / chip.bandwidth,
            2 * running * moe.top_k * moe.layers * moe.elems / n / chip.flops(row.experts),
            4.0 * shape.layers * running * shape.hidden * (n > 1) / max(chip.link, 1e9),
            moe.layers * active / (n if row.expert_parallel else 1),
            1.0,
            running,
        ]
    )


def _cache(row: ServedRow, context: float, split: int) -> float:
    """Bytes of cache one request makes one device read in a step."""
    total = 0.0
    for group in row.shape.attention:
        seen = min(context, group.reach) if group.reach else context
        read = (group.kv_elems - group.scan_elems) * seen + group.scan_elems * context
        each = read * PRECISIONS[row.kv] + 8.0 * group.state_elems
        total += group.layers * each / min(split, group.kv_heads)
    return total


def _pairs(row: ServedRow, context: float) -> float:
    total = 0.0
    for group in row.shape.attention:
        seen = min(context, group.reach) if group.reach else context
        total += group.layers * (
            group.pair_flops * seen + group.scan_flops * (context if group.reach else 1.0)
        )
    return total


def prefill_features(row: ServedRow) -> Array:
    """Counts of one prompt, in the order of PREFILL."""
    shape, chip, tokens = row.shape, row.chip, row.prompt
    n = row.prefill_devices or row.devices
    moe = shape.experts
    projected = sum(group.layers * group.weight_elems for group in shape.attention)
    dense = moe.layers * moe.shared_elems + shape.dense_layers * shape.dense_elems
    seen = sum(
        group.layers * group.prefill_pair_flops * min(tokens / 2, group.reach or tokens)
        for group in shape.attention
    )
    return np.array(
        [
            2 * tokens * (projected + dense) / n / chip.flops(row.weights),
            2 * tokens * moe.top_k * moe.layers * moe.elems / n / chip.flops(row.experts),
            tokens * seen / n / chip.flops("bf16"),
            4.0 * shape.layers * tokens * shape.hidden * (n > 1) / max(chip.link, 1e9),
            shape.layers,
            shape.total_elems * PRECISIONS[row.experts] / n / chip.bandwidth,
        ]
    )
