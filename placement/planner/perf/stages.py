"""Stage times of a deployment: what one micro-batch costs at each station of the ping-pong, for AFD and colocated.

It computes many layouts at once: ranks, expert devices and batch may be arrays that broadcast; all else is fixed.
`afserve/placement/pipeline.py` turns stage times into the time of a step; `search.py` tries layouts. Docstrings state
assumptions.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.pipeline import larger, layer_period, step_seconds
from afserve.placement.planner.perf.attention import (
    AttentionTimes,
    allreduce_seconds,
    attention_step,
    ffn_seconds,
    prefill_step,
)
from afserve.placement.planner.perf.exchange import all_to_all, m2n_ways, ways_period
from afserve.placement.planner.perf.experts import Routing, active_experts, imbalance, largest_normal
from afserve.placement.planner.perf.ffn import (
    COMBINE_BYTES,
    expert_layer,
)
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds per MoE layer and micro-batch at each station, `outside` per step, `tpot` per generated token.

    prefill_share: part of the step that goes to prompts; first_token: seconds from arrival to the first token.
    prefill: devices that only read prompts, `prompt_parts` of them each prompt.
    """

    attention: Array
    experts: Array
    dispatch: Array
    combine: Array
    outside: Array
    core: Array
    iteration: Array
    tpot: Array
    prefill_share: Array
    first_token: Array
    prefill: Array
    prompt_parts: Array


def afd_stages(
    setting: Setting,
    attention_chip: Hardware,
    expert_chip: Hardware,
    tensor_parallel: int,
    micro_batches: int,
    ranks: Array,
    expert_devices: Array,
    batch: Array,
    other_work: Array | float = 0.0,
) -> Stages:
    """AFD: `ranks` attention ranks of `tensor_parallel` devices, `batch` requests per rank and micro-batch.
    other_work: seconds per step that the experts spend for others than these ranks.

    A row travels once to each expert host that holds one of its experts, or to all of them, and fans out there over
    the host's own link.
    """
    shape, layers = setting.shape, setting.shape.experts.layers
    times = attention_half(
        setting, attention_chip, tensor_parallel, ranks, batch, not setting.shared_on_experts
    )
    tokens = ranks * batch * setting.rows_per_request
    experts = expert_half(setting, expert_chip, tokens, expert_devices, slices=setting.split_experts)
    if setting.shared_on_experts:
        experts = experts + ffn_there(
            setting, expert_chip, tokens, expert_devices, shape.experts.shared_elems
        )
    ways = m2n_ways(
        setting,
        attention_chip,
        expert_chip,
        tensor_parallel,
        ranks,
        expert_devices,
        batch * setting.rows_per_request,
    )
    dispatch, combine = (way.seconds for way in ways)
    sent = batch * setting.rows_per_request
    here = sent * setting.targets(expert_devices) / expert_devices
    attention = times.moe_layers / layers + setting.exchange_at_attention(sent, expert_devices)
    experts = experts + setting.exchange_at_experts(here, ranks) + other_work / (layers * micro_batches)
    period = ways_period(attention, experts, ways, micro_batches)
    outside = times.outside
    if setting.shared_on_experts:
        outside = outside - shape.dense_layers * times.moe_layers / layers
    step = step_seconds(attention, experts, period, outside, layers, micro_batches)
    if setting.shared_on_experts:
        dense = ffn_there(setting, expert_chip, tokens, expert_devices, shape.dense_elems)
        step = step + shape.dense_layers * ways_period(attention, dense, ways, micro_batches)
    prompt = prompt_seconds(setting, attention_chip, expert_chip, tensor_parallel, ranks, expert_devices)
    devices = ranks * tensor_parallel + expert_devices
    requests = ranks * batch * micro_batches
    factor = setting.engine.factor(setting.like(attention_chip, "afd"), requests, devices)
    factor = factor * _served(setting, "served_apart", batch * micro_batches)
    parts = RawStages(attention, experts, dispatch, combine, times.outside, times.core / shape.layers, step)
    return _finish(setting, parts, prompt, micro_batches * batch, factor)


