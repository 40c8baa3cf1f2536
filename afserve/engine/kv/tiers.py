"""What lies below the KV cache, as a chain: a block is looked for in the nearest tier, and comes back before a request
is scheduled.

All calls come from the thread that steps the node, between two steps; it only copies, for no longer than it is told to.
A restoration ends when everything came, at its deadline, or with the first block that is not there; what came stays,
the rest is computed. It knows no requests, and not what a tier is made of (`host`, `disk`).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from afserve.clock import Clock
from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.cache import KvCache
from afserve.engine.kv.store import PooledBlocks
from afserve.engine.stats import TierStats

HOST, DISK = "host", "disk"
Named = Sequence[tuple[int, Hash]]  # blocks of the cache with their names


@dataclass(frozen=True, slots=True)
class RestoredPiece:
    """A piece of restoration `job` has come: `blocks` are held and have what `names` stand for, the first `right` of
    them."""

    job: int
    names: Sequence[Hash]
    blocks: Sequence[int]
    right: int


class Tier(Protocol):
    """One tier. Memory of the cache that it fills is held from `begin` on; `next` and `end` hand it over."""

    @property
    def name(self) -> str: ...

    @property
    def busy(self) -> bool:
        """Whether `next` or `save` has something to do now."""

    @property
    def settled(self) -> bool:
        """Whether everything that is to be kept here is."""

    def holds(self, names: Sequence[Hash]) -> list[bool]: ...

    def run(self, names: Sequence[Hash]) -> int:
        """How many of these are here, from the first on."""

    def idle(self, blocks: Named) -> None:
        """Nobody holds these any more; they can still be found in the cache."""

    def evicted(self, blocks: Named, kept: Sequence[bool]) -> list[bool]:
        """These leave the cache, and can be read until this returns. `kept`: whether a nearer tier has it now; with
        this one's."""

    def keep_whole(self, blocks: Named) -> None:
        """These stay in the cache, but lose a part of what can be read until this returns."""

    def save(self, until: float) -> None:
        """Go on keeping what is to be kept: one piece at least, then until this time."""

    def begin(self, job: int, names: Sequence[Hash], first: int) -> int:
        """Begin to bring back the first of these for this restoration, of which they are those from place `first` on;
        how many. Less than all where they are gone, or where there is no room."""

    def next(self) -> RestoredPiece | None:
        """The next piece of what was begun, also of restorations that have ended since."""

    def end(self, job: int) -> list[int]:
        """Nothing of it is wanted any more. The blocks that nobody writes to; others come out of `next`."""

    def stats(self, so_far: TierStats) -> TierStats: ...

    def close(self) -> list[int]:
        """Keep what is still to be kept. The blocks that it holds."""


@dataclass(frozen=True, slots=True)
class Restored:
    """How a restoration ended: blocks that were `asked` of each tier and `received` from it, beside `here` that were in
    the cache."""

    job: int
    asked: Mapping[str, int]
    received: Mapping[str, int]
    here: int
    seconds: float


@dataclass(slots=True)
class _Job:
    """`names` are what it brings; `here` and `came` are held, and kept for who waits for them where it is `awaited`."""

    number: int
    asked: Mapping[str, int]
    here: list[int]
    names: Sequence[Hash]
    began: float
    until: float
    awaited: bool
    came: list[int] = field(default_factory=list)
    received: Counter[str] = field(default_factory=Counter)

    @property
    def whole(self) -> bool:
        return len(self.came) == len(self.names)


