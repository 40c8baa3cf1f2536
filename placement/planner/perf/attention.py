"""Seconds of the attention half of one micro-batch step on one device, part by part, for decode and prefill.

The parts are all that an attention node does: projections, attention over the cache, routers, shared experts, dense
layers, the LM head, and the all-reduce of tensor parallelism. The batch may be an array. It knows no links to expert
nodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.curve import CurveSet
from afserve.placement.planner.perf.hardware import PRECISIONS, Hardware
from afserve.placement.planner.perf.shape import AttentionLayers, ModelShape

Array = NDArray[np.float64]
_ACTIVATION = 2.0
_STATE = 4.0


PUBLISHED = {"": ("fp8", "fp8"), "fp8": ("fp8", "fp8"), "mxfp4": ("bf16", "fp4")}
"""What attention and experts are counted in where nobody says it, by how the published checkpoint stores them."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Weights of the projections, of the experts, and the cache: bf16, fp8, fp4 or int4."""

    attention: str = "fp8"
    experts: str = "fp8"
    kv: str = "fp8"

    def weights(self, stored: str) -> str:
        """In words; `stored` is how the published checkpoint has them, "" where that is not known."""
        apart = f", attention weights {self.attention}" if self.attention != self.experts else ""
        own = bool(stored) and PUBLISHED[stored] == (self.attention, self.experts)
        return f"weights {self.experts}{apart}{' as published' * own}"


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Seconds of one step over all layers. `moe_layers`: the part between dispatches; `outside`: dense layers, head
    and per-step work. `core` and `projections` are inside moe_layers and outside too, given for what-binds tables."""

    moe_layers: Array
    outside: Array
    core: Array
    projections: Array
    reduce: Array
    launch: float


def attention_step(
    shape: ModelShape,
    chip: Hardware,
    curves: CurveSet,
    precision: Precision,
    requests: Array,
    context: Array | float,
    tensor_parallel: int,
    rows_per_request: float = 1.0,
    with_ffn: bool = True,
) -> AttentionTimes:
    """One decode step of `requests` requests whose caches hold `context` tokens each on average.

    `with_ffn`: shared experts and dense layers' FFN are computed here too, as in afserve.
    `rows_per_request` is above 1 when draft tokens are verified with the real one.
    """
    rows = requests * rows_per_request
    layers = shape.layers
    core = sum(
        (
            _core(group, chip, curves, precision, requests, context, tensor_parallel, rows_per_request)
            for group in shape.attention
        ),
        start=np.zeros_like(rows),
    )
    projections = _projections(shape, chip, curves, precision, rows, tensor_parallel)
    reduce = allreduce_seconds(chip, curves, rows * shape.hidden * _ACTIVATION, tensor_parallel) * layers
    layer = curves.pick("attention_layer", precision.attention)
    launch = layer.launch * layers
    shared_elems = shape.experts.local_elems if with_ffn else shape.experts.latent_elems
    shared = ffn_seconds(shape, chip, curves, precision.attention, rows, tensor_parallel, shared_elems)
    per_layer = (core + projections + reduce + launch) / layers * layer.bent(rows)
    dense = (
        ffn_seconds(shape, chip, curves, precision.attention, rows, tensor_parallel, shape.dense_elems)
        if with_ffn
        else 0.0
    )
    head = _head(shape, chip, curves, rows, tensor_parallel)
    step = curves.pick("step", precision.attention)
    return AttentionTimes(
        moe_layers=shape.experts.layers * (per_layer + shared),
        outside=shape.dense_layers * (per_layer + dense) + head + step.launch + step.per_group * rows,
        core=core,
        projections=projections,
        reduce=reduce,
        launch=launch,
    )


def prefill_step(
    shape: ModelShape,
    chip: Hardware,
    curves: CurveSet,
    precision: Precision,
    tokens: Array,
    before: Array | float,
    tensor_parallel: int,
) -> Array:
    """Seconds of the attention half for a chunk of `tokens` prompt tokens, `before` tokens cached already."""
    total = _projections(shape, chip, curves, precision, tokens, tensor_parallel)
    for group in shape.attention:
        seen = before + tokens / 2
        seen = np.minimum(seen, group.reach) if group.reach else seen
        pairs = tokens * seen * group.prefill_pair_flops + tokens * (
            before + tokens / 2
        ) * group.scan_flops * bool(group.reach)
        curve = curves.pick("prefill", "bf16", group.kind)
        total = total + group.layers * pairs / tensor_parallel / (chip.flops("bf16") * curve.compute)
    ffn = shape.experts.layers * ffn_seconds(
        shape, chip, curves, precision.attention, tokens, tensor_parallel, shape.experts.local_elems
    )
    if shape.dense_layers:
        ffn = ffn + shape.dense_layers * ffn_seconds(
            shape, chip, curves, precision.attention, tokens, tensor_parallel, shape.dense_elems
        )
    reduce = (
        allreduce_seconds(chip, curves, tokens * shape.hidden * _ACTIVATION, tensor_parallel) * shape.layers
    )
    return np.asarray(
        total + ffn + reduce + curves.pick("attention_layer", precision.attention).launch * shape.layers
    )


def _core(
    group: AttentionLayers,
    chip: Hardware,
    curves: CurveSet,
    precision: Precision,
    requests: Array,
    context: Array | float,
    tensor_parallel: int,
    rows_per_request: float,
) -> Array:
    seen = np.minimum(context, group.reach) if group.reach else context
    cached = (group.kv_elems - group.scan_elems) * seen + group.scan_elems * context
    # A state is read and written. Drafts read it once more: it moves on by the rows that were confirmed, afterwards.
    crossed = (2 + (rows_per_request > 1)) * group.state_elems * _STATE
    read = requests * (cached * PRECISIONS[precision.kv] + crossed)
    flops = (
        requests
        * rows_per_request
        * (group.pair_flops * seen + group.scan_flops * (context if group.reach else 1.0))
    )
    curve = curves.pick("core", precision.kv, group.kind)
    split = min(tensor_parallel, group.kv_heads)
    peak = chip.flops("bf16")
    seconds = curve.seconds(
        np.asarray(read / split), np.asarray(flops / tensor_parallel), chip.bandwidth, peak
    )
    return np.asarray(group.layers * seconds)


def _projections(
    shape: ModelShape,
    chip: Hardware,
    curves: CurveSet,
    precision: Precision,
    rows: Array,
    tensor_parallel: int,
) -> Array:
    total, curve = np.zeros_like(rows), curves.pick("gemm", precision.attention)
    for group in shape.attention:
        elems = group.weight_elems / tensor_parallel
        crossed = rows * group.row_elems / tensor_parallel * _ACTIVATION * curve.row_bytes / chip.bandwidth
        crossed = crossed * curve.scale
        total = total + group.layers * (_matmul(chip, curves, precision.attention, rows, elems) + crossed)
    return total


def _head(shape: ModelShape, chip: Hardware, curves: CurveSet, rows: Array, tensor_parallel: int) -> Array:
    """The LM head in bf16, cut by vocabulary over the devices of a node: each multiplies the node's rows."""
    sharers = max(chip.devices, tensor_parallel)
    return _matmul(
        chip, curves, "bf16", rows * sharers / tensor_parallel, shape.vocab * shape.hidden / sharers
    )


