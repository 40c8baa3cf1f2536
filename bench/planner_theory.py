"""The theoretical cost of decoding by Step-3's formula (arXiv 2507.19427), on hardware that reaches its peaks.

attention = max(core FLOPs, cache bytes) + projection FLOPs; experts = FLOPs of all FFN layers. All transfers are
assumed to be hidden. It is a lower bound on cost and says which hardware suits which half. The model with efficiencies,
latencies and bytes of weights is `stages.py`.
"""

from dataclasses import dataclass

from afserve.placement.planner.perf.hardware import PRECISIONS, Hardware
from afserve.placement.planner.perf.shape import AttentionLayers, ModelShape


@dataclass(frozen=True, slots=True)
class TheoreticalCost:
    """USD per million decoded tokens of each half on one kind of hardware."""

    attention: float
    experts: float


def theoretical_cost(shape: ModelShape, chip: Hardware, context: int) -> TheoreticalCost:
    usd_per_second = chip.usd_per_hour / 3600
    flops = chip.flops("fp8")
    attention = 0.0
    for group in shape.attention:
        core = max(_core_flops(group, context) / flops, _cache_bytes(group, context) / chip.bandwidth)
        attention += group.layers * (core + 2 * group.weight_elems / flops)
    experts = 2 * _ffn_elems(shape) / flops
    return TheoreticalCost(attention * usd_per_second * 1e6, experts * usd_per_second * 1e6)


def _core_flops(group: AttentionLayers, context: int) -> float:
    """The paper multiplies both products of absorbed MLA over the whole cached row (512 + 64), where only the
    first needs the 64 rotated elements: 4 * heads * row instead of `pair_flops`. Its convention is kept here."""
    row = (
        group.kv_elems - group.scan_elems
        if group.kind in ("mla", "sparse")
        else group.pair_flops / group.heads / 4
    )
    seen = min(context, group.reach) if group.reach else context
    return 4.0 * group.heads * row * seen + group.scan_flops * context


def _cache_bytes(group: AttentionLayers, context: int) -> float:
    seen = min(context, group.reach) if group.reach else context
    read = (group.kv_elems - group.scan_elems) * seen + group.scan_elems * context + group.state_elems
    return read * PRECISIONS["fp8"]


def _ffn_elems(shape: ModelShape) -> float:
    moe = shape.experts
    return moe.layers * (moe.top_k * moe.elems + moe.shared_elems) + shape.dense_layers * shape.dense_elems
