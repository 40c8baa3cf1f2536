"""A plan: one deployment with its predicted figures, what binds it, and how certain the figures are.

It is built from a family of deployments that was searched and one of its layouts. Values only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from afserve.placement.pipeline import StageTimes
from afserve.placement.planner.perf.drafting import NO_DRAFTS, Drafts
from afserve.placement.planner.perf.engine_rows import ClosestRow, Like
from afserve.placement.planner.perf.first_token import crowd_of, first_token
from afserve.placement.planner.perf.halves import attention_half, expert_half
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.prefill import decoding_only
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import Stages
from afserve.placement.planner.search import PlanFamily

HOUR, MILLION = 3600.0, 1e6
WITHIN_80 = 1.2816
"""Standard deviations that hold 80 % of a normal distribution, to either side."""
DRAFTING = 0.1
"""One standard deviation of what drafting takes in an engine that was measured without; an assumption."""


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

    limited_by: what keeps the batch from growing (memory, SLO, the objective, or the search when none does). bound_by:
    what the busiest station waits for (bandwidth, compute, link, latency). stages: seconds per MoE layer and
    micro-batch. half_width: of the 80 % interval of log TPOT. prefill: devices that only read prompts, None where
    those of attention do. prompt_parts: of those, how many share each prompt; prompt_alone: what the first token would
    take with one of them, seconds. drafts: of each sequence in a step; what is not known of their acceptance is in
    error and half_width. closest: the row of the engine that is most like it, None where nothing was measured. asked:
    requests that clients keep in flight, 0 where they come at random. instances: how many of it a rate takes.
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
    instances: int = 1

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
        places = self.ranks * self.batch * self.micro_batches
        return min(places, math.ceil(self.asked)) if self.asked else places

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


def plan_of(family: PlanFamily, setting: Setting, index: int, batch: float, limited_by: str) -> Plan:
    """The plan of layout `index` of `family` at `batch`; `limited_by` as in Plan."""
    only = np.arange(len(family.ranks)) == index
    one = family.subset(only)
    stages = one.stages(setting, np.array([batch]))
    alone = stages if stages.prompt_parts[0] == 1 else one.stages(setting.never_split, np.array([batch]))
    ranks, experts = int(one.ranks[0]), int(one.expert_devices[0])
    attention_devices = ranks * family.tensor_parallel
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
    tok_s = ranks * batch * family.micro_batches / tpot
    if setting.concurrency:
        tok_s = min(tok_s, setting.concurrency / tpot)
    half_width = _half_width(one, _decoding_setting(one, setting), times, core, batch)
    expert_chip = family.experts if family.kind == "afd" else family.attention
    sliced = experts if setting.split_experts and experts else _columns(setting, experts or attention_devices)
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
        ttft=_first_token(one, setting, stages, batch),
        prefill_share=float(stages.prefill_share[0]),
        tok_s=tok_s,
        usd_per_hour=cost,
        watts=watts,
        limited_by=limited_by,
        busiest=busiest,
        bound_by=bound,
        error=half_width / WITHIN_80,
        stages=times,
        layers=setting.shape.experts.layers,
        decode_only=setting.workload.decode_only and setting.prefill is None,
        engine=setting.engine.name,
        half_width=half_width,
        prefill=reading,
        prompt_parts=int(stages.prompt_parts[0]),
        prompt_alone=float(alone.first_token[0]),
        drafts=setting.drafts,
        asked=setting.concurrency,
        closest=_closest(one, _decoding_setting(one, setting), batch),
    )


def _closest(family: PlanFamily, setting: Setting, batch: float) -> ClosestRow | None:
    return setting.engine.rows.closest(layout_like(family, setting), *_size(family, batch))


def _size(family: PlanFamily, batch: float) -> tuple[float, float]:
    """(requests in decode, devices that decode) of the one layout of `family`."""
    requests = float(family.ranks[0] * batch * family.micro_batches)
    return requests, float(family.ranks[0] * family.tensor_parallel + family.expert_devices[0])


def _first_token(family: PlanFamily, setting: Setting, stages: Stages, batch: float) -> float:
    """The closed form's, or that of clients which keep a fixed number of requests in flight."""
    if not setting.concurrency or family.kind == "afd":
        return float(stages.first_token[0])
    resident = np.array([batch * family.micro_batches])
    crowd = crowd_of(setting, family.attention, family.tensor_parallel, family.ranks, resident, stages.tpot)
    like, requests = layout_like(family, setting), family.ranks * resident
    factor = setting.engine.wait_factor(like, requests, family.ranks * family.tensor_parallel)
    return float(first_token(crowd, setting.engine.wait, factor)[0])


def layout_like(family: PlanFamily, setting: Setting) -> Like:
    """What measured rows are compared with, for the one layout of `family`."""
    if family.kind == "afd":
        return setting.like(family.attention, "afd")
    one = "tp" if setting.split_experts else "tp ep"
    return setting.like(family.attention, "dp" if family.ranks[0] > 1 else one)


def _decoding_setting(family: PlanFamily, setting: Setting) -> Setting:
    return setting if family.prefill is None else decoding_only(setting)


def _half_width(family: PlanFamily, setting: Setting, times: StageTimes, core: float, batch: float) -> float:
    """From rows that were measured of the engine; where there are none, from the spreads of its curves. Drafts add
    what is not known of their acceptance, and of an engine that nobody measured with drafts."""
    drafted = setting.drafts.tokens > 0 and not setting.engine.rows.drafted
    more = WITHIN_80 * math.hypot(setting.drafts.deviation, DRAFTING * drafted)
    return math.hypot(_own_width(family, setting, times, core, batch), more)


def _own_width(family: PlanFamily, setting: Setting, times: StageTimes, core: float, batch: float) -> float:
    if not setting.engine.measured:
        return WITHIN_80 * _error(family, setting, times, core)
    return setting.engine.half_width(layout_like(family, setting), *_size(family, batch))


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


def _step_seconds(setting: Setting) -> float:
    """Seconds of a step that belong to no layer; none where the next step is prepared meanwhile."""
    return 0.0 if setting.steps_ahead else setting.curves.pick("step", setting.precision.attention).launch


def _error(family: PlanFamily, setting: Setting, times: StageTimes, core: float) -> float:
    """The curves' spreads weighted by their share of a layer, and the model's own from validation."""
    curves, precision = setting.curves, setting.precision
    kind, layer = setting.shape.attention[0].kind, curves.pick("attention_layer", precision.attention)
    total = times.attention + times.experts
    parts = (
        (core, curves.pick("core", precision.kv, kind).spread),
        (times.attention - core, curves.pick("gemm", precision.attention).spread),
        (times.experts, curves.pick("experts", precision.experts).spread),
        (layer.launch, layer.spread),
        (_step_seconds(setting) / setting.shape.layers, curves.pick("step", precision.attention).spread),
    )
    own = sum((seconds / total * spread) ** 2 for seconds, spread in parts if total > 0)
    model = max(curves.spread_on(family.attention.rows_name), curves.spread_on(family.experts.rows_name))
    return float((own + model**2) ** 0.5)
