"""What is searched: families of deployments, each with its layouts, and what stages and memory say of them.

A family fixes hardware, tensor parallelism and micro-batches and spans a grid of attention ranks x expert devices;
`batches.py` finds each layout's largest batch. It prints and reads nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.first_token import readers_keep_up
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.kv import expert_weight_bytes, shared_weight_bytes
from afserve.placement.planner.perf.prefill import (
    PrefillInstance,
    decoding_only,
    ended,
    reader,
    with_reader,
)
from afserve.placement.planner.perf.room import hold_experts, largest_batch
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import Stages, afd_stages, colocated_stages, prompt_seconds

Array = NDArray[np.float64]
HERE, APART = "here", "apart"
GRID = 64
BATCH_LIMIT = 8192
TENSOR_PARALLEL = (1, 2, 4, 8)
DECODERS = (1, 2, 3, 4, 6)
"""Colocated instances that decode beside the devices that read their prompts."""


@dataclass(frozen=True, slots=True)
class DevicePool:
    """endless: as many devices as it takes are to be had; `count` is then of one instance at most."""

    chip: Hardware
    count: int
    endless: bool = False

    def __str__(self) -> str:
        return f"any number of {self.chip.name}" if self.endless else f"{self.count} {self.chip.name}"


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; infinity = no target."""

    tpot: float = float("inf")
    ttft: float = float("inf")


@dataclass(frozen=True, slots=True)
class GivenLayout:
    """What of a layout is given and not sought; 0 = sought. devices: of a colocated deployment. running: requests that
    an engine is configured to decode at once. slices: each device has a slice of every expert; hosts of one device then
    split attention over the network too."""

    attention_devices: int = 0
    expert_devices: int = 0
    devices: int = 0
    tensor_parallel: int = 0
    running: int = 0
    slices: bool = False


ANY = GivenLayout()


