"""A plan: one deployment with its predicted figures, and how to read them (what binds, how sure).

Built from a searched family and one of its layouts. Values only.
"""

from dataclasses import dataclass

import numpy as np

from afserve.pipeline import StageTimes
from afserve.placement.hardware import Hardware
from afserve.placement.perf import Setting
from afserve.placement.search import Family

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

    limited_by: what keeps the batch from growing (memory, SLO, search limit). bound_by: what the busiest station waits
    for (bandwidth, compute, link, latency), after memory. stages: seconds per MoE layer and micro-batch.
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

    @property
    def devices(self) -> int:
        return self.attention.devices + (self.experts.devices if self.kind == "afd" else 0)

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
        return self.ranks * self.batch * self.micro_batches

    def bubbles(self) -> dict[str, float]:
        """Idle share per station; colocated has one compute station."""
        return self.stages.bubbles(self.layers, self.micro_batches)


def outline(family: Family, setting: Setting, index: int, batch: float, memory_limit: float) -> Plan:
    """The plan of layout `index` of `family` at `batch`."""
    only = np.arange(len(family.ranks)) == index
    one = family.subset(only)
    stages = one.stages(setting, np.array([batch]))
    ranks, experts = int(one.ranks[0]), int(one.expert_devices[0])
    attention_devices = ranks * family.tensor_parallel
    times = StageTimes(
        *(float(value[0]) for value in (stages.attention, stages.experts, stages.dispatch, stages.combine)),
        outside=float(stages.outside[0]),
    )
    core = float(stages.core[0])
    busiest, bound = _binding(family, setting, times, core)
    tpot = float(stages.tpot[0])
    expert_chip = family.experts if family.kind == "afd" else family.attention
    cost = attention_devices * family.attention.usd_per_hour + experts * expert_chip.usd_per_hour
    watts = attention_devices * family.attention.watts + experts * expert_chip.watts
    return Plan(
        kind=family.kind,
        attention=_side(family.attention, attention_devices, family.tensor_parallel),
        experts=_side(expert_chip, experts or attention_devices, 1),
        micro_batches=family.micro_batches,
        batch=int(batch),
        ranks=ranks,
        tpot=tpot,
        ttft=float(stages.first_token[0]),
        prefill_share=float(stages.prefill_share[0]),
        tok_s=ranks * batch * family.micro_batches / tpot,
        usd_per_hour=cost,
        watts=watts,
        limited_by="memory" if batch >= memory_limit else "SLO",
        busiest=busiest,
        bound_by=bound,
        error=_error(setting, times, core),
        stages=times,
        layers=setting.shape.experts.layers,
        decode_only=setting.workload.decode_only,
    )


def _side(chip: Hardware, devices: int, tensor_parallel: int) -> Side:
    return Side(chip.name, devices, -(-devices // chip.devices), tensor_parallel)


def _binding(family: Family, setting: Setting, times: StageTimes, core: float) -> tuple[str, str]:
    """(busiest station, what it waits for). A layer longer than its busiest station's turns waits for latency."""
    turn = (
        times.attention + times.experts if family.kind == "colocated" else max(times.attention, times.experts)
    )
    turn = max(turn, times.dispatch, times.combine)
    if family.micro_batches * turn < 0.98 * times.round_trip:
        return "round trip", "link" if times.dispatch + times.combine > 0.4 * times.round_trip else "latency"
    if turn in (times.dispatch, times.combine):
        return "transfer", "link"
    if times.attention >= times.experts:
        return "attention", "bandwidth" if _memory_bound(
            family, setting
        ) or core > 0.5 * times.attention else "compute"
    return "experts", _expert_bound(family, setting)


def _memory_bound(family: Family, setting: Setting) -> bool:
    """Whether cached attention on this chip reads longer than it multiplies."""
    chip, kv = family.attention, setting.precision.kv
    flops, read = 0.0, 0.0
    for group in setting.shape.attention:
        curve = setting.curves.pick("core", kv, group.kind)
        flops += group.layers * group.pair_flops / (chip.flops("bf16") * curve.compute)
        read += (
            group.layers * group.kv_elems * (2.0 if kv == "bf16" else 1.0) / (chip.bandwidth * curve.memory)
        )
    return read >= flops


def _expert_bound(family: Family, setting: Setting) -> str:
    """Compare against a chip with 10 % more bandwidth: if the stage shortens more than by FLOPs, bandwidth binds."""
    tokens = np.array([256.0])
    rows_per_expert = tokens[0] * setting.shape.experts.top_k / setting.shape.experts.experts
    chip = family.experts if family.kind == "afd" else family.attention
    ridge = chip.flops(setting.precision.experts) / chip.bandwidth / 2
    return "bandwidth" if rows_per_expert < ridge else "compute"


def _error(setting: Setting, times: StageTimes, core: float) -> float:
    """The curves' spreads weighted by their share of the busiest half, and the model's own from validation."""
    curves, precision = setting.curves, setting.precision
    kind = setting.shape.attention[0].kind
    total = times.attention + times.experts
    parts = (
        (core, curves.pick("core", precision.kv, kind).spread),
        (times.attention - core, curves.pick("gemm", precision.attention).spread),
        (times.experts, curves.pick("experts", precision.experts).spread),
    )
    own = sum((seconds / total * spread) ** 2 for seconds, spread in parts if total > 0)
    return float((own + curves.model_spread**2) ** 0.5)