def ffn_there(setting: Setting, chip: Hardware, tokens: Array, devices: Array, elems: int) -> Array:
    """A dense FFN on the expert side, split by columns over all its devices."""
    rows = np.asarray(tokens + 0.0 * devices)
    return ffn_seconds(
        setting.shape, chip, setting.decode_curves, setting.precision.experts, rows, devices, elems
    )


def colocated_stages(
    setting: Setting,
    chip: Hardware,
    tensor_parallel: int,
    micro_batches: int,
    ranks: Array,
    batch: Array,
) -> Stages:
    """Expert parallelism over all ranks * tensor_parallel devices, each of which also runs attention.

    One rank: experts are split over its devices and the sum is one all-reduce. Several: all-to-all both ways, every
    chosen device gets its own copy (low-latency kernels). Two micro-batches overlap transfers with compute, but their
    send and receive kernels still take device time. afserve's own steps are one native call, where a calibration has
    measured them.
    """
    setting = setting.in_one_call
    shape, layers = setting.shape, setting.shape.experts.layers
    devices = ranks * tensor_parallel
    times = attention_half(setting, chip, tensor_parallel, ranks, batch)
    tokens = ranks * batch * setting.rows_per_request
    experts = expert_half(setting, chip, tokens, devices, slices=(ranks == 1) & setting.split_experts)
    dispatch, combine = all_to_all(setting, chip, devices, batch * setting.rows_per_request / tensor_parallel)
    reduce = allreduce_seconds(
        chip, setting.decode_curves, tokens * shape.hidden * COMBINE_BYTES, tensor_parallel
    )
    dispatch = np.where(ranks > 1, dispatch, 0.0)
    combine = np.where(ranks > 1, combine, reduce)
    exchange = 4 * setting.exchange * (ranks > 1) * (micro_batches > 1)
    attention = times.moe_layers / layers + exchange + _together(setting, batch * setting.rows_per_request)
    period = layer_period(attention + experts, 0.0 * experts, dispatch, combine, micro_batches)
    step = step_seconds(attention + experts, 0.0 * experts, period, times.outside, layers, micro_batches)
    prompt = prompt_seconds(setting, chip, chip, tensor_parallel, ranks, devices)
    prompt = prompt[0] + prompt[1], 0.0 * prompt[1]
    factor = colocated_factor(setting, chip, ranks, ranks * batch * micro_batches, devices)
    factor = factor * _served(setting, "served", batch * micro_batches)
    parts = RawStages(attention, experts, dispatch, combine, times.outside, times.core / shape.layers, step)
    return _finish(setting, parts, prompt, micro_batches * batch, factor)


def colocated_factor(
    setting: Setting, chip: Hardware, ranks: Array, requests: Array, devices: Array
) -> Array:
    """What the engine's rows say of such layouts: one rank over all devices is another kind than several."""
    one = "tp" if setting.split_experts else "tp ep"
    alone = setting.engine.factor(setting.like(chip, one), requests, devices)
    several = setting.engine.factor(setting.like(chip, "dp"), requests, devices)
    return np.asarray(np.where(ranks > 1, several, alone))


def _served(setting: Setting, name: str, requests: Array) -> Array | float:
    """What runs took over their stages where runs of one's own machine were measured, by requests of one rank."""
    curve = setting.decode_curves.curves.get(name)
    return 1.0 if curve is None else curve.bent(requests)


def _together(setting: Setting, rows: Array) -> Array:
    """What both halves in one process take longer per layer, where that was measured."""
    curve = setting.decode_curves.curves.get("together")
    return np.zeros_like(rows) if curve is None else np.asarray(curve.launch + curve.per_group * rows)


