"""Stage times of a deployment: what one micro-batch costs at each station of the ping-pong, for AFD and colocated.

It computes many layouts at once: ranks, expert devices and batch may be arrays that broadcast; all else is fixed.
`afserve/placement/pipeline.py` turns stage times into the time of a step; `search.py` tries layouts. Docstrings state
assumptions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.pipeline import larger, layer_period, step_seconds
from afserve.placement.planner.perf.attention import AttentionTimes, allreduce_seconds, prefill_step
from afserve.placement.planner.perf.exchange import all_to_all, m2n_ways, ways_period
from afserve.placement.planner.perf.experts import active_experts
from afserve.placement.planner.perf.ffn import COMBINE_BYTES, expert_layer
from afserve.placement.planner.perf.halves import attention_half, expert_half, ffn_there, skew_of
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

    def parts_of(one: Setting, beside: Array | float = 0.0) -> RawStages:
        return _afd_parts(
            one,
            attention_chip,
            expert_chip,
            tensor_parallel,
            micro_batches,
            ranks,
            expert_devices,
            batch,
            beside,
        )

    parts = with_drafter_passes(setting, parts_of(setting, other_work), micro_batches, parts_of)
    prompt = prompt_seconds(setting, attention_chip, expert_chip, tensor_parallel, ranks, expert_devices)
    devices = ranks * tensor_parallel + expert_devices
    requests = ranks * batch * micro_batches
    factor = setting.engine.factor(setting.like(attention_chip, "afd"), requests, devices)
    factor = factor * _served(setting, "served_apart", batch * micro_batches)
    return _finish(setting, parts, prompt, micro_batches * batch, factor, ranks)


def _afd_parts(
    setting: Setting,
    attention_chip: Hardware,
    expert_chip: Hardware,
    tensor_parallel: int,
    micro_batches: int,
    ranks: Array,
    expert_devices: Array,
    batch: Array,
    other_work: Array | float,
) -> "RawStages":
    shape, layers = setting.shape, setting.shape.experts.layers
    times = attention_half(
        setting, attention_chip, tensor_parallel, ranks, batch, not setting.shared_on_experts
    )
    if not layers:
        return _dense_parts(times, micro_batches)
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
    return RawStages(attention, experts, dispatch, combine, times.outside, times.core / shape.layers, step)


def colocated_stages(
    setting: Setting, chip: Hardware, tensor_parallel: int, micro_batches: int, ranks: Array, batch: Array
) -> Stages:
    """Expert parallelism over all ranks * tensor_parallel devices, each of which also runs attention.

    One rank: experts are split over its devices and the sum is one all-reduce. Several: all-to-all both ways, every
    chosen device gets its own copy (low-latency kernels). Two micro-batches overlap transfers with compute, but their
    send and receive kernels still take device time. afserve's own steps are one native call, where a calibration has
    measured them; those that verify drafts are measured by themselves.
    """
    setting, devices = setting.in_one_call, ranks * tensor_parallel

    def parts_of(one: Setting) -> RawStages:
        return _colocated_parts(one, chip, tensor_parallel, micro_batches, ranks, batch)

    parts = with_drafter_passes(setting, parts_of(setting), micro_batches, parts_of)
    prompt = prompt_seconds(setting, chip, chip, tensor_parallel, ranks, devices)
    prompt = prompt[0] + prompt[1], 0.0 * prompt[1]
    factor = colocated_factor(setting, chip, ranks, ranks * batch * micro_batches, devices)
    drafted = setting.decode_curves.curves.get("drafted") if setting.drafts.tokens else None
    if drafted is None:
        factor = factor * _served(setting, "served", batch * micro_batches)
    else:
        own = drafted.launch + drafted.per_row * setting.drafts.tokens
        more = (own + drafted.per_group * batch * micro_batches) / drafted.scale
        parts = replace(parts, outside=parts.outside + more / micro_batches, step=parts.step + more)
        factor = factor * drafted.scale
    return _finish(setting, parts, prompt, micro_batches * batch, factor, ranks)


def _colocated_parts(
    setting: Setting, chip: Hardware, tensor_parallel: int, micro_batches: int, ranks: Array, batch: Array
) -> "RawStages":
    shape, layers = setting.shape, setting.shape.experts.layers
    devices = ranks * tensor_parallel
    times = attention_half(setting, chip, tensor_parallel, ranks, batch)
    if not layers:
        return _dense_parts(times, micro_batches)
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
    return RawStages(attention, experts, dispatch, combine, times.outside, times.core / shape.layers, step)


def _dense_parts(times: AttentionTimes, micro_batches: int) -> "RawStages":
    """A pass of layers without experts: one micro-batch after the other, on the attention side."""
    none = 0.0 * times.outside
    return RawStages(none, none, none, none, times.outside, times.core, times.outside * micro_batches)


def with_drafter_passes(
    setting: Setting, parts: "RawStages", micro_batches: int, parts_of: Callable[[Setting], "RawStages"]
) -> "RawStages":
    """`parts` of a verify step, and behind it the passes of the drafter, one after the other: each token is drafted
    from the one before. They are the device's time that no other layer overlaps with."""
    passes = setting.drafts.passes
    if not passes:
        return parts
    seconds = sum(
        passes.count(rows) * parts_of(setting.drafter_pass(rows)).step for rows in sorted(set(passes))
    )
    return replace(parts, outside=parts.outside + seconds / micro_batches, step=parts.step + seconds)