def ffn_seconds(
    shape: ModelShape,
    chip: Hardware,
    curves: CurveSet,
    precision: str,
    rows: Array,
    devices: Array | int,
    elems: int,
) -> Array:
    """One dense or shared FFN of `elems` weights, split by columns over `devices`."""
    if not elems:
        return np.zeros_like(rows)
    width = elems / 3 / shape.hidden / devices
    crossed = rows * (2 * shape.hidden + 3 * width) * _ACTIVATION / chip.bandwidth
    crossed = crossed * curves.pick("gemm", precision).scale
    return _matmul(chip, curves, precision, rows, elems / devices) + crossed


def _matmul(chip: Hardware, curves: CurveSet, precision: str, rows: Array, elems: Array | float) -> Array:
    curve = curves.pick("gemm", precision)
    read = elems * PRECISIONS[precision] + 0.0 * rows
    return curve.seconds(read, 2 * rows * elems, chip.bandwidth, chip.flops(precision))


def allreduce_seconds(chip: Hardware, curves: CurveSet, message: Array, devices: int) -> Array:
    """One all-reduce of `message` bytes over `devices` devices; nothing for one."""
    if devices <= 1:
        return np.zeros_like(message)
    curve = curves.pick("allreduce", "bf16")
    if chip.reduce > 0 and not chip.on_fast_link(devices):
        return curve.scale * (chip.reduce_latency + message / chip.reduce)
    speed, latency = chip.reach(devices)
    return curve.scale * (latency + curve.launch + message / (speed * curve.memory))
