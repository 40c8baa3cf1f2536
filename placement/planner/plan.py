"""A plan: one deployment with its predicted figures, what binds it, and how certain the figures are.

It is built from a family of deployments that was searched and one of its layouts. Values only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from afserve.placement.pipeline import StageTimes
from afserve.placement.planner.interval import (
    WITHIN_80,
    closest_row,
    decoding_setting,
    half_width,
    outside_of,
)
from afserve.placement.planner.perf.drafting import NO_DRAFTS, Drafts
from afserve.placement.planner.perf.engine_rows import ClosestRow
from afserve.placement.planner.perf.first_token import served_first_token
from afserve.placement.planner.perf.halves import attention_half, expert_half
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import Stages
from afserve.placement.planner.search import PlanFamily

HOUR, MILLION = 3600.0, 1e6


@dataclass(frozen=True, slots=True)
class Side:
    """The devices of one half. `nodes` are hosts of that hardware, rounded up."""

    hardware: str
    devices: int
    nodes: int
    tensor_parallel: int


@dataclass(frozen=True, slots=True)
class Plan:
    """batch: requests per attention rank and micro-batch. error: one standard deviation of tpot, relative.

    limited_by: what keeps the batch from growing (memory, SLO, the objective, readers that bring no more, or the search
    when none does). bound_by:
    what the busiest station waits for (bandwidth, compute, link, latency). stages: seconds per MoE layer and
    micro-batch. half_width: of the 80 % interval of log TPOT. prefill: devices that only read prompts, None where
    those of attention do. prompt_parts: of those, how many share each prompt; prompt_alone: what the first token would
    take with one of them, seconds. drafts: of each sequence in a step; what is not known of their acceptance is in
    error and half_width. closest: the row of the engine that is most like it, None where nothing was measured. asked:
    requests that clients keep in flight, 0 where they come at random. outside: what no
    measured row has. instances: how many of it a rate takes.
    decoders: colocated instances that decode, of `ranks` each, beside `prefill`; `attention` has the devices of all.
    """

    kind: str
    attention: Side
    experts: Side
    micro_batches: int
    batch: int
    ranks: int
    tpot: float
    ttft: float
    prefill_share: float
    tok_s: float
    usd_per_hour: float
    watts: float
    limited_by: str
    busiest: str
    bound_by: str
    error: float
    stages: StageTimes
    layers: int
    decode_only: bool
    engine: str = ""
    half_width: float = 0.0
    prefill: Side | None = None
    prompt_parts: int = 1
    prompt_alone: float = 0.0
    drafts: Drafts = NO_DRAFTS
    closest: ClosestRow | None = None
    asked: float = 0.0
    outside: tuple[str, ...] = ()
    instances: int = 1
    decoders: int = 1

    @property
    def devices(self) -> int:
        reading = self.prefill.devices if self.prefill else 0
        return self.attention.devices + (self.experts.devices if self.kind == "afd" else 0) + reading

    @property
    def devices_used(self) -> dict[str, int]:
        """Devices by hardware."""
        sides = (self.prefill, self.attention, self.experts if self.kind == "afd" else None)
        found: dict[str, int] = {}
        for side in sides:
            if side is not None:
                found[side.hardware] = found.get(side.hardware, 0) + side.devices
        return found

    @property
    def tok_s_per_device(self) -> float:
        return self.tok_s / self.devices

    @property
    def usd_per_mtok(self) -> float:
        return self.usd_per_hour / HOUR / self.tok_s * MILLION

    @property
    def tokens_per_joule(self) -> float:
        return self.tok_s / self.watts if self.watts else 0.0

    @property
    def requests(self) -> int:
        """Requests in decode at once."""
        places = self.all_ranks * self.batch * self.micro_batches
        return min(places, math.ceil(self.asked)) if self.asked else places

    @property
    def all_ranks(self) -> int:
        """Of all instances that decode."""
        return self.ranks * self.decoders

    @property
    def all_devices(self) -> int:
        """Of all instances."""
        return self.instances * self.devices

    @property
    def interval(self) -> tuple[float, float]:
        """TPOT in seconds, 80 %."""
        factor = math.exp(self.half_width)
        return self.tpot / factor, self.tpot * factor

    @property
    def own_error(self) -> float:
        """Without that of the acceptance of drafts."""
        return math.sqrt(max(self.error**2 - self.drafts.deviation**2, 0.0))

    def bubbles(self) -> dict[str, float]:
        """Idle share per station; colocated has one compute station."""
        return self.stages.bubbles(self.layers, self.micro_batches)


def plan_of(
    family: PlanFamily, setting: Setting, index: int, batch: float, places: float, limited_by: str
) -> Plan:
    """The plan of layout `index` of `family` at `batch`; `limited_by` as in Plan. places: requests for which there is
    room, where fewer decode because readers bring no more."""
    family = one = family.subset(np.arange(len(family.ranks)) == index)
    decoders = int(np.max(family.decoders))
    stages = one.stages(setting, np.array([batch]))
    alone = stages if stages.prompt_parts[0] == 1 else one.stages(setting.never_split, np.array([batch]))
    ranks, experts = int(one.ranks[0]), int(one.expert_devices[0])
    attention_devices = ranks * family.tensor_parallel * decoders
    times = StageTimes(
        attention=float(stages.attention[0]),
        experts=float(stages.experts[0]),
        dispatch=float(stages.dispatch[0]),
        combine=float(stages.combine[0]),
        outside=float(stages.outside[0]),
    )
    core = float(stages.core[0])
    busiest, bound = _binding(one, setting, times, batch)
    tpot = float(stages.tpot[0])
    ttft = _first_token(one, setting, stages, places)
    tok_s = _rate(setting, ranks * batch * family.micro_batches * decoders, tpot, ttft)
    width = half_width(one, decoding_setting(one, setting), times, core, batch)
    expert_chip = family.experts if family.kind == "afd" else family.attention
    here = experts or ranks * family.tensor_parallel
    sliced = experts if setting.split_experts and experts else _columns(setting, here)
    cost = attention_devices * family.attention.usd_per_hour + experts * expert_chip.usd_per_hour
    watts = attention_devices * family.attention.watts + experts * expert_chip.watts
    reading = None
    if family.prefill is not None:
        reading = _side(family.prefill, int(stages.prefill[0]), 1)
        cost, watts = (
            cost + reading.devices * family.prefill.usd_per_hour,
            watts + reading.devices * family.prefill.watts,
        )
    return Plan(
        kind=family.kind,
        attention=_side(family.attention, attention_devices, family.tensor_parallel),
        experts=_side(expert_chip, experts or attention_devices, sliced),
        micro_batches=family.micro_batches,
        batch=int(batch),
        ranks=ranks,
        tpot=tpot,
        ttft=ttft,
        prefill_share=float(stages.prefill_share[0]),
        tok_s=tok_s,
        usd_per_hour=cost,
        watts=watts,
        limited_by=limited_by,
        busiest=busiest,
        bound_by=bound,
        error=width / WITHIN_80,
        stages=times,
        layers=setting.shape.experts.layers,
        decode_only=setting.workload.decode_only and setting.prefill is None,
        engine=setting.engine.name,
        half_width=width,
        prefill=reading,
        prompt_parts=int(stages.prompt_parts[0]),
        prompt_alone=float(alone.first_token[0]),
        drafts=setting.drafts,
        asked=setting.concurrency,
        decoders=decoders,
        outside=tuple(words for words, _ in outside_of(one, setting)),
        closest=closest_row(one, decoding_setting(one, setting), batch),
    )


def _rate(setting: Setting, places: float, tpot: float, ttft: float) -> float:
    """Tokens per second. A client that waits for an answer sends nothing meanwhile: what it waits for the first token
    counts too, where its prompts are planned (Little's law)."""
    rate, clients, answer = places / tpot, setting.concurrency, setting.workload.mean_answer
    if not clients:
        return rate
    read = setting.prefill is not None or not setting.workload.decode_only
    waiting = ttft / max(answer, 1.0) if read else 0.0
    return min(rate, clients / (tpot + waiting))


def _first_token(family: PlanFamily, setting: Setting, stages: Stages, places: float) -> float:
    """The closed form's, or that of clients which keep a fixed number of requests in flight."""
    if not setting.concurrency or family.kind == "afd":
        return float(stages.first_token[0])
    split, resident = family.tensor_parallel, np.array([places * family.micro_batches])
    return float(served_first_token(setting, family.attention, split, family.ranks, resident, stages.tpot)[0])


def _side(chip: Hardware, devices: int, tensor_parallel: int) -> Side:
    return Side(chip.name, devices, -(-devices // chip.devices), tensor_parallel)


def _columns(setting: Setting, devices: int) -> int:
    """How many devices share an expert's columns: more than one only when devices outnumber slots."""
    return max(1, -(-devices // setting.routing.slots(setting.shape.experts.experts)))


def _binding(family: PlanFamily, setting: Setting, times: StageTimes, batch: float) -> tuple[str, str]:
    """(busiest station, what it waits for). Where a layer lasts longer than the busiest station's turns, transfers are
    not hidden: both directions then count as one part of the round trip."""
    turn = (
        times.attention + times.experts if family.kind == "colocated" else max(times.attention, times.experts)
    )
    turn = max(turn, times.dispatch, times.combine)
    exposed = family.micro_batches * turn < 0.98 * times.round_trip
    moved = times.dispatch + times.combine if exposed else max(times.dispatch, times.combine)
    if moved > max(times.attention, times.experts):
        return "transfer", "link"
    if times.attention >= times.experts:
        return "attention", _waits_for(
            family.attention, lambda chip: _attention_seconds(family, setting, chip, batch)
        )
    chip = family.experts if family.kind == "afd" else family.attention
    return "experts", _waits_for(chip, lambda chip: _expert_seconds(family, setting, chip, batch))


def _waits_for(chip: Hardware, seconds: Callable[[Hardware], float]) -> str:
    """What shortens the stage most when it grows by a tenth: bandwidth, compute, or neither (latency)."""
    more = {
        "bandwidth": replace(chip, bandwidth=1.1 * chip.bandwidth),
        "compute": replace(
            chip,
            flops_bf16=1.1 * chip.flops_bf16,
            flops_fp8=1.1 * chip.flops_fp8,
            flops_fp4=1.1 * chip.flops_fp4,
        ),
    }
    base = seconds(chip)
    gains = {name: 1 - seconds(faster) / base for name, faster in more.items()}
    best = max(gains, key=gains.__getitem__)
    return best if gains[best] > 0.02 else "latency"


def _attention_seconds(family: PlanFamily, setting: Setting, chip: Hardware, batch: float) -> float:
    one = np.array([batch])
    return float(attention_half(setting, chip, family.tensor_parallel, family.ranks, one).moe_layers[0])


def _expert_seconds(family: PlanFamily, setting: Setting, chip: Hardware, batch: float) -> float:
    devices = family.expert_devices if family.kind == "afd" else family.ranks * family.tensor_parallel
    rows, sliced = family.ranks * batch * setting.rows_per_request, setting.split_experts
    slices = sliced if family.kind == "afd" else sliced & (family.ranks == 1)
    return float(expert_half(setting, chip, rows, devices, slices=slices)[0])
