"""Seconds of the expert half of one micro-batch on the most loaded expert device, and of the M2N transfers.

`experts.py` says how many rows and distinct experts there are; this file turns them into time. The batch may be an
array.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.curve import CurveSet, smooth_max
from afserve.placement.planner.perf.hardware import PRECISIONS, Hardware
from afserve.placement.planner.perf.shape import ModelShape

Array = NDArray[np.float64]
_ACTIVATION = 2.0
DISPATCH_BYTES = {"bf16": 2.0, "fp8": 1.03, "fp4": 1.03, "int4": 2.0}
"""Bytes per element on the way to the experts: FP8 rows carry one float32 scale per 128 elements."""
COMBINE_BYTES = 2.0


def expert_layer(
    shape: ModelShape,
    chip: Hardware,
    curves: CurveSet,
    precision: str,
    rows: Array,
    active: Array,
    groups: Array | None = None,
) -> Array:
    """One MoE layer on one device: `rows` row-expert pairs and `active` distinct experts on it.

    `groups`: pieces of experts that this device calls, where that is not `active`.
    """
    elems = shape.experts.elems
    row = shape.expert_row
    curve = curves.of_experts(chip.isa, precision)
    traffic = rows * curve.row_bytes * _ACTIVATION * (2 * row + elems / row)
    read = active * elems * PRECISIONS[precision] + traffic
    flops = 2 * elems * (rows + curve.pad_rows * active)
    moved = read / (chip.bandwidth * curve.memory)
    computed = flops / (chip.flops(precision) * curve.compute)
    called = active if groups is None else groups
    return np.asarray(curve.launch + curve.scale * smooth_max(moved, computed) + called * curve.per_group)


def distinct_targets(top_k: float, targets: Array | float) -> Array:
    """Expected number of distinct expert nodes (or devices) that hold a token's top-k, uniform choice."""
    n = np.maximum(np.asarray(targets, dtype=np.float64), 1.0)
    return np.asarray(n * (1 - (1 - 1 / n) ** top_k))


def transfer(
    sender: Hardware,
    receiver: Hardware,
    curves: CurveSet,
    sent: Array,
    received: Array,
    same_domain: bool = False,
) -> Array:
    """One direction of an exchange: `sent` bytes leave each sender device while `received` reach each receiver device.

    The slower end rules. `same_domain`: all devices share one fast link (an NVL72 rack, one node).
    """
    curve = curves.pick("fast_link" if same_domain else "network", "bf16")
    out, into = (sender.link, receiver.link) if same_domain else (sender.network, receiver.network)
    wire = np.maximum(sent / out, received / into) / curve.memory
    latency = (
        max(sender.link_latency, receiver.link_latency)
        if same_domain
        else max(sender.network_latency, receiver.network_latency)
    )
    return np.asarray(curve.scale * (latency + curve.launch + wire))