@dataclass(frozen=True, slots=True, eq=False)
class ReaderFigures:
    """What no batch changes of devices that only read prompts. one: an instance of them, None where none fits.
    decoding: the setting of those that decode. experts: seconds that shared experts spend on a prompt of each rank."""

    one: PrefillInstance | None
    decoding: Setting
    experts: Array

    def subset(self, keep: NDArray[np.bool_]) -> "ReaderFigures":
        return ReaderFigures(self.one and self.one.subset(keep), self.decoding, self.experts[keep])


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """One kind of deployment; `ranks` and `expert_devices` are flat arrays of layouts (0 experts: colocated). prefill:
    what reads prompts, of which `offered` devices are there for all roles; None where those that decode read them.
    decoders: colocated instances that decode, of `ranks` each, whose prompts are read by the same devices; an array
    where layouts of several counts are searched together, as families of their own. reads: what is known
    of `prefill` where it was computed once for many batches (`with_reads`)."""

    kind: str
    attention: Hardware
    experts: Hardware
    tensor_parallel: int
    micro_batches: int
    ranks: Array
    expert_devices: Array
    prefill: Hardware | None = None
    offered: int = 0
    decoders: int | Array = 1
    reads: "ReaderFigures | None" = None

    @property
    def decode_devices(self) -> Array:
        """Attention devices, or colocated ones, of all instances that decode."""
        return np.asarray(self.ranks * self.tensor_parallel * self.decoders)

    def stages(self, setting: Setting, batch: Array) -> Stages:
        if self.prefill is None:
            return self._decoding(setting, batch)
        reads, resident = self.reads or self._reading(setting), batch * self.micro_batches
        assert reads.one is not None, "its batch limit is 0"
        beside = ended(setting, resident) * reads.experts
        stages = self._decoding(reads.decoding, batch, beside)
        return with_reader(
            setting, stages, reads.one, self.prefill, self.attention, self.ranks * resident * self.decoders
        )

    def decodes(self, setting: Setting, batch: Array, tpot: Array) -> NDArray[np.bool_]:
        """Whether readers that are given bring so many to decode; True where they are not given."""
        if setting.prefill is None or not setting.concurrency or self.kind == "afd":
            return np.ones(np.shape(batch), dtype=bool)
        resident = batch * self.micro_batches
        return readers_keep_up(setting, self.attention, self.tensor_parallel, self.ranks, resident, tpot)

    def left_for_prefill(self) -> Array:
        """Devices of that kind that no rank and no expert has."""
        left = np.full_like(self.ranks, float(self.offered))
        if self.prefill is not None and self.prefill.name == self.attention.name:
            left = left - self.decode_devices
        if self.prefill is not None and self.kind == "afd" and self.prefill.name == self.experts.name:
            left = left - self.expert_devices
        return left

    def _decoding(self, setting: Setting, batch: Array, other_work: Array | float = 0.0) -> Stages:
        if self.kind == "colocated":
            return colocated_stages(
                setting, self.attention, self.tensor_parallel, self.micro_batches, self.ranks, batch
            )
        return afd_stages(
            setting,
            self.attention,
            self.experts,
            self.tensor_parallel,
            self.micro_batches,
            self.ranks,
            self.expert_devices,
            batch,
            other_work,
        )

    def _reading(self, setting: Setting) -> "ReaderFigures":
        assert self.prefill is not None, "somebody reads"
        if self.kind == "colocated":
            one = reader(setting, self.prefill, None, self.expert_devices)
            return ReaderFigures(one, decoding_only(setting), np.zeros_like(self.ranks))
        one = reader(setting, self.prefill, self.experts, self.expert_devices)
        shared = prompt_seconds(setting, self.prefill, self.experts, 1, self.ranks, self.expert_devices)[1]
        return ReaderFigures(one, decoding_only(setting), shared)

    def with_reads(self, setting: Setting) -> "PlanFamily":
        """The same, for many batches under this one setting."""
        return self if self.prefill is None else replace(self, reads=self._reading(setting))

    def subset(self, keep: NDArray[np.bool_]) -> "PlanFamily":
        return replace(
            self,
            ranks=self.ranks[keep],
            expert_devices=self.expert_devices[keep],
            decoders=self.decoders if isinstance(self.decoders, int) else self.decoders[keep],
            reads=self.reads and self.reads.subset(keep),
        )

    def by_decoders(self) -> "tuple[PlanFamily, ...]":
        """A family for each count of instances that decode, in rising order."""
        if isinstance(self.decoders, int):
            return (self,)
        counts = self.decoders
        return tuple(
            replace(self.subset(counts == count), decoders=int(count)) for count in np.unique(counts)
        )

    def batch_limit(self, setting: Setting, running: int = 0) -> Array:
        """Requests per rank and micro-batch: no more than memory allows, than clients keep in flight, and than are
        `running` at once where that is configured. 0 where weights or copies do not fit."""
        most = self._room(setting)
        if self.prefill is not None:
            reads = self.reads or self._reading(setting)
            most = most * (reads.one is not None) * (self.left_for_prefill() >= 1)
        for asked in (setting.concurrency, float(running)):
            if asked:
                most = np.minimum(most, np.ceil(asked / (self.ranks * self.micro_batches)))
        return most

    def _room(self, setting: Setting) -> Array:
        """Requests per rank and micro-batch that memory allows; 0 where weights or copies do not fit."""
        shape, precision, copies = setting.held, setting.precision, setting.routing.copies
        if self.kind == "colocated":
            resident = expert_weight_bytes(
                shape, precision, setting.routing, self.ranks * self.tensor_parallel
            )
            fits = self.ranks * self.tensor_parallel >= copies
        else:
            elsewhere = setting.shared_on_experts and not setting.engine.own
            moved = shared_weight_bytes(shape, precision) if elsewhere else 0.0
            resident = np.full_like(self.ranks, -moved / self.tensor_parallel)
            needed = expert_weight_bytes(shape, precision, setting.routing, self.expert_devices)
            needed = needed + moved / np.maximum(self.expert_devices, 1.0)
            fits = hold_experts(setting, self.experts, needed) & (self.expert_devices >= copies)
        most = largest_batch(setting, self.attention, self.tensor_parallel, resident)
        return np.where(fits, np.minimum(np.floor(most / self.micro_batches), BATCH_LIMIT), 0.0)


def families(
    pools: list[DevicePool],
    micro_batches: tuple[int, ...],
    kinds: tuple[str, ...],
    layout: GivenLayout = ANY,
    prompts: tuple[str, ...] = (HERE,),
) -> Iterator[PlanFamily]:
    """Every family over these pools: colocated on each kind, AFD on one kind and on each ordered pair. prompts: read by
    what decodes (HERE), by devices of their own on each kind (APART), or tried both ways."""
    for family in _without_readers(pools, micro_batches, kinds, layout):
        if HERE in prompts:
            yield family
        for pool in pools if APART in prompts else ():
            apart = replace(family, prefill=pool.chip, offered=pool.count)
            if family.kind == "colocated" and layout == ANY:
                counts, several = np.array(DECODERS), len(DECODERS)
                apart = replace(
                    apart,
                    ranks=np.tile(apart.ranks, several),
                    expert_devices=np.tile(apart.expert_devices, several),
                    decoders=np.repeat(counts, len(apart.ranks)),
                )
            apart = apart.subset(_held(apart, pools))
            if len(apart.ranks):
                yield apart


