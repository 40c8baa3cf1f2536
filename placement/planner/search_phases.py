"""The best layout of prefill and decode on equal devices, of each of three kinds, by simulated goodput.

`SHARED`: prefill and decode nodes use one pool of expert devices. `TWO_COPIES`: instances that read prompts and
instances that decode, each with a copy of the experts. `MIXED`: instances that decode and read prompts in chunks. Of
each, counts of devices, sizes of ranks and of chunks are tried. Of shared experts there are too many: some are tried on
a short run, then the best one's neighbours. It knows no files and one kind of device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from afserve.placement.planner.hardware import Hardware
from afserve.placement.planner.phase_stages import Apart, Pieces, Tables, Together
from afserve.placement.planner.setting import Setting
from afserve.placement.planner.simulate_phases import Asked, Layout, Targets, goodput

SHARED, TWO_COPIES, MIXED = "shared experts", "P/D, two copies", "mixed, chunked prefill"
CHUNKS = (1024, 2048, 4096)  # tokens of a rank that only reads prompts
MIXED_CHUNKS = (64, 128, 256, 512, 1024, 2048)
FLOORS = (1 / 16, 1 / 4, 1 / 2, 3 / 4)  # of the experts' time, for prompts that wait
DECODE_MICRO_BATCHES = (1, 2, 4)  # at most: one reads the experts least often, more hide attention and links
_SHORT = 2  # a first run has so many times fewer requests; where it is too short, bursts count for too much
_PARTS = 8  # a first search tries the parts of a pool in so many steps


@dataclass(frozen=True, slots=True)
class Pool:
    """`devices` of a kind, of which `node` share a host: instances are whole hosts where there are several. `stages` of
    an attention rank on one device, on two, and so on: instances with their own experts may have any of them."""

    stages: tuple[Tables, ...]
    devices: int
    node: int

    @classmethod
    def of(cls, setting: Setting, chip: Hardware, devices: int) -> "Pool":
        """Ranks of one device, two, four and so on up to a host."""
        degrees = [2**power for power in range(chip.devices.bit_length())]
        return cls(tuple(Tables(setting, chip, degree) for degree in degrees), devices, chip.devices)


@dataclass(frozen=True, slots=True)
class Found:
    """Requests per second inside both targets."""

    rate: float
    layout: Layout

    @property
    def reads(self) -> int:
        """Devices that only read prompts."""
        return sum(pool.ranks * pool.tables.tensor_parallel for pool in self.layout.reads)


@dataclass(frozen=True, slots=True)
class Load:
    """What is played: requests and targets."""

    asked: Sequence[Asked]
    targets: Targets

    def rate(self, layout: Layout, *, above: float = 0.0, guess: float = 1.0) -> float:
        return goodput(layout, self.asked, self.targets, above=above, guess=guess)

    def shorter(self) -> "Load":
        return Load(self.asked[: max(len(self.asked) // _SHORT, 1)], self.targets)


def search(kind: str, pool: Pool, load: Load, pieces: Pieces) -> dict[int, Found]:
    """The best for each number of devices that only read prompts, most requests per second first; empty where the
    model does not fit."""
    if kind == SHARED:
        tried = replay(_best(_shared(pool, pieces), load.shorter(), {}).values(), load)
        found = _closer(pool, load, tried) if tried else {}
    else:
        found = _best(_two_copies(pool) if kind == TWO_COPIES else _mixed(pool), load, {})
    return _ranked(found.values())


def replay(known: Iterable[Found], load: Load) -> dict[int, Found]:
    """The goodput of these layouts under this load, as `search` has it."""
    played = [Found(load.rate(found.layout, guess=found.rate or 1.0), found.layout) for found in known]
    return _ranked(played)


def _ranked(found: Iterable[Found]) -> dict[int, Found]:
    return {one.reads: one for one in sorted(found, key=lambda one: -one.rate)}


def _best(
    layouts: Iterable[Layout], load: Load, known: dict[int, Found], *, beat: bool = False
) -> dict[int, Found]:
    """`known` with what is better for its number of readers; `beat`: better than all."""
    best = dict(known)
    for layout in layouts:
        if any(pool.kv_tokens <= 0 for pool in (*layout.both, *layout.reads, *layout.decodes)):
            continue
        reads = Found(0.0, layout).reads
        above = best[reads].rate if reads in best else 0.0
        if beat:
            above = max(found.rate for found in best.values())
        guess = max((found.rate for found in best.values()), default=0.0)
        rate = load.rate(layout, above=above, guess=guess or 1.0)
        if rate > above or (reads not in best and not beat):
            best[reads] = Found(rate, layout)
    return best


def _shared(pool: Pool, pieces: Pieces) -> Iterator[Layout]:
    step = max(1, round(pool.devices / _PARTS))
    for experts in range(step, pool.devices - 1, step):
        for reads in range(step, pool.devices - experts, step):
            for floor in FLOORS[::2]:
                yield apart(pool, experts, reads, CHUNKS[1], replace(pieces, floor=floor), 4)


def apart(pool: Pool, experts: int, reads: int, chunk: int, pieces: Pieces, micro_batches: int = 2) -> Layout:
    """The rest decodes, with at most so many micro-batches."""
    decodes = pool.devices - experts - reads
    return Layout(
        chunk,
        reads=(Apart(pool.stages[0], reads, experts),),
        decodes=(Apart(pool.stages[0], decodes, experts, micro_batches),),
        pieces=pieces,
    )


def _closer(pool: Pool, load: Load, known: dict[int, Found]) -> dict[int, Found]:
    """Neighbours of the best, half as far away each time."""
    step = max(1, round(pool.devices / _PARTS))
    while step:
        best = max(known.values(), key=lambda found: found.rate)
        known = _best(_around(pool, best, step), load, known, beat=True)
        if max(known.values(), key=lambda found: found.rate) is best:
            step //= 2
    return known


def _around(pool: Pool, best: Found, step: int) -> Iterator[Layout]:
    """One thing changed, or two counts of devices."""
    layout = best.layout
    experts, reads, chunk, pieces = layout.reads[0].held, best.reads, layout.chunk, layout.pieces
    most = getattr(layout.decodes[0], "micro_batches", DECODE_MICRO_BATCHES[0])
    assert pieces is not None, "of shared experts"
    for more_experts in (-step, 0, step):
        for more_reads in (-step, 0, step):
            near = experts + more_experts, reads + more_reads
            if min(near) >= 1 and sum(near) < pool.devices and near != (experts, reads):
                yield apart(pool, *near, chunk, pieces, most)
    yield from (apart(pool, experts, reads, other, pieces, most) for other in CHUNKS if other != chunk)
    for floor in FLOORS:
        if floor != pieces.floor:
            yield apart(pool, experts, reads, chunk, replace(pieces, floor=floor), most)
    for other in DECODE_MICRO_BATCHES:
        if other != most:
            yield apart(pool, experts, reads, chunk, pieces, other)


def _two_copies(pool: Pool) -> Iterator[Layout]:
    several, stages = pool.devices > 2 * pool.node, pool.stages[::2]
    for reads in range(1, pool.devices):
        if several and reads % pool.node:
            continue
        for first in _instances(pool, reads, stages):
            for second in _instances(pool, pool.devices - reads, stages):
                for chunk in CHUNKS:
                    yield Layout(chunk, reads=first, decodes=second, first_there=True)


def _mixed(pool: Pool) -> Iterator[Layout]:
    for both in _instances(pool, pool.devices, pool.stages):
        for chunk in MIXED_CHUNKS:
            yield Layout(chunk, both=both)


def _instances(pool: Pool, devices: int, ranks: Sequence[Tables]) -> Iterator[tuple[Together, ...]]:
    """One of all devices, or several of whole hosts."""
    size = devices
    while True:
        for stages in ranks:
            if size % stages.tensor_parallel == 0:
                yield (Together(stages, size),) * (devices // size)
        if size % (2 * pool.node):
            return
        size //= 2


def described(layout: Layout) -> str:
    """Devices, ranks and chunk in words."""
    if layout.both:
        return f"{_sizes(layout.both)}, chunks of {layout.chunk}"
    first = layout.reads[0]
    sides = f"prefill {_sizes(layout.reads)}, decode {_sizes(layout.decodes)}"
    if not isinstance(first, Apart):
        return f"{sides}, chunks of {layout.chunk}"
    most = max(pool.micro_batches for pool in layout.decodes if isinstance(pool, Apart))
    floor = layout.pieces.floor if layout.pieces else 0.0
    return (
        f"{sides} with {most} micro-batches at most, experts {first.experts}, chunks of {layout.chunk}, "
        f"{floor:.0%} of the experts' time for prompts at least"
    )


def _sizes(pools: Sequence[Apart | Together]) -> str:
    ranks, degree = pools[0].ranks, pools[0].tables.tensor_parallel
    return f"{len(pools)} x {ranks * degree}" + (f" (tp {degree})" if degree > 1 else "")
