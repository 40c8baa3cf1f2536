"""The KV cache's tier on disk: blocks that nobody holds are written, and read again where a restoration asks for them.

Files are read and written by threads of `comm/disk`, straight into the cache where the native library moves blocks, or
where memory has the files' order. Then a block is held until nobody writes to it any more, whatever became of its
restoration. What a nearer tier lets go is written too, where it is not there yet. It knows no requests.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from afserve.clock import Clock
from afserve.comm.disk.passes import CacheMemory
from afserve.comm.disk.record import Blocks
from afserve.comm.disk.store import DAMAGED, UNREADABLE, DiskStore
from afserve.comm.disk.workers import DiskWorkers, Place, Read
from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.store import PooledBlocks
from afserve.engine.kv.tiers import DISK, Named, RestoredPiece
from afserve.engine.stats import TierStats

_COPIED_BYTES = 1 << 20  # at once, out of the cache
# Without the native library. Restored at 0.95 of the disk's rate in parts of 18 KiB, by copies at 0.81; in parts of
# 3 KiB at 0.64 and 0.71: each part costs a microsecond of Python (AMD EPYC, two cores).
LEAST_PART = 8 << 10
_BEGUN_BYTES = 16 << 20  # are looked up at once, while those before are being read


class DiskTier:
    """A `Tier`. `workers` were started by whoever made them. One that only `reads` keeps nothing more."""

    name: str = DISK

    def __init__(
        self, blocks: PooledBlocks, workers: DiskWorkers, clock: Clock, *, reads: bool = False
    ) -> None:
        self._blocks, self._disk, self._clock, self._reads = blocks, workers, clock, reads
        self._unsaved: OrderedDict[Hash, int] = OrderedDict()
        self._late = self._refused = 0
        self._one_pass = workers.passes is not None and blocks.memory([]) is not None
        self._in_place = self._one_pass or (workers.in_place and blocks.part_bytes >= LEAST_PART)
        self._memory: dict[int, dict[int, int]] = {}  # held blocks by their place in a restoration

    @property
    def busy(self) -> bool:
        return bool(self._disk.done or self._memory or (self._unsaved and self._disk.staging_room))

    @property
    def settled(self) -> bool:
        return not (self._unsaved and self._disk.writable) and not self._disk.writing

    @property
    def store(self) -> DiskStore:
        """Its files, which are its own while it lives."""
        return self._disk.store

    # ---- out of memory

    def idle(self, blocks: Named) -> None:
        if self._reads:
            return
        block_of = {name: block for block, name in blocks}
        for name in self._wanted(list(block_of)):
            self._unsaved[name] = block_of[name]

    def evicted(self, blocks: Named, kept: Sequence[bool]) -> list[bool]:
        """What a nearer tier has comes by `keep` when that lets it go."""
        for (_, name), elsewhere in zip(blocks, kept, strict=True):
            if self._unsaved.pop(name, None) is not None and not elsewhere:
                self._late += 1
        here = self.holds([name for _, name in blocks])
        return [one or other for one, other in zip(kept, here, strict=True)]

    def keep_whole(self, blocks: Named) -> None:
        """Those that are still to be written are now, where there is room."""
        for block, name in blocks:
            if name in self._unsaved and self._disk.staging_room >= self._blocks.block_bytes:
                del self._unsaved[name]
                self._disk.write([name], self._blocks.read([block]))

    def wanted(self, names: Sequence[Hash]) -> list[Hash]:
        """Those that are worth to be given to `keep`, as a nearer tier lets them go, and for which there is room."""
        found = self._wanted(names)
        if not self._disk.writable:
            return []
        fit = self._disk.staging_room // self._blocks.block_bytes
        self._late += max(0, len(found) - fit)
        return found[:fit]

    def keep(self, names: Sequence[Hash], payload: bytes) -> None:
        """Their bytes, one block behind the other."""
        self._disk.write(names, payload)

    def _wanted(self, names: Sequence[Hash]) -> list[Hash]:
        if not self._disk.writable:
            self._refused += sum(not here for here in self.holds(names))
        return self._disk.worth_writing(names)

    def save(self, until: float) -> None:
        """One batch at least, where there is room for it."""
        size = self._blocks.block_bytes
        while self._unsaved and self._disk.staging_room >= size:
            names = list(self._unsaved)[: max(1, min(_COPIED_BYTES, self._disk.staging_room) // size)]
            blocks = [self._unsaved.pop(name) for name in names]
            self._disk.write(names, self._blocks.read(blocks))
            if self._clock.now() >= until:
                return

    # ---- back into memory

    def holds(self, names: Sequence[Hash]) -> list[bool]:
        return self._disk.store.holds(names)

    def run(self, names: Sequence[Hash]) -> int:
        return self._disk.store.run(names)

    def begin(self, job: int, names: Sequence[Hash], first: int) -> int:
        """The first ones are being read already while memory for others is looked for."""
        memory = self._memory.setdefault(job, {})
        step, done = max(1, _BEGUN_BYTES // self._blocks.block_bytes), 0
        while done < len(names):
            wanted, at = names[done : done + step], first + done
            blocks = self._blocks.reserve(len(wanted), copies=False)
            blocks.sort()  # neighbours are copied at once
            place = self._place(blocks, at) if self._in_place else None
            coming = self._disk.read(job, wanted[: len(blocks)], at, place) if blocks else 0
            self._blocks.release(blocks[coming:])
            memory.update(enumerate(blocks[:coming], at))
            done += coming
            if coming < len(wanted):
                break
        return done

    def _place(self, blocks: Sequence[int], first: int) -> Place:
        """These are from place `first` on. Called by the threads that read."""

        def parts(begin: int, count: int) -> Blocks | CacheMemory:
            wanted = blocks[begin - first : begin - first + count]
            memory = self._blocks.memory(wanted) if self._one_pass else None
            return self._blocks.parts(wanted) if memory is None else memory

        return parts

    def next(self) -> RestoredPiece | None:
        if not self._disk.done:
            return None
        read = self._disk.done.popleft()
        try:
            memory, span = self._memory.get(read.job, {}), read.span
            places = range(span.begin, span.begin + len(span.names))
            blocks = [memory.pop(at) for at in places if at in memory]
            right = read.right if blocks else 0
            if right and read.buffer is not None:
                self._blocks.write(blocks[:right], self._packed(read, read.buffer))
        finally:
            self._disk.return_buffer(read)
        if not memory:
            self._memory.pop(read.job, None)
        return RestoredPiece(read.job, span.names, blocks, right)

    def _packed(self, read: Read, buffer: memoryview) -> memoryview | bytearray:
        """The blocks of a read, one behind the other."""
        size, pitch = self._blocks.block_bytes, self._disk.store.kind.pitch
        if pitch == size:
            return buffer[: read.right * size]
        return bytearray().join(buffer[at * pitch : at * pitch + size] for at in range(read.right))

    def end(self, job: int) -> list[int]:
        begun, memory = self._disk.end(job), self._memory.get(job, {})
        written = {at for first, n in begun for at in range(first, first + n)} if self._in_place else ()
        free = [memory.pop(at) for at in list(memory) if at not in written]
        if not memory:
            self._memory.pop(job, None)
        return free

    def stats(self, so_far: TierStats) -> TierStats:
        store = self._disk.store
        return replace(
            so_far,
            blocks=so_far.blocks + store.blocks,
            capacity=so_far.capacity + store.capacity,
            bytes_read=so_far.bytes_read + store.bytes_read,
            bytes_written=so_far.bytes_written + store.bytes_written,
            damaged=so_far.damaged + store.dropped[DAMAGED],
            unreadable=so_far.unreadable + store.dropped[UNREADABLE],
            overwritten=so_far.overwritten + store.overwritten,
            late=so_far.late + self._late,
            refused=so_far.refused + self._refused + self._disk.refused,
        )

    def close(self) -> list[int]:
        self.save(float("inf"))
        self._disk.close()
        held = [block for memory in self._memory.values() for block in memory.values()]
        self._memory.clear()
        return held
