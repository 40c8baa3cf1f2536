"""The best layout of prefill and decode on equal devices, of each of four kinds, by simulated goodput.

`SHARED`: prefill and decode nodes use one pool of expert devices. `HOSTED`: every device has an expert node, and a
prefill or a decode node beside it. `TWO_COPIES`: instances that read prompts and instances that decode, each with a
copy of the experts. `MIXED`: instances that decode and read prompts in chunks. Of each, counts of devices, sizes of
ranks and of chunks are tried. Of shared experts there are too many: some are tried on a short run, then the best one's
neighbours. It knows no files and one kind of device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from afserve.config import MAX_MICRO_BATCHES
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.simulate.goodput import goodput
from afserve.placement.planner.simulate.phase_stages import Apart, Beside, Pieces, Together
from afserve.placement.planner.simulate.phase_tables import StageTables
from afserve.placement.planner.simulate.phases import GoodputTargets, PhaseLayout
from afserve.placement.planner.simulate.station import SimulatedRequest

SHARED, HOSTED, TWO_COPIES, MIXED = KINDS = (
    "shared experts",
    "shared experts on every device",
    "P/D, two copies",
    "mixed, chunked prefill",
)
CHUNKS = (1024, 2048, 4096)  # tokens of a rank that only reads prompts
MIXED_CHUNKS = (64, 128, 256, 512, 1024, 2048)
FLOORS = (1 / 16, 1 / 4, 1 / 2, 3 / 4)  # of the experts' time, for prompts that wait
DECODE_MICRO_BATCHES = (1, 2, 4)  # at most: one reads the experts least often, more hide attention and links
_SHORT = 2  # a first run has so many times fewer requests; where it is too short, bursts count for too much
_PARTS = 8  # a first search tries the parts of a pool in so many steps


@dataclass(frozen=True, slots=True)
class PhasePool:
    """`devices` of a kind, of which `node` share a host; instances of P/D are halves of hosts or several where there
    are more than two hosts. `stages` of an attention rank on one device, on two, and so on: instances with their own
    experts may have any of them."""

    stages: tuple[StageTables, ...]
    devices: int
    node: int

    @classmethod
    def from_question(cls, setting: Setting, chip: Hardware, devices: int) -> "PhasePool":
        """Ranks of one device, two, four and so on up to a host."""
        degrees = [2**power for power in range(chip.devices.bit_length())]
        return cls(tuple(StageTables(setting, chip, degree) for degree in degrees), devices, chip.devices)


@dataclass(frozen=True, slots=True)
class BestLayout:
    """Requests per second inside both targets."""

    rate: float
    layout: PhaseLayout

    @property
    def reads(self) -> int:
        """Devices that only read prompts."""
        return sum(pool.ranks * pool.tables.tensor_parallel for pool in self.layout.reads)


@dataclass(frozen=True, slots=True)
class PlayedLoad:
    """What is played: requests and targets."""

    asked: Sequence[SimulatedRequest]
    targets: GoodputTargets

    def rate(self, layout: PhaseLayout, *, above: float = 0.0, guess: float = 1.0) -> float:
        return goodput(layout, self.asked, self.targets, above=above, guess=guess)

    def shorter(self) -> "PlayedLoad":
        return PlayedLoad(self.asked[: max(len(self.asked) // _SHORT, 1)], self.targets)


def search(kind: str, pool: PhasePool, load: PlayedLoad, pieces: Pieces) -> dict[int, BestLayout]:
    """The best for each number of devices that only read prompts, most requests per second first; empty where the
    model does not fit."""
    for stages in pool.stages:
        stages.forget_steps()  # pools of another kind are not alike
    if kind in (SHARED, HOSTED):
        hosted = kind == HOSTED
        tried = replay(_best(_shared(pool, pieces, hosted), load.shorter(), {}).values(), load)
        found = _closer(pool, load, tried) if tried else {}
    else:
        found = _best(_two_copies(pool) if kind == TWO_COPIES else _mixed(pool), load, {})
    return _ranked(found.values())


def replay(known: Iterable[BestLayout], load: PlayedLoad) -> dict[int, BestLayout]:
    """The goodput of these layouts under this load, as `search` has it."""
    played = [BestLayout(load.rate(found.layout, guess=found.rate or 1.0), found.layout) for found in known]
    return _ranked(played)


def _ranked(found: Iterable[BestLayout]) -> dict[int, BestLayout]:
    return {one.reads: one for one in sorted(found, key=lambda one: -one.rate)}


def _best(
    layouts: Iterable[PhaseLayout], load: PlayedLoad, known: dict[int, BestLayout], *, beat: bool = False
) -> dict[int, BestLayout]:
    """`known` with what is better for its number of readers; `beat`: better than all."""
    best = dict(known)
    for layout in layouts:
        if any(pool.kv_tokens <= 0 for pool in (*layout.both, *layout.reads, *layout.decodes)):
            continue
        reads = BestLayout(0.0, layout).reads
        above = best[reads].rate if reads in best else 0.0
        if beat:
            above = max(found.rate for found in best.values())
        guess = max((found.rate for found in best.values()), default=0.0)
        rate = load.rate(layout, above=above, guess=guess or 1.0)
        if rate > above or (reads not in best and not beat):
            best[reads] = BestLayout(rate, layout)
    return best


class SharedSplit(NamedTuple):
    """Devices of a pool whose experts are shared. `experts`: devices for them alone, or 0 where every device has some.
    `degrees`: devices of an attention rank that reads, and of one that decodes."""

    experts: int
    reads: int
    chunk: int
    floor: float
    micro_batches: int = 2
    degrees: tuple[int, int] = (1, 1)

    def layout(self, pool: PhasePool, pieces: Pieces) -> PhaseLayout | None:
        """The rest decodes, with at most so many micro-batches; none where there are not enough devices."""
        devices = self.reads, pool.devices - self.experts - self.reads
        if min(devices) < 1 or any(part % degree for part, degree in zip(devices, self.degrees, strict=True)):
            return None
        tables = {stages.tensor_parallel: stages for stages in pool.stages}
        ranks = [part // degree for part, degree in zip(devices, self.degrees, strict=True)]
        first, last = (
            self._side(pool, tables[degree], count, most)
            for degree, count, most in zip(
                self.degrees, ranks, (MAX_MICRO_BATCHES, self.micro_batches), strict=True
            )
        )
        return PhaseLayout(
            self.chunk, reads=(first,), decodes=(last,), pieces=replace(pieces, floor=self.floor)
        )

    def _side(self, pool: PhasePool, tables: StageTables, ranks: int, most: int) -> Apart | Beside:
        if not self.experts:
            return Beside(tables, ranks, pool.devices, most)
        return Apart(tables, ranks, self.experts, most, pool.devices <= tables.chip.fast_domain)


def split_of(layout: PhaseLayout) -> SharedSplit:
    """What `Split.layout` made it of."""
    first, last = layout.reads[0], layout.decodes[0]
    assert layout.pieces is not None and isinstance(last, Apart | Beside), "of shared experts"
    return SharedSplit(
        first.held if isinstance(first, Apart) else 0,
        first.ranks * first.tables.tensor_parallel,
        layout.chunk,
        layout.pieces.floor,
        last.micro_batches,
        (first.tables.tensor_parallel, last.tables.tensor_parallel),
    )


def _shared(pool: PhasePool, pieces: Pieces, hosted: bool) -> Iterator[PhaseLayout]:
    step = max(1, round(pool.devices / _PARTS))
    for experts in (0,) if hosted else range(step, pool.devices - 1, step):
        for reads in range(step, pool.devices - experts, step):
            for floor, most in product(FLOORS[::2], DECODE_MICRO_BATCHES[::2]):
                layout = SharedSplit(experts, reads, CHUNKS[1], floor, most).layout(pool, pieces)
                if layout is not None:
                    yield layout


def _closer(pool: PhasePool, load: PlayedLoad, known: dict[int, BestLayout]) -> dict[int, BestLayout]:
    """Neighbours of the best, half as far away each time."""
    step = max(1, round(pool.devices / _PARTS))
    while step:
        best = max(known.values(), key=lambda found: found.rate)
        known = _best(_around(pool, best, step), load, known, beat=True)
        if max(known.values(), key=lambda found: found.rate) is best:
            step //= 2
    return known


def _around(pool: PhasePool, best: BestLayout, step: int) -> Iterator[PhaseLayout]:
    """One thing changed, or two counts of devices."""
    split, pieces = split_of(best.layout), best.layout.pieces
    assert pieces is not None, "of shared experts"
    near = [
        split._replace(experts=split.experts + more, reads=split.reads + reads)
        for more in ((-step, 0, step) if split.experts else (0,))
        for reads in (-step, 0, step)
        if split.experts + more > 0 or not split.experts
    ]
    near += [split._replace(chunk=chunk) for chunk in CHUNKS]
    near += [split._replace(floor=floor) for floor in FLOORS]
    near += [split._replace(micro_batches=most) for most in DECODE_MICRO_BATCHES]
    degrees = [stages.tensor_parallel for stages in pool.stages[::2]]
    near += [split._replace(degrees=(one, split.degrees[1])) for one in degrees]
    near += [split._replace(degrees=(split.degrees[0], one)) for one in degrees]
    for other in near:
        layout = other.layout(pool, pieces) if other != split else None
        if layout is not None:
            yield layout


def _two_copies(pool: PhasePool) -> Iterator[PhaseLayout]:
    several, stages = pool.devices > 2 * pool.node, pool.stages[::2]
    for reads in range(1, pool.devices):
        if several and reads % max(pool.node // 2, 1):
            continue
        for first in _instances(pool, reads, stages):
            for second in _instances(pool, pool.devices - reads, stages):
                for chunk in CHUNKS:
                    yield PhaseLayout(chunk, reads=first, decodes=second, first_there=True)


def _mixed(pool: PhasePool) -> Iterator[PhaseLayout]:
    for both in _instances(pool, pool.devices, pool.stages):
        for chunk in MIXED_CHUNKS:
            yield PhaseLayout(chunk, both=both)


def _instances(pool: PhasePool, devices: int, ranks: Sequence[StageTables]) -> Iterator[tuple[Together, ...]]:
    """One of all devices, or several of whole hosts."""
    size = devices
    while True:
        for stages in ranks:
            if size % stages.tensor_parallel == 0:
                yield (Together(stages, size),) * (devices // size)
        if size % (2 * pool.node):
            return
        size //= 2


def described(layout: PhaseLayout) -> str:
    """Devices, ranks and chunk in words."""
    if layout.both:
        return f"{_sizes(layout.both)}, chunks of {layout.chunk}"
    first = layout.reads[0]
    sides = f"prefill {_sizes(layout.reads)}, decode {_sizes(layout.decodes)}"
    if isinstance(first, Together):
        return f"{sides}, chunks of {layout.chunk}"
    split = split_of(layout)
    experts = f"experts {split.experts}" if split.experts else "experts on every device"
    return (
        f"{sides} with {split.micro_batches} micro-batches at most, {experts}, chunks of {layout.chunk}, "
        f"{split.floor:.0%} of the experts' time for prompts at least"
    )


def _sizes(pools: Sequence[Apart | Beside | Together]) -> str:
    ranks, degree = pools[0].ranks, pools[0].tables.tensor_parallel
    return f"{len(pools)} x {ranks * degree}" + (f" (tp {degree})" if degree > 1 else "")
