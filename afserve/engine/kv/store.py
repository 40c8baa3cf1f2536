"""The KV cache as those see it who move blocks between nodes: names, held blocks, bytes.

It counts what it holds for them, so that the pool's books can be checked, and leaves running requests room to grow.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from afserve.comm.disk.passes import CacheMemory, Passes
from afserve.comm.disk.record import checksum_of as block_checksum
from afserve.comm.kv.messages import Name, Payload, checksum_of
from afserve.engine.kv.awaited import LEFT
from afserve.engine.kv.cache import KvBlocks, KvCache
from afserve.kernels.devices.device import Event

_LEFT_BY_COPIES = 8  # for copies one part in so many of the cache stays available, for all else one in `LEFT`


class PooledBlocks:
    """A `BlockStore` over a node's `KvCache`; calls come between two steps."""

    def __init__(self, kv: KvCache) -> None:
        self._kv, self._pool = kv, kv.pool
        self._held: Counter[int] = Counter()
        self._passes = Passes.open(kv.block_bytes)

    @property
    def block_bytes(self) -> int:
        return self._kv.block_bytes

    @property
    def held(self) -> Iterator[int]:
        """Blocks held for others, each as often as it is held."""
        return self._held.elements()

    def find(self, names: Sequence[Name]) -> list[int]:
        found = self._pool.match(names)
        self._pool.hold(found)
        self._held.update(found)
        return found

    def has_room(self, names: Sequence[Name]) -> bool:
        """Whether `reserve` has what is missing of a chain, once those that are here are held."""
        found = self._pool.match(names)
        need = len(names) - len(found) + self._pool.blocks // LEFT
        return self._pool.can_allocate(need, sparing=found)

    @property
    def most_room(self) -> int:
        """Blocks of a chain that it ever has room for."""
        return self._pool.blocks - self._pool.blocks // LEFT

    def reserve(self, count: int, *, copies: bool, spare: bool = False) -> list[int]:
        if not self._pool.caching:
            return []  # nobody would find them
        left = self._pool.blocks // (_LEFT_BY_COPIES if copies else LEFT)
        room = self._pool.available - left
        if spare:
            room = min(room, self._pool.free)
        blocks = self._pool.allocate(max(0, min(count, room)))
        self._held.update(blocks)
        return blocks

    def release(self, blocks: Sequence[int], *, copies: bool = False, awaited: bool = False) -> None:
        for block in blocks:
            if left := self._held[block] - 1:
                self._held[block] = left
            else:
                self._held.pop(block)  # ten times as fast as `del` of a Counter
        self._pool.release(blocks, copies=copies, awaited=awaited)

    def publish(self, block: int, name: Name) -> None:
        self._pool.publish(block, name)

    def take(self, blocks: Sequence[int], names: Sequence[Name], into: memoryview) -> int:
        if self._passes is not None and (memory := self.memory(blocks)) is not None:
            return checksum_of(self._passes.take_piece(memory, names, into))
        rows_NY = torch.frombuffer(into, dtype=torch.uint8).view(len(blocks), self.block_bytes)
        if (copied := self.copy_out(blocks, rows_NY)) is not None:
            copied.wait()
        return checksum_of(self._sums(names, into))

    def fill(self, blocks: Sequence[int], names: Sequence[Name], payload: Payload) -> int:
        if self._passes is not None and (memory := self.memory(blocks)) is not None:
            return checksum_of(self._passes.fill_piece(payload, memory, names))
        self.write(blocks, bytearray(payload) if memoryview(payload).readonly else payload)
        return checksum_of(self._sums(names, payload))

    def _sums(self, names: Sequence[Name], payload: Payload) -> list[int]:
        size, view = self.block_bytes, memoryview(payload)
        return [block_checksum(name, view[at * size : (at + 1) * size]) for at, name in enumerate(names)]

    def read(self, blocks: Sequence[int]) -> memoryview:
        """A copy of the bytes of held blocks, one behind the other."""
        return self._kv.read(blocks).bytes_NY.view(-1).numpy().data

    def copy_out(self, blocks: Sequence[int], rows_NY: Tensor) -> Event | None:
        """As `KvCache.copy_out`."""
        return self._kv.copy_out(blocks, rows_NY)

    @property
    def part_bytes(self) -> int:
        """Of the smallest of a block's `parts`; 0 where there are none."""
        return self._kv.part_bytes

    def parts(self, blocks: Sequence[int]) -> list[list[memoryview]]:
        """The memory of held blocks that nobody can find yet, from any thread; only where there are `part_bytes`."""
        return self._kv.parts(blocks)

    def memory(self, blocks: Sequence[int]) -> CacheMemory | None:
        """As `parts`, as addresses for `Passes`; also of blocks that are only to be read. None where there are none."""
        return self._kv.memory(blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """What was put there in part, or wrong, is no number that anybody reads."""
        self._kv.clear(blocks)

    def write(self, blocks: Sequence[int], payload: Payload) -> None:
        """Replace held blocks that nobody can find yet by what `read` gave."""
        self.write_rows(
            blocks, torch.frombuffer(payload, dtype=torch.uint8).view(len(blocks), self.block_bytes)
        )

    def write_rows(self, blocks: Sequence[int], rows_NY: Tensor) -> None:
        """As `write`, from memory of the host: a row of bytes for each block."""
        self._kv.write(blocks, KvBlocks(self._kv.fingerprint, rows_NY))
