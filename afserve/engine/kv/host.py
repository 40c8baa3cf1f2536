"""The KV cache's tier in host memory: blocks that leave the cache are copied to one region of memory, an arena.

A block has a checksum from when it was copied, and comes back only with that. A block that makes room for others goes
to the tier below, where there is one. A GPU copies to pinned memory while the node goes on; whoever wants those bytes
earlier waits. It knows no requests and no files.
"""

import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from afserve.clock import Clock
from afserve.comm.disk.passes import Passes
from afserve.comm.disk.record import checksum_of
from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.disk import DiskTier
from afserve.engine.kv.host_slots import HostSlots, Placed
from afserve.engine.kv.store import PooledBlocks
from afserve.engine.kv.tiers import HOST, Named, RestoredPiece
from afserve.engine.stats import HostStats, TierStats
from afserve.kernels.devices.device import Device, Event
from afserve.kernels.devices.opened import device_of

_PIECE_BYTES = 1 << 20  # copied back at once, and checked while processors have it in their caches
_PINNED_PIECE_BYTES = 32 << 20  # a GPU wants more at once
_HOST = device_of(torch.device("cpu"))


class HostArena:
    """One region of memory: `rows_SY` has a row of bytes for each slot, `staging_NY` as many as are copied at once."""

    def __init__(self, size: int, block_bytes: int, device: Device = _HOST) -> None:
        """At most `size` bytes, pinned where this device copies by itself; other memory takes none before it is written
        to. Raises OSError where there is not so much memory."""
        self.piece = max(1, (_PINNED_PIECE_BYTES if device.later else _PIECE_BYTES) // block_bytes)
        rows = size // block_bytes
        if not rows:
            raise OSError(f"{size:,} bytes hold no block of {block_bytes:,}")
        total = (rows + self.piece) * block_bytes
        try:
            self._memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise OSError(f"{total:,} bytes of memory cannot be had: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _ask_for_huge_pages(self._memory)
        bytes_Y = torch.frombuffer(self._memory, dtype=torch.uint8, count=total)
        self._unpin = device.pin_pages(bytes_Y)
        every = bytes_Y.view(rows + self.piece, block_bytes)
        self.rows_SY, self.staging_NY = every[:rows], every[rows:]
        self._view, self._address = memoryview(self._memory), bytes_Y.data_ptr()
        self._block_bytes = block_bytes

    @property
    def slots(self) -> int:
        return len(self.rows_SY)

    def row(self, slot: int) -> memoryview:
        return self._view[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def address(self, slot: int) -> int:
        return self._address + slot * self._block_bytes

    def gathered(self, slots: Sequence[int]) -> Tensor:
        """(len(slots), block_bytes): at most a piece of rows, side by side until the next call."""
        first = slots[0]
        if list(slots) == list(range(first, first + len(slots))):
            return self.rows_SY[first : first + len(slots)]
        out = self.staging_NY[: len(slots)]
        return torch.index_select(self.rows_SY, 0, torch.tensor(slots), out=out)

    def close(self) -> None:
        """The memory goes with the last tensor over it."""
        self._unpin()


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    """They are there sooner; a system without them gives small ones."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class _Fresh:
    """Blocks without a checksum, since they are still being copied."""

    placed: Placed
    copied: Event


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a restoration: pinned names, and the held memory that they come to."""

    job: int
    names: Sequence[Hash]
    blocks: Sequence[int]


class HostTier:
    """A `Tier` over an arena, which it takes over. Blocks that make room for others go to the one `below`."""

    name: str = HOST

    def __init__(
        self, blocks: PooledBlocks, arena: HostArena, clock: Clock, below: DiskTier | None = None
    ) -> None:
        self._blocks, self._arena, self._clock, self._below = blocks, arena, clock, below
        self._slots, self._passes = HostSlots(arena.slots), Passes.open(blocks.block_bytes)
        self._sums: dict[int, int] = {}  # checksums by slot
        self._fresh: deque[_Fresh] = deque()
        self._pieces: deque[_Piece] = deque()
        self._read = self._written = self._left = self._damaged = 0

    @property
    def busy(self) -> bool:
        return bool(self._pieces or self._fresh)

    @property
    def settled(self) -> bool:
        return not self._fresh

    # ---- out of the cache

    def idle(self, blocks: Named) -> None:
        """They are kept when they leave the cache."""

    def evicted(self, blocks: Named, kept: Sequence[bool]) -> list[bool]:
        self._slots.use(name for _, name in blocks)
        block_of = {name: block for block, name in blocks if name not in self._slots}
        placed, left = self._slots.take(list(block_of))
        self._let_down(left)
        self._copy_out([block_of[name] for name in placed], placed)
        self._written += len(placed) * self._blocks.block_bytes
        return [one or name in self._slots for one, (_, name) in zip(kept, blocks, strict=True)]

    def keep_whole(self, blocks: Named) -> None:
        self.evicted(blocks, [False] * len(blocks))

    def _copy_out(self, blocks: Sequence[int], placed: Placed) -> None:
        """Their bytes to their slots, with checksums as soon as they are there."""
        memory = self._blocks.memory(blocks) if self._passes is not None else None
        if self._passes is not None and memory is not None:
            addresses = [self._arena.address(slot) for slot in placed.values()]
            sums = self._passes.take(memory, addresses, list(placed))
            self._sums.update(zip(placed.values(), sums, strict=True))
            return
        copied, ends = sorted(zip(placed.values(), blocks, strict=True)), None
        for first, last in _runs([slot for slot, _ in copied]):
            slot = copied[first][0]
            rows_NY = self._arena.rows_SY[slot : slot + last - first]
            ends = self._blocks.copy_out([block for _, block in copied[first:last]], rows_NY)
        if ends is None:
            self._seal(placed)
        else:
            self._fresh.append(_Fresh(placed, ends))

    def _let_down(self, left: Placed) -> None:
        """They lost their slots, and their bytes are still there."""
        self._left += len(left)
        self._seal_all(left.values())
        wanted = self._below.wanted(list(left)) if self._below is not None and left else []
        right = [name for name in wanted if self._is_right(name, left[name])]
        self._damaged += len(wanted) - len(right)
        if self._below is not None and right:
            self._below.keep(right, b"".join(self._arena.row(left[name]) for name in right))
        for slot in left.values():
            del self._sums[slot]

    def _is_right(self, name: Hash, slot: int) -> bool:
        return checksum_of(name, self._arena.row(slot)) == self._sums[slot]

    def _seal(self, placed: Placed) -> None:
        for name, slot in placed.items():
            self._sums[slot] = checksum_of(name, self._arena.row(slot))

    def _seal_all(self, slots: Iterable[int]) -> None:
        """Where one of these is still being copied, wait until everything was."""
        if self._fresh and any(slot not in self._sums for slot in slots):
            for fresh in self._fresh:
                fresh.copied.wait()
                self._seal(fresh.placed)
            self._fresh.clear()

    def save(self, until: float) -> None:
        """What the GPU has copied meanwhile gets its checksum."""
        while self._fresh and self._fresh[0].copied.done():
            self._seal(self._fresh.popleft().placed)
            if self._clock.now() >= until:
                return

    # ---- back into the cache

    def holds(self, names: Sequence[Hash]) -> list[bool]:
        return [name in self._slots for name in names]

    def run(self, names: Sequence[Hash]) -> int:
        return self._slots.run(names)

    def begin(self, job: int, names: Sequence[Hash], first: int) -> int:
        """They keep their slots while memory is found for them, which may push others out."""
        names = names[: self._slots.run(names)]
        self._slots.pin(names)
        blocks = self._blocks.reserve(len(names), copies=False)
        self._slots.unpin(reversed(names[len(blocks) :]))
        names = names[: len(blocks)]
        blocks.sort()  # neighbours are copied at once
        for at in range(0, len(names), self._arena.piece):
            here = slice(at, at + self._arena.piece)
            self._pieces.append(_Piece(job, names[here], blocks[here]))
        return len(names)

    def next(self) -> RestoredPiece | None:
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        slots = self._slots.slots(piece.names)
        self._seal_all(slots)
        right = self._copy_in(piece, slots)
        self._read += right * self._blocks.block_bytes
        self._slots.unpin(reversed(piece.names))
        if right < len(piece.names) and self._slots.forget(piece.names[right]):
            self._damaged += 1
            del self._sums[slots[right]]
        return RestoredPiece(piece.job, piece.names, piece.blocks, right)

    def _copy_in(self, piece: _Piece, slots: Sequence[int]) -> int:
        """How many of its blocks are right, from the first on; they are in the cache now."""
        memory = self._blocks.memory(piece.blocks) if self._passes is not None else None
        if self._passes is not None and memory is not None:
            addresses, sums = (
                [self._arena.address(slot) for slot in slots],
                [self._sums[slot] for slot in slots],
            )
            whole = self._passes.put(addresses, memory, piece.names, sums)
        else:
            whole = [self._is_right(name, slot) for name, slot in zip(piece.names, slots, strict=True)]
        right = whole.index(False) if False in whole else len(whole)
        if right and memory is None:
            self._blocks.write_rows(piece.blocks[:right], self._arena.gathered(slots[:right]))
        return right

    def end(self, job: int) -> list[int]:
        free: list[int] = []
        for piece in [piece for piece in self._pieces if piece.job == job]:
            self._pieces.remove(piece)
            self._slots.unpin(reversed(piece.names))
            free += piece.blocks
        return free

    def stats(self, so_far: TierStats) -> TierStats:
        return replace(
            so_far,
            host=HostStats(
                blocks=len(self._slots),
                capacity=self._slots.capacity,
                bytes_read=self._read,
                bytes_written=self._written,
                left=self._left,
                damaged=self._damaged,
            ),
        )

    def close(self) -> list[int]:
        """What is here ends with the process."""
        self._fresh.clear()
        self._arena.close()
        return []


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of places whose slots follow each other."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield first, at
            first = at
