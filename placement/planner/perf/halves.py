"""Seconds of either half of a micro-batch's step, on the rank or the device that is the slowest, under one setting.

The batch may be an array, and so may the counts of ranks and devices. `stages.py` adds what passes between the halves.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.attention import AttentionTimes, attention_step, ffn_seconds
from afserve.placement.planner.perf.experts import Routing, active_experts, imbalance, largest_normal
from afserve.placement.planner.perf.ffn import expert_layer
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting

Array = NDArray[np.float64]


def attention_half(
    setting: Setting, chip: Hardware, tensor_parallel: int, ranks: Array, batch: Array, with_ffn: bool = True
) -> AttentionTimes:
    """The slowest of `ranks` ranks: the sum of its `batch` random lengths is z_r standard deviations above the mean,
    unless requests are placed so that all sums are alike.

    The 99th percentile of the largest of r normals is the quantile 0.99^(1/r) of one, about that of 100 r samples.
    """
    work = setting.workload
    above = largest_normal(100 * ranks) if setting.percentile99 else largest_normal(ranks)
    slowest = above * work.context_deviation / np.sqrt(np.maximum(batch, 1.0)) * (not setting.balances_kv)
    context = work.context_mean + slowest
    requests = np.asarray(batch + 0.0 * context)
    times = attention_step(
        setting.shape,
        chip,
        setting.decode_curves,
        setting.precision,
        requests,
        context,
        tensor_parallel,
        setting.rows_per_request,
        with_ffn,
    )
    if not setting.steps_ahead:
        return times
    hidden = setting.decode_curves.pick("step", setting.precision.attention).launch
    return replace(times, outside=times.outside - hidden)


def expert_half(
    setting: Setting,
    chip: Hardware,
    tokens: Array,
    devices: Array,
    *,
    by_chance: bool = True,
    slices: NDArray[np.bool_] | bool = False,
) -> Array:
    """The most loaded of `devices` expert devices, one layer, `tokens` rows before the top-k fan-out. Not `by_chance`:
    the mean over many layers, as it is where tokens choose evenly. `slices`: each device has a slice of every expert,
    so none has more rows than others, and each calls all active ones."""
    moe, routing = setting.shape.experts, setting.routing
    skew = skew_of(routing, moe.experts, devices)
    mean_rows = tokens * moe.top_k / devices
    skew = np.where(slices, 1.0, skew)
    chance = 1 + (by_chance & ~np.asarray(slices)) * largest_normal(devices) / np.sqrt(
        np.maximum(mean_rows, 1.0)
    )
    rows = np.minimum(mean_rows * skew * chance, tokens * moe.top_k)
    slots = routing.slots(moe.experts)
    held = np.maximum(slots / devices, 1.0)
    spare = slots / moe.experts
    distinct = tokens * setting.drafts.independent
    active = np.minimum(active_experts(routing, moe.experts, moe.top_k, distinct) * spare / devices, held)
    active = np.maximum(np.minimum(active * np.minimum(chance, 2.0), held), np.minimum(1.0, rows))
    width = np.maximum(devices / slots, 1.0)
    read = np.asarray(active / width)
    return expert_layer(
        setting.shape,
        chip,
        setting.decode_curves,
        setting.precision.experts,
        rows,
        read,
        groups=np.where(slices, active * devices, read),
    )


def skew_of(routing: Routing, experts: int, devices: Array) -> Array:
    """`imbalance` of each device count, computed once per distinct count."""
    counts = np.asarray(devices, dtype=np.int64)
    present = np.flatnonzero(np.bincount(counts.ravel()))
    return np.asarray(_skews(routing, experts, tuple(present.tolist()))[counts])


@lru_cache(maxsize=256)
def _skews(routing: Routing, experts: int, present: tuple[int, ...]) -> Array:
    """`imbalance` of these counts, at their places; a routing takes long to be looked up."""
    table = np.ones(present[-1] + 1)
    table[list(present)] = [imbalance(routing, experts, count) for count in present]
    return table


def ffn_there(setting: Setting, chip: Hardware, tokens: Array, devices: Array, elems: int) -> Array:
    """A dense FFN on the expert side, split by columns over all its devices."""
    rows = np.asarray(tokens + 0.0 * devices)
    return ffn_seconds(
        setting.shape, chip, setting.decode_curves, setting.precision.experts, rows, devices, elems
    )