def colocated_factor(
    setting: Setting, chip: Hardware, ranks: Array, requests: Array, devices: Array
) -> Array:
    """What the engine's rows say of such layouts: one rank over all devices is another kind than several."""

    def of(count: int) -> Array:
        return setting.engine.factor(setting.like(chip, setting.colocated(count)), requests, devices)

    apart = ranks > 1
    if apart.all():
        return of(2)
    return np.asarray(np.where(apart, of(2), of(1)) if apart.any() else of(1))


def _served(setting: Setting, name: str, requests: Array) -> Array | float:
    """What runs took over their stages where runs of one's own machine were measured, by requests of one rank."""
    curve = setting.decode_curves.curves.get(name)
    return 1.0 if curve is None else curve.bent(requests)


def _together(setting: Setting, rows: Array) -> Array:
    """What both halves in one process take longer per layer, where that was measured."""
    curve = setting.decode_curves.curves.get("together")
    return np.zeros_like(rows) if curve is None else np.asarray(curve.launch + curve.per_group * rows)


def prompt_seconds(
    setting: Setting,
    attention_chip: Hardware,
    expert_chip: Hardware,
    tensor_parallel: int,
    ranks: Array,
    expert_devices: Array,
    together: int = 1,
) -> tuple[Array, Array]:
    """(attention seconds per prompt on its rank, expert seconds per prompt on each rank's behalf): 0 when prompts are
    prefilled elsewhere. Experts are shared by all ranks, so each prompt takes 1/devices of its work on each. Tokens
    whose KV is found are not computed; the others attend to them. `together`: prompts of one step, which share its pass
    over the experts' weights."""
    like = 0.0 * (ranks + expert_devices)
    if setting.workload.decode_only:
        return like, like
    shape, before = setting.held, setting.workload.mean_prompt * setting.found.found_share
    tokens = np.array([setting.workload.mean_prompt - before])
    attention = prefill_step(
        shape, attention_chip, setting.curves, setting.precision, tokens, before, tensor_parallel
    )[0]
    moe = shape.experts
    skew = skew_of(setting.routing, moe.experts, np.asarray(expert_devices))
    at_once = tokens * together
    rows = at_once * moe.top_k * ranks / expert_devices * skew
    active = np.minimum(
        active_experts(setting.routing, moe.experts, moe.top_k, at_once * ranks) / expert_devices, rows
    )
    layer = (
        expert_layer(shape, expert_chip, setting.curves, setting.precision.experts, rows, active) / together
    )
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


JITTER = 0.02
"""Mean random lengthening of every stage, as `afserve simulate` plays it."""
_P99 = 2.326


def lengthened(ranks: Array) -> Array:
    """What stages that jitter add to a step of so many ranks: the slowest of them has `JITTER` times the harmonic
    number, as exponential times have, and half of that is hidden by stages that wait anyway. Played on 24 to 504
    ranks it is 0.6 % to 7.3 %, here 3.8 % to 6.8 %."""
    return np.asarray(JITTER / 2 * (np.log(np.maximum(ranks, 1.0)) + 0.577))


def _many(met: Array, variation: float) -> Array:
    """Prompts at the 99th percentile over their mean, where a request meets so many while it is answered: Poisson."""
    return np.asarray(1 + _P99 * np.sqrt((1 + variation) / np.maximum(met, 1.0)))


def _finish(
    setting: Setting,
    parts: RawStages,
    prompt: tuple[Array, Array],
    resident: Array,
    factor: Array,
    ranks: Array,
) -> Stages:
    """Add prompts: while one request writes its answer, its rank also reads one prompt; the busiest of attention,
    experts and what brings KV pays. A prompt waits as in an M/G/1 queue: long prompts among short ones make everybody
    wait longer than equal ones would."""
    step = parts.step * factor
    prompt = prompt[0] * factor, prompt[1] * factor
    per_prompt = np.maximum(larger(prompt[0], prompt[1]), setting.fetching)
    turnover = resident if not setting.concurrency else larger(resident - 1, 0.0 * resident)
    prompts = turnover * setting.tokens_per_step / setting.workload.mean_answer
    if setting.percentile99:
        prompts = prompts * _many(turnover, setting.workload.prompt_variation)
        step = step * (1 + lengthened(ranks))
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
