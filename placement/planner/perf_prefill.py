"""Devices that only read prompts, beside those that decode: how many a plan needs, and how long a first token takes.

With AFD they are attention devices of their own kind, and share the experts with decoding: three pools. Colocated, each
instance of them has all experts. They are as many as keep them busy for `BUSY` of the time. It searches nothing.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.hardware import Hardware
from afserve.placement.planner.kv import attention_weight_bytes, cache_bytes, expert_weight_bytes
from afserve.placement.planner.perf import Stages, prompt_seconds
from afserve.placement.planner.setting import Setting

Array = NDArray[np.float64]
BUSY = 0.8
"""Share of its time that a device may read prompts: at 0.8 a prompt waits for about two others on one device, for less
than half of one on eight (M/M/c)."""


@dataclass(frozen=True, slots=True)
class Reader:
    """One prompt on one of the instances that read prompts. size: devices of an instance. seconds: it is busy with a
    prompt. latency: until the prompt is read; prompts from other devices share its experts. moved: bytes of cache."""

    size: float
    seconds: Array
    latency: Array
    moved: float


def decoding_only(setting: Setting) -> Setting:
    """What the devices that decode see: prompts are read elsewhere."""
    return replace(setting, workload=replace(setting.workload, decode_only=True))


def expert_seconds_for_prompts(
    setting: Setting, attention: Hardware, experts: Hardware, ranks: Array, devices: Array, resident: Array
) -> Array:
    """Seconds per decode step that shared experts spend on prompts: one for each request that ends, on all ranks."""
    together = prompt_seconds(setting, attention, experts, 1, ranks, devices)[1]
    ended = resident * setting.tokens_per_step / setting.workload.mean_answer
    return np.asarray(ended * together)


def reader(
    setting: Setting, chip: Hardware, experts: Hardware | None, expert_devices: Array
) -> Reader | None:
    """An instance of `chip`: one attention device beside `expert_devices` of `experts`, or colocated where that is
    None, as few devices as hold the model. None where it does not fit."""
    shape, precision = setting.shape, setting.precision
    moved = cache_bytes(shape, precision, setting.workload.mean_prompt)
    own = attention_weight_bytes(shape, precision, 1) + moved
    room = chip.memory * setting.engine.memory
    if experts is not None:
        attention, read = prompt_seconds(setting, chip, experts, 1, np.ones(1), expert_devices)
        busy, latency = np.maximum(attention, setting.fetching), setting.fetching + attention + read
        return Reader(1.0, busy, latency, moved) if own <= room else None
    for size in 2.0 ** np.arange(11):
        held = expert_weight_bytes(shape, precision, setting.routing, np.array([size]))
        if own + float(held[0]) <= room:
            one = np.full_like(expert_devices, size)
            attention, read = prompt_seconds(setting, chip, chip, 1, one, one)
            busy = np.maximum(attention + read, setting.fetching) / size
            return Reader(float(size), busy, setting.fetching + attention + read, moved)
    return None


def with_reader(
    setting: Setting, stages: Stages, found: Reader, chip: Hardware, decoding: Hardware, requests: Array
) -> Stages:
    """`stages` of decoding `requests` at once, with the devices that read their prompts on `chip` and the first token:
    the wait for a free instance, the prompt, its cache over the slower network, one step."""
    rate = requests / stages.tpot / setting.workload.mean_answer
    busy = np.maximum(found.seconds, found.moved / chip.network / found.size)
    instances = np.maximum(np.ceil(rate * busy / BUSY), 1.0)
    share = rate * busy / instances
    queue = share ** (np.sqrt(2 * (instances + 1)) - 1) / (1 - np.minimum(share, 0.999))
    wait = busy / instances * queue * (1 + setting.workload.prompt_variation) / 2
    moving = found.moved / min(chip.network, decoding.network)
    first = wait + found.latency + moving + stages.first_token
    return replace(stages, first_token=np.asarray(first), prefill=np.asarray(instances * found.size))
