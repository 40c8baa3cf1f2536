"""Free blocks of a KV cache, given out so that a sequence's blocks lie side by side where that is possible.

A cache is read block by block. Where neighbours follow each other the processor's translation of addresses and its
prefetcher keep up; scattered blocks cost a plain read two thirds of its speed on a virtual machine (bench/LOG.md). So
a sequence gets the block behind its last one. Where that is taken, it moves on to a longer run than it began with.

Runs are kept as a buddy allocator keeps them (Knowlton, A fast storage allocator, CACM 8(10), 1965): every free block
is in the longest free run of 2^n blocks that begins at a multiple of 2^n.
"""

from collections import OrderedDict
from collections.abc import Iterator

RUN = 16  # blocks that are looked for when a sequence begins
LONG = 128  # and when it has filled a run
LEVELS = LONG.bit_length()


class FreeBlocks:
    """A set of blocks 0 .. blocks - 1, all of them at first. Every operation takes constant time."""

    def __init__(self, blocks: int) -> None:
        self._runs = [OrderedDict[int, None]() for _ in range(LEVELS)]  # first blocks of runs of 2^level
        self._count = blocks
        first = 0
        for level in reversed(range(LEVELS)):
            while first + (1 << level) <= blocks:
                self._runs[level][first] = None
                first += 1 << level

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for level, runs in enumerate(self._runs):
            for first in runs:
                yield from range(first, first + (1 << level))

    def add(self, block: int) -> None:
        level = 0
        while level < LEVELS - 1 and (block ^ 1 << level) in self._runs[level]:
            del self._runs[level][block ^ 1 << level]
            block &= ~(1 << level)
            level += 1
        self._runs[level][block] = None
        self._count += 1

    def take(self, last: int | None) -> int:
        """The block behind `last`, else the first of the shortest run that is long enough, else of the longest.

        Raises:
            KeyError: no block is free.
        """
        return self._split(*self._find(last))

    def take_some(self, last: int | None, most: int) -> range:
        """As `take` would give them one after another: one block or more, side by side, in one go where they are a
        whole run. Raises KeyError."""
        level, first, block = self._find(last)
        size = 1 << level
        if block != first or size > most:
            return range(self._split(level, first, block), block + 1)
        del self._runs[level][first]
        self._count -= size
        return range(first, first + size)

    def _find(self, last: int | None) -> tuple[int, int, int]:
        """The level and the first block of a run, and the block of it that is taken next."""
        if last is not None:
            for level, runs in enumerate(self._runs):
                first = last + 1 >> level << level
                if first in runs:
                    return level, first, last + 1
        enough = (RUN if last is None else LONG).bit_length() - 1
        for level in (*range(enough, LEVELS), *reversed(range(enough))):
            if self._runs[level]:
                first = next(iter(self._runs[level]))
                return level, first, first
        raise KeyError("no block is free")

    def _split(self, level: int, first: int, block: int) -> int:
        """Takes one block out of a run, whose other halves become runs of their own."""
        del self._runs[level][first]
        while level:
            level -= 1
            half = first + (1 << level)
            if block < half:
                self._runs[level][half] = None
            else:
                self._runs[level][first] = None
                first = half
        self._count -= 1
        return block
