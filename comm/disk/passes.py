"""One pass of the native library over many blocks: read or taken from memory, checked, copied to a cache or out of it.

It gives what the same steps in Python give, without Python for each block, and other threads go on meanwhile. Where the
library is not built there is no pass. It knows no files and no slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from afserve.comm.disk.record import Bytes, Name, seed_of
from afserve.comm.native import native_library
from afserve.kernels.devices.memory_part import MemoryPart

_LEAST_BYTES = 241  # of a block: the library has only the part of XXH3 that is for so many


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Where `blocks` of a cache lie: its tensors, in the order of a block's bytes. Whoever has it sees to it that the
    memory stays."""

    parts: tuple[MemoryPart, ...]
    blocks: Sequence[int]


class Passes:
    """All calls may come from any thread."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @classmethod
    def open(cls, block_bytes: int) -> "Passes | None":
        """None where the library is not there, is older than this, or blocks are too small for it."""
        native = native_library()
        if block_bytes < _LEAST_BYTES or not hasattr(native, "fill_piece"):
            return None
        return cls(native)

    def read(
        self,
        descriptor: int,
        offset: int,
        pitch: int,
        window: memoryview,
        memory: CacheMemory,
        names: Sequence[Name],
        sums: Sequence[int],
    ) -> list[bool]:
        """Of each block whether it came whole with its checksum, and so was copied. They lie `pitch` bytes apart from
        `offset` on in an open file, and go through `window`, which holds one at least. Raises OSError."""
        came, right = self._native.read_blocks(
            descriptor, offset, pitch, window, memory.parts, _expected(memory, names, sums)
        )
        if came < 0:
            raise OSError(-came, f"{len(names)} blocks at {offset} cannot be read")
        found: list[bool] = right
        return found

    def put(
        self, addresses: Sequence[int], memory: CacheMemory, names: Sequence[Name], sums: Sequence[int]
    ) -> list[bool]:
        """As `read`, from memory: each block lies at an address of its own."""
        found: list[bool] = self._native.put_blocks(addresses, memory.parts, _expected(memory, names, sums))
        return found

    def take(self, memory: CacheMemory, addresses: Sequence[int], names: Sequence[Name]) -> list[int]:
        """Copy blocks of the cache to memory, each to an address of its own. Their checksums."""
        seeds = [seed_of(name) for name in names]
        sums: list[int] = self._native.take_blocks(memory.parts, memory.blocks, addresses, seeds)
        return sums

    def take_piece(self, memory: CacheMemory, names: Sequence[Name], into: memoryview) -> list[int]:
        """As `take`, one block behind the other."""
        seeds = [seed_of(name) for name in names]
        sums: list[int] = self._native.take_piece(memory.parts, memory.blocks, into, seeds)
        return sums

    def fill_piece(self, piece: Bytes, memory: CacheMemory, names: Sequence[Name]) -> list[int]:
        """Copy blocks that lie one behind the other to the cache, right or not. The checksums of what was there."""
        seeds = [seed_of(name) for name in names]
        sums: list[int] = self._native.fill_piece(piece, memory.parts, memory.blocks, seeds)
        return sums


def _expected(memory: CacheMemory, names: Sequence[Name], sums: Sequence[int]) -> list[tuple[int, int, int]]:
    return [
        (block, seed_of(name), checksum)
        for block, name, checksum in zip(memory.blocks, names, sums, strict=True)
    ]