def _held(family: PlanFamily, pools: list[DevicePool]) -> NDArray[np.bool_]:
    """Layouts of which the pools hold all instances that decode, and one device more."""
    count = next(pool.count for pool in pools if pool.chip.name == family.attention.name)
    return np.asarray((family.left_for_prefill() >= 1) & (family.decode_devices <= count))


def _without_readers(
    pools: list[DevicePool], micro_batches: tuple[int, ...], kinds: tuple[str, ...], layout: GivenLayout
) -> Iterator[PlanFamily]:
    for pool in pools:
        for tensor_parallel in _parallel(pool, layout):
            if "colocated" in kinds:
                ranks = _counts(pool, tensor_parallel, layout.devices)
                if not layout.devices:
                    ranks = ranks[_tidy(pool, ranks * tensor_parallel)]
                for m in sorted({1, 2} & {1, *micro_batches}):
                    yield PlanFamily("colocated", pool.chip, pool.chip, tensor_parallel, m, ranks, 0 * ranks)
    if "afd" not in kinds:
        return
    for attention in pools:
        for experts in pools:
            for tensor_parallel in _parallel(attention, layout):
                ranks, devices = _layouts(attention, experts, tensor_parallel, layout)
                for m in micro_batches if len(ranks) else ():
                    yield PlanFamily("afd", attention.chip, experts.chip, tensor_parallel, m, ranks, devices)


def _parallel(pool: DevicePool, layout: GivenLayout) -> list[int]:
    if layout.tensor_parallel:
        return [layout.tensor_parallel]
    joined = 8 if layout.slices and pool.chip.devices == 1 else max(pool.chip.fast_domain, 1)
    return [t for t in TENSOR_PARALLEL if t <= min(joined, pool.count, 8)]


def _counts(pool: DevicePool, group: int, devices: int = 0) -> Array:
    """How many groups of so many devices: any number within one node, then whole nodes (GRID numbers of them, as close
    for few as for many, where there are more), and the whole pool; or as many as make `devices`."""
    if devices:
        fits = devices % group == 0 and devices <= pool.count
        return np.array([devices / group] if fits else [], dtype=np.float64)
    groups, node = pool.count // group, max(1, pool.chip.devices // group)
    nodes = groups // node
    beyond = node * (np.arange(1, nodes + 1) if nodes <= GRID else np.rint(np.geomspace(1, nodes, GRID)))
    within = np.arange(1, min(node, groups) + 1)
    return np.unique(np.concatenate([within, beyond, [groups] * (groups > 0)])).astype(np.float64)


def _tidy(pool: DevicePool, devices: Array) -> NDArray[np.bool_]:
    """Whole nodes, equal parts of one node, or the whole pool: nobody offers 64 devices in nodes of 8 to use 63."""
    node = pool.chip.devices
    part = (devices <= node) & (node % np.maximum(devices, 1) == 0)
    return np.asarray((devices % node == 0) | part | (devices == pool.count))


def _layouts(
    attention: DevicePool, experts: DevicePool, tensor_parallel: int, layout: GivenLayout
) -> tuple[Array, Array]:
    """Every pair of counts. Of one kind on both sides: every pair of up to GRID devices, and of counts beyond, with a
    tidy sum."""
    same = attention.chip.name == experts.chip.name
    given = bool(layout.attention_devices or layout.expert_devices)
    if given:
        ranks = _counts(attention, tensor_parallel, layout.attention_devices)
        devices = _counts(experts, 1, layout.expert_devices)
    elif same and attention.count <= GRID:
        ranks, devices = (np.arange(1.0, attention.count // group + 1) for group in (tensor_parallel, 1))
    else:
        ranks, devices = _counts(attention, tensor_parallel), _counts(experts, 1)
    grid_ranks, grid_devices = (grid.ravel() for grid in np.meshgrid(ranks, devices, indexing="ij"))
    if not same:
        return grid_ranks, grid_devices
    if not given and attention.count > GRID:
        few = _layouts(replace(attention, count=GRID), replace(experts, count=GRID), tensor_parallel, layout)
        both = [np.concatenate(pair) for pair in zip((grid_ranks, grid_devices), few, strict=True)]
        first = np.unique(both[0] * (attention.count + 1) + both[1], return_index=True)[1]
        grid_ranks, grid_devices = (counts[first] for counts in both)
    total = grid_ranks * tensor_parallel + grid_devices
    keep = (total <= attention.count) & (given | _tidy(attention, total))
    return grid_ranks[keep], grid_devices[keep]
