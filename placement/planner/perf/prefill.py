"""Devices that only read prompts, beside those that decode: how many a plan needs, and how long a first token takes.

With AFD they are attention devices of their own kind, and share the experts with decoding: three pools. Colocated, each
instance of them has all experts. They are as many as keep them busy for `BUSY` of the time. Where one of AFD's would
miss the TTFT that is asked for, several read a prompt together, as `afserve up` lets them. It searches no layouts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.config import EngineSettings
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.kv import cache_bytes, expert_weight_bytes
from afserve.placement.planner.perf.room import cache_room
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import Stages, prompt_seconds

Array = NDArray[np.float64]
_STEP_TOKENS = EngineSettings().prefill_tokens  # of a prompt at most, as the engine is configured by default
BUSY = 0.8
"""Share of its time that a device may read prompts: at 0.8 a prompt waits for about two others on one device, for less
than half of one on eight (M/M/c)."""
MOST_PARTS = 16
"""Devices that share a prompt at most, as `comm/kv/split.py` has it."""


@dataclass(frozen=True, slots=True)
class PrefillInstance:
    """One prompt on one of the instances that read prompts. size: devices of an instance. seconds: it is busy with a
    prompt. latency: until the prompt is read; prompts from other devices share its experts. moved: bytes of cache.
    fetching: of the latency, until what is found is there. experts: of it, theirs. chunk: of the prompt, what one step
    reads, and `lag` of that in one layer. parts: devices that share each prompt."""

    size: float
    seconds: Array
    latency: Array
    moved: float
    fetching: float
    experts: Array
    chunk: float
    lag: float
    parts: int = 1

    def subset(self, keep: NDArray[np.bool_]) -> "PrefillInstance":
        """Of some of the layouts."""
        kept = (getattr(self, name)[keep] for name in ("seconds", "latency", "experts"))
        return replace(self, **dict(zip(("seconds", "latency", "experts"), kept, strict=True)))

    def among(self, parts: int, network: float) -> "PrefillInstance":
        """So many as one instance, each over `network` bytes per second: chunks go round, and each device sends the
        keys and values of its chunks to the others layer by layer. So each is a layer of a chunk behind the one
        before. What is sent is added, as by the servers that decide it (`engine/kv/moving`): that it goes while
        they compute is not counted upon. The experts are shared by all prompts already, and take as long."""
        computing = self.latency - self.fetching
        behind = (parts - 1) * self.lag * min(self.chunk, 1 / parts) * computing
        exchanged = (parts - 1) / parts * self.moved / network
        return replace(
            self,
            size=self.size * parts,
            seconds=np.maximum(self.seconds / parts + behind, exchanged),
            latency=self.fetching + np.maximum(computing / parts, self.experts) + behind + exchanged,
            parts=parts,
        )


def decoding_only(setting: Setting) -> Setting:
    """What the devices that decode see: prompts are read elsewhere."""
    return replace(setting, workload=replace(setting.workload, decode_only=True))


def ended(setting: Setting, resident: Array) -> Array:
    """Requests of a rank that end in a decode step: as many prompts are read for it."""
    return np.asarray(resident * setting.tokens_per_step / setting.workload.mean_answer)


def reader(
    setting: Setting, chip: Hardware, experts: Hardware | None, expert_devices: Array
) -> PrefillInstance | None:
    """An instance of `chip`: one attention device beside `expert_devices` of `experts`, or colocated where that is
    None, as few devices as hold the model, which read short prompts together. None where it does not fit."""
    shape, precision = setting.held, setting.precision
    prompt = setting.workload.mean_prompt
    moved = cache_bytes(shape, precision, prompt)
    computed = prompt * (1 - setting.found.found_share)
    step = _STEP_TOKENS / computed
    chunk = min(step, 1.0)
    fetching, lag = setting.fetching, 1 / shape.layers
    if experts is not None:
        attention, read = prompt_seconds(setting, chip, experts, 1, np.ones(1), expert_devices)
        busy, latency = np.maximum(attention, fetching), fetching + attention + read
        fits = moved <= cache_room(setting, chip, 1, 0.0, prompt).size
        return PrefillInstance(1.0, busy, latency, moved, fetching, read, chunk, lag) if fits else None
    for size in 2.0 ** np.arange(11):
        held = expert_weight_bytes(shape, precision, setting.routing, np.array([size]))
        if moved <= cache_room(setting, chip, 1, held, prompt).size[0]:
            one = np.full_like(expert_devices, size)
            attention, read = prompt_seconds(setting, chip, chip, 1, one, one)
            shared = prompt_seconds(setting, chip, chip, 1, one, one, max(int(step), 1))[1]
            busy, latency = np.maximum(attention + shared, fetching) / size, fetching + attention + read
            return PrefillInstance(
                float(size), busy, latency, moved, fetching, latency - fetching, chunk, lag
            )
    return None


def with_reader(
    setting: Setting,
    stages: Stages,
    found: PrefillInstance,
    chip: Hardware,
    decoding: Hardware,
    requests: Array,
) -> Stages:
    """`stages` of decoding `requests` at once, with the devices that read their prompts on `chip` and the first token.

    A prompt is split over the fewest devices of AFD that meet the TTFT of `setting`; over none where not even all do.
    """
    rate = requests / stages.tpot / setting.workload.mean_answer
    first, devices = _first_token(setting, stages.first_token, found, chip, decoding, rate)
    parts, late = np.ones_like(first), first > setting.ttft
    for count in range(2, MOST_PARTS + 1 if found.size == 1 else 0):
        if not late.any():
            break
        shared = found.among(count, chip.network)
        sooner, more = _first_token(setting, stages.first_token, shared, chip, decoding, rate)
        met = late & (sooner <= setting.ttft)
        first, devices = np.where(met, sooner, first), np.where(met, more, devices)
        parts, late = np.where(met, count, parts), late & ~met
    return replace(stages, first_token=first, prefill=devices, prompt_parts=parts)


def _first_token(
    setting: Setting, step: Array, found: PrefillInstance, chip: Hardware, decoding: Hardware, rate: Array
) -> tuple[Array, Array]:
    """(seconds to it, devices that read): the wait for a free instance, the prompt, its cache over the slower network,
    one step."""
    busy = np.maximum(found.seconds, found.moved * found.parts / chip.network / found.size)
    instances = np.maximum(np.ceil(rate * busy / BUSY), 1.0)
    share = rate * busy / instances
    queue = share ** (np.sqrt(2 * (instances + 1)) - 1) / (1 - np.minimum(share, 0.999))
    wait = busy / instances * queue * (1 + setting.workload.prompt_variation) / 2
    moving = found.moved / min(chip.network, decoding.network)
    return np.asarray(wait + found.latency + moving + step), np.asarray(instances * found.size)
