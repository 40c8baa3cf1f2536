"""The KV cache's tier on disk: blocks that nobody holds are written, and come back before a request is scheduled.

All calls come from the thread that steps the node, between two steps; it only copies, for no longer than it is told to.
Files are read and written by threads of `comm/disk`, straight into the cache where its memory has the files' order:
then a block is held until nobody writes to it any more, whatever became of its restoration. A restoration ends when
everything came, at its deadline, or with the first block that is not there; what came stays, the rest is computed. It
knows no requests.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from afserve.clock import Clock
from afserve.comm.disk.store import DAMAGED, UNREADABLE
from afserve.comm.disk.workers import DiskWorkers, Place, Read
from afserve.engine.blocks import Hash
from afserve.engine.kv_cache import KvCache
from afserve.engine.kv_store import PooledBlocks
from afserve.engine.stats import TierStats

_COPIED_BYTES = 1 << 20  # at once, out of the cache
# Restored at 0.95 of the disk's rate in parts of 18 KiB, by copies at 0.81; in parts of 3 KiB at 0.64 and 0.71: each
# part costs a microsecond of Python (AMD EPYC, two cores).
LEAST_PART = 8 << 10
_BEGUN_BYTES = 16 << 20  # are looked up at once, while those before are being read


@dataclass(frozen=True, slots=True)
class Restored:
    """How a restoration ended: of `asked` blocks `received` came from the disk, beside `here` that were in memory."""

    job: int
    asked: int
    received: int
    here: int
    seconds: float


@dataclass(slots=True)
class _Job:
    """`blocks` has the memory for each position of `names` that may still come; `here` and `came` are held."""

    number: int
    names: Sequence[Hash]
    here: list[int]
    blocks: dict[int, int]
    began: float
    until: float
    came: list[int] = field(default_factory=list)


class DiskTier:
    """Ends of restorations are in `ended`, for whoever takes them out."""

    def __init__(self, kv: KvCache, blocks: PooledBlocks, disk: DiskWorkers, clock: Clock) -> None:
        self._kv, self._blocks, self._disk, self._clock = kv, blocks, disk, clock
        self._unsaved: OrderedDict[Hash, int] = OrderedDict()
        self._jobs: dict[int, _Job] = {}
        self._coming: dict[Hash, int] = {}  # which restoration brings it
        self._numbers = self._late = self._refused = 0
        self._restores = self._short = 0
        self._seconds = 0.0
        self._ready: list[int] = []
        self._in_place = disk.in_place and blocks.part_bytes >= LEAST_PART
        self._leaving: dict[tuple[int, int], list[int]] = {}  # still written to, by restoration and begin
        self.ended: list[Restored] = []
        kv.on_idle, kv.on_evict = self._idle, self._evicted

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to do, or may soon."""
        return bool(
            self._jobs
            or self._disk.done
            or self._leaving
            or self.ended
            or self._ready
            or (self._unsaved and self._disk.room)
        )

    @property
    def settled(self) -> bool:
        """Whether everything that is to be written was."""
        return not (self._unsaved and self._disk.writable) and not self._disk.writing

    # ---- out of memory

    def _idle(self, blocks: Sequence[tuple[int, Hash]]) -> None:
        block_of = {name: block for block, name in blocks}
        wanted = self._disk.wanted(block_of)
        if not self._disk.writable:
            self._refused += sum(not self._disk.store.run([name]) for name in block_of)
        for name in wanted:
            self._unsaved[name] = block_of[name]

    def _evicted(self, block: int, name: Hash) -> None:
        if self._unsaved.pop(name, None) is not None:
            self._late += 1

    def _save(self, until: float) -> None:
        """One batch at least, where there is room for it."""
        size = self._blocks.block_bytes
        while self._unsaved and self._disk.room >= size:
            names = list(self._unsaved)[: max(1, min(_COPIED_BYTES, self._disk.room) // size)]
            blocks = [self._unsaved.pop(name) for name in names]
            self._disk.write(names, self._blocks.read(blocks))
            if self._clock.now() >= until:
                return

    # ---- back into memory

    def waits_on_disk(self, names: Sequence[Hash]) -> int:
        """How many blocks of this chain `restore` would read now."""
        here = len(self._kv.pool.match(names))
        return self._disk.store.run(names[here:])

    def restore(self, names: Sequence[Hash], limit: float) -> int | None:
        """Begin to bring back what of this chain is on the disk and not in memory, within `limit` seconds; the
        restoration's number. None where there is nothing to bring, or no room for it. Where an earlier one brings the
        first block that is missing, it is that one's number."""
        if not self.waits_on_disk(names):
            return None
        if (earlier := self._coming.get(names[len(self._kv.pool.match(names))])) is not None:
            return earlier
        self._let_go()  # or there may be no room for it
        now, here = self._clock.now(), self._blocks.find(names)
        self._numbers += 1
        blocks = self._begin(self._numbers, names[len(here) :])
        if not blocks:
            self._disk.end(self._numbers)
            self._blocks.release(here)
            return None
        coming = names[len(here) : len(here) + len(blocks)]
        self._jobs[self._numbers] = _Job(
            self._numbers, coming, here, dict(enumerate(blocks)), now, now + limit
        )
        self._coming.update(dict.fromkeys(coming, self._numbers))
        return self._numbers

    def _begin(self, number: int, names: Sequence[Hash]) -> list[int]:
        """The memory for the first of these that are on the disk. Those are being read; the first ones already while
        memory for others is looked for."""
        found: list[int] = []
        step, last = max(1, _BEGUN_BYTES // self._blocks.block_bytes), self._disk.store.run(names)
        while len(found) < last:
            wanted = names[len(found) : min(last, len(found) + step)]
            blocks = self._blocks.reserve(len(wanted), copies=False)
            blocks.sort()  # neighbours are copied at once
            place = self._place(blocks, len(found)) if self._in_place else None
            coming = self._disk.read(number, wanted[: len(blocks)], len(found), place) if blocks else 0
            self._blocks.release(blocks[coming:])
            found += blocks[:coming]
            if coming < len(wanted):
                break
        return found

    def _place(self, blocks: Sequence[int], begin: int) -> Place:
        """These are from position `begin` on. Called by the threads that read."""

        def parts(first: int, count: int) -> list[list[memoryview]]:
            return self._blocks.parts(blocks[first - begin : first - begin + count])

        return parts

    def cancel(self, number: int) -> None:
        """Nobody wants it any more; it is not among `ended`."""
        if (job := self._jobs.get(number)) is not None:
            self._finish(job)
            self._let_go()

    def turn(self, seconds: float) -> None:
        """Take in what was read and copy out what is to be written: at least one piece of each, then until so much time
        is over."""
        until = self._clock.now() + seconds
        self._let_go()
        while self._disk.done:
            self._take(self._disk.done.popleft())
            if self._clock.now() >= until:
                break
        now = self._clock.now()
        for job in [job for job in self._jobs.values() if now >= job.until]:
            self._end(job)
        self._save(until)

    def _take(self, read: Read) -> None:
        try:
            job = self._jobs.get(read.job)
            if job is not None:
                self._fill(job, read)
        finally:
            self._disk.give_back(read)
            self._leave(self._leaving.pop((read.job, read.span.begin), []))

    def _fill(self, job: _Job, read: Read) -> None:
        names = read.span.names[: read.right]
        if names:
            begin = read.span.begin
            blocks = [job.blocks.pop(begin + at) for at in range(len(names))]
            if read.buffer is not None:
                self._blocks.write(blocks, self._packed(read, read.buffer))
            self._kv.pool.publish_restored(blocks, names)
            job.came += blocks
        if read.right < len(read.span.names) or not job.blocks:
            self._end(job)

    def _leave(self, blocks: Sequence[int]) -> None:
        self._blocks.clear(blocks)
        self._blocks.release(blocks)

    def _packed(self, read: Read, buffer: memoryview) -> memoryview | bytearray:
        """The blocks of a read, one behind the other."""
        size, pitch = self._blocks.block_bytes, self._disk.store.kind.pitch
        if pitch == size:
            return buffer[: read.right * size]
        return bytearray().join(buffer[at * pitch : at * pitch + size] for at in range(read.right))

    def _end(self, job: _Job) -> None:
        self._finish(job)
        seconds = self._clock.now() - job.began
        self._restores += 1
        self._short += len(job.came) < len(job.names)
        self._seconds += seconds
        self.ended.append(Restored(job.number, len(job.names), len(job.came), len(job.here), seconds))

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.number]
        for begin, count in self._disk.end(job.number):
            if self._in_place:
                left = [job.blocks.pop(at) for at in range(begin, begin + count) if at in job.blocks]
                self._leaving[job.number, begin] = left
        for name in job.names:
            if self._coming.get(name) == job.number:
                del self._coming[name]
        self._blocks.release(list(job.blocks.values()))
        self._ready += job.here + job.came

    def _let_go(self) -> None:
        """What restorations brought is held until the turn, or the restoration, behind their end: whoever waited finds
        it until then."""
        ready, self._ready = self._ready, []
        self._blocks.release(ready)

    def stats(self) -> TierStats:
        store = self._disk.store
        return TierStats(
            blocks=store.blocks,
            capacity=store.capacity,
            bytes_read=store.bytes_read,
            bytes_written=store.bytes_written,
            restores=self._restores,
            restores_short=self._short,
            restore_seconds=self._seconds,
            damaged=store.dropped[DAMAGED],
            unreadable=store.dropped[UNREADABLE],
            overwritten=store.overwritten,
            late=self._late,
            refused=self._refused + self._disk.refused,
        )

    def close(self) -> None:
        """Let all blocks go, and write what is still to be written."""
        for job in list(self._jobs.values()):
            self._finish(job)
        self._let_go()
        self._save(float("inf"))
        self._kv.on_idle = self._kv.on_evict = None
        self._disk.close()
        for blocks in self._leaving.values():
            self._blocks.release(blocks)
        self._leaving.clear()