class KvTiers:
    """`tiers` from the nearest on. Ends of restorations are in `ended`, for whoever takes them out. `on_look` is called
    once per turn of the node's loop, by whoever calls `turn`, and may `add` some."""

    def __init__(self, kv: KvCache, blocks: PooledBlocks, tiers: Sequence[Tier], clock: Clock) -> None:
        assert tiers
        self._kv, self._blocks, self._tiers, self._clock = kv, blocks, list(tiers), clock
        self._jobs: dict[int, _Job] = {}
        self._coming: dict[Hash, int] = {}  # which restoration brings it
        self._numbers = self._restores = self._short = 0
        self._seconds = 0.0
        self._ready: list[_Job] = []
        self.ended: list[Restored] = []
        self.on_look: Callable[[], None] = lambda: None
        kv.on_idle, kv.on_evict, kv.on_part = self._idle, self._evicted, self._loses_part

    def add(self, tier: Tier) -> None:
        """Behind all others, from now on."""
        self._tiers.append(tier)

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to do, or may soon."""
        return bool(self._jobs or self.ended or self._ready or any(tier.busy for tier in self._tiers))

    @property
    def settled(self) -> bool:
        """Whether everything that is to be kept is."""
        return all(tier.settled for tier in self._tiers)

    def _idle(self, blocks: Named) -> None:
        for tier in self._tiers:
            tier.idle(blocks)

    def _evicted(self, blocks: Named) -> None:
        kept = [False] * len(blocks)
        for tier in self._tiers:
            kept = tier.evicted(blocks, kept)

    def _loses_part(self, blocks: Named) -> None:
        for tier in self._tiers:
            tier.keep_whole(blocks)

    # ---- back into the cache

    def look(self, names: Sequence[Hash]) -> list[tuple[str, int]]:
        """How many blocks of this chain, from the first on, `restore` would bring back from where: (tier, count),
        behind those that are in the cache."""
        here = len(self._kv.pool.match(names))
        return [(tier.name, count) for tier, _, count in _places(names[here:], self._tiers)]

    def has_room(self, names: Sequence[Hash], blocks: int) -> bool:
        """Whether so many blocks that are missing of this chain may be brought now, or are to wait: see
        `AwaitedBlocks.room_for`."""
        pool = self._kv.pool
        found = pool.match(names)
        if names[len(found)] in self._coming:
            return True  # it is brought for another
        pool.forget_late()
        here = sum(not pool.is_held(block) for block in found)
        coming = sum(len(job.here) + len(job.names) for job in self._jobs.values() if job.awaited)
        coming += sum(len(job.here) + len(job.came) for job in self._ready if job.awaited)
        return pool.awaited.room_for(here + blocks, coming, pool.available)

    def restore(
        self, names: Sequence[Hash], limit: float, most: int | None = None, *, awaited: bool = True
    ) -> int | None:
        """Begin to bring back what of this chain is in a tier and not in the cache, within `limit` seconds, `most`
        blocks where that is said; the restoration's number. None where there is nothing to bring, or no room for it.
        Where an earlier one brings the first block that is missing, it is that one's number. A request of this node
        waits for what is `awaited`: it is kept until that begins."""
        missing = names[len(self._kv.pool.match(names)) :][:most]
        places = list(_places(missing, self._tiers))
        if not places:
            return None
        if (earlier := self._coming.get(missing[0])) is not None:
            return earlier
        self._let_go()  # or there may be no room for it
        now, here = self._clock.now(), self._blocks.find(names)
        self._numbers += 1
        asked: Counter[str] = Counter()
        coming = 0
        for tier, first, count in places:
            begun = tier.begin(self._numbers, missing[first : first + count], first)
            asked[tier.name] += begun
            coming += begun
            if begun < count:
                break
        if not coming:
            self._end_everywhere(self._numbers)
            self._blocks.release(here)
            return None
        names = missing[:coming]
        self._jobs[self._numbers] = _Job(self._numbers, +asked, here, names, now, now + limit, awaited)
        self._coming.update(dict.fromkeys(names, self._numbers))
        return self._numbers

    def brings(self, name: Hash) -> bool:
        """Whether a restoration is under way that brings it."""
        return name in self._coming

    def holds(self, names: Sequence[Hash]) -> list[bool]:
        """Of each whether any tier has it."""
        return [any(here) for here in zip(*(tier.holds(names) for tier in self._tiers), strict=True)]

    def cancel(self, number: int) -> None:
        """Nobody wants it any more; it is not among `ended`."""
        if (job := self._jobs.get(number)) is not None:
            self._finish(job)
            self._blocks.release(job.here + job.came)

    def turn(self, seconds: float) -> None:
        """Take in what comes and copy out what is to be kept: at least one piece of each tier, then until so much time
        is over."""
        until = self._clock.now() + seconds
        self._let_go()
        for tier in self._tiers:
            while (filled := tier.next()) is not None:
                self._take(tier.name, filled)
                if self._clock.now() >= until:
                    break
        now = self._clock.now()
        for job in [job for job in self._jobs.values() if now >= job.until]:
            self._end(job)
        for tier in self._tiers:
            tier.save(until)

    def _take(self, tier: str, filled: RestoredPiece) -> None:
        job = self._jobs.get(filled.job)
        right = filled.right if job is not None else 0
        if job is not None and right:
            names, blocks = filled.names[:right], filled.blocks[:right]
            self._kv.pool.publish_restored(blocks, names, tier)
            job.came += blocks
            job.received[tier] += right
        wrong = filled.blocks[right:]
        self._blocks.clear(wrong)
        self._blocks.release(wrong)
        if job is not None and (right < len(filled.names) or job.whole):
            self._end(job)

    def _end(self, job: _Job) -> None:
        self._finish(job)
        self._ready.append(job)
        seconds = self._clock.now() - job.began
        self._restores += 1
        self._short += not job.whole
        self._seconds += seconds
        self.ended.append(Restored(job.number, job.asked, job.received, len(job.here), seconds))

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._end_everywhere(job.number)
        for name in job.names:
            if self._coming.get(name) == job.number:
                del self._coming[name]

    def _end_everywhere(self, number: int) -> None:
        for tier in self._tiers:
            self._blocks.release(tier.end(number))

    def _let_go(self) -> None:
        """What restorations brought is held until the turn, or the restoration, behind their end: whoever waited finds
        it until then."""
        ready, self._ready = self._ready, []
        for job in ready:
            self._blocks.release(job.here + job.came, awaited=job.awaited)

    def stats(self) -> TierStats:
        found = TierStats(restores=self._restores, restores_short=self._short, restore_seconds=self._seconds)
        for tier in self._tiers:
            found = tier.stats(found)
        return found

    def close(self) -> None:
        """Let all blocks go, and keep what is still to be kept."""
        for job in list(self._jobs.values()):
            self._finish(job)
            self._blocks.release(job.here + job.came)
        self._let_go()
        self._kv.on_idle = self._kv.on_evict = self._kv.on_part = None
        for tier in self._tiers:
            self._blocks.release(tier.close())


def _places(names: Sequence[Hash], tiers: Sequence[Tier]) -> Iterator[tuple[Tier, int, int]]:
    """(tier, first, count): the nearest tier that has them, from the first name on, up to one that none has."""
    nearest, farther = tiers[0], tiers[1:]
    if not farther:
        if count := nearest.run(names):
            yield nearest, 0, count
        return
    first = 0
    for here, group in itertools.groupby(nearest.holds(names)):
        count = sum(1 for _ in group)
        if here:
            yield nearest, first, count
        else:
            found = 0
            for tier, begin, some in _places(names[first : first + count], farther):
                yield tier, first + begin, some
                found += some
            if found < count:
                return
        first += count