def attention_half(
    setting: Setting,
    chip: Hardware,
    tensor_parallel: int,
    ranks: Array,
    batch: Array,
    with_ffn: bool = True,
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
    skew = _skew(routing, moe.experts, devices)
    mean_rows = tokens * moe.top_k / devices
    skew = np.where(slices, 1.0, skew)
    chance = 1 + (by_chance & ~np.asarray(slices)) * largest_normal(devices) / np.sqrt(
        np.maximum(mean_rows, 1.0)
    )
    rows = np.minimum(mean_rows * skew * chance, tokens * moe.top_k)
    slots = routing.slots(moe.experts)
    held = np.maximum(slots / devices, 1.0)
    spare = slots / moe.experts
    active = np.minimum(active_experts(routing, moe.experts, moe.top_k, tokens) * spare / devices, held)
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


def _skew(routing: Routing, experts: int, devices: Array) -> Array:
    """`imbalance` of each device count, computed once per distinct count."""
    counts = np.asarray(devices, dtype=np.int64)
    present = np.flatnonzero(np.bincount(counts.ravel()))
    table = np.ones(int(present[-1]) + 1)
    table[present] = [imbalance(routing, experts, int(count)) for count in present]
    return np.asarray(table[counts])


def prompt_seconds(
    setting: Setting,
    attention_chip: Hardware,
    expert_chip: Hardware,
    tensor_parallel: int,
    ranks: Array,
    expert_devices: Array,
) -> tuple[Array, Array]:
    """(attention seconds per prompt on its rank, expert seconds per prompt on each rank's behalf): 0 when prompts are
    prefilled elsewhere. Experts are shared by all ranks, so each prompt takes 1/devices of its work on each. Tokens
    whose KV is found are not computed; the others attend to them."""
    like = np.zeros(np.broadcast_shapes(np.shape(ranks), np.shape(expert_devices)))
    if setting.workload.decode_only:
        return like, like
    shape, before = setting.shape, setting.workload.mean_prompt * setting.found.found_share
    tokens = np.array([setting.workload.mean_prompt - before])
    attention = prefill_step(
        shape, attention_chip, setting.curves, setting.precision, tokens, before, tensor_parallel
    )[0]
    moe = shape.experts
    skew = _skew(setting.routing, moe.experts, np.asarray(expert_devices))
    rows = tokens * moe.top_k * ranks / expert_devices * skew
    active = np.minimum(
        active_experts(setting.routing, moe.experts, moe.top_k, tokens * ranks) / expert_devices, rows
    )
    layer = expert_layer(shape, expert_chip, setting.curves, setting.precision.experts, rows, active)
    rates = setting.engine.rates
    return like + rates.prompt_attention * attention, like + rates.prompt_experts * layer * moe.layers


@dataclass(frozen=True, slots=True)
class RawStages:
    """Seconds of one micro-batch before an engine's measured rows correct them: per MoE layer, and `outside` and
    `step` per step."""

    attention: Array
    experts: Array
    dispatch: Array
    combine: Array
    outside: Array
    core: Array
    step: Array


def _finish(
    setting: Setting, parts: RawStages, prompt: tuple[Array, Array], resident: Array, factor: Array
) -> Stages:
    """Add prompts: while one request writes its answer, its rank also reads one prompt; the busiest of attention,
    experts and what brings KV pays. A prompt waits as in an M/G/1 queue: long prompts among short ones make everybody
    wait longer than equal ones would."""
    step = parts.step * factor
    prompt = prompt[0] * factor, prompt[1] * factor
    per_prompt = np.maximum(larger(prompt[0], prompt[1]), setting.fetching)
    turnover = resident if not setting.concurrency else larger(resident - 1, 0.0 * resident)
    prompts = turnover * setting.tokens_per_step / setting.workload.mean_answer
    iteration = step + prompts * per_prompt
    share = np.asarray(prompts * per_prompt / np.maximum(iteration, 1e-12))
    wait = share / np.maximum(2 * (1 - share), 1e-3) * per_prompt * (1 + setting.workload.prompt_variation)
    return Stages(
        attention=np.asarray(parts.attention * factor),
        experts=np.asarray(parts.experts * factor),
        dispatch=np.asarray(parts.dispatch * factor),
        combine=np.asarray(parts.combine * factor),
        outside=np.asarray(parts.outside * factor),
        core=np.asarray(parts.core * factor),
        iteration=np.asarray(iteration),
        tpot=np.asarray(iteration / setting.tokens_per_step),
        prefill_share=share,
        first_token=np.asarray(wait + setting.fetching + prompt[0] + prompt[1] + step),
        prefill=np.zeros_like(iteration),
        prompt_parts=np.ones_like(iteration),
    )
