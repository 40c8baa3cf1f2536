"""Free blocks of a KV cache, given out so that a sequence's blocks lie side by side where that is possible.

A cache is read block by block. Where neighbours follow each other the processor's translation of addresses and its
prefetcher keep up; scattered blocks cost a plain read two thirds of its speed on a virtual machine (bench/LOG.md). So
a sequence gets the block behind its last one, and a new sequence starts a run of its own.
"""

from collections import OrderedDict
from collections.abc import Iterator

RUN = 16  # blocks that are kept for one sequence while others still have runs to start


class FreeBlocks:
    """A set of blocks 0 .. blocks - 1, all of them at first. Every operation takes constant time."""

    def __init__(self, blocks: int) -> None:
        self._free = OrderedDict.fromkeys(range(blocks))
        self._left = [min(RUN, blocks - first) for first in range(0, blocks, RUN)]
        self._whole = OrderedDict.fromkeys(run for run, left in enumerate(self._left) if left == RUN)

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    def add(self, block: int) -> None:
        self._free[block] = None
        run = block // RUN
        self._left[run] += 1
        if self._left[run] == RUN:
            self._whole[run] = None

    def take(self, last: int | None) -> int:
        """The block behind `last`, else the first of a run that is wholly free, else any."""
        if last is not None and last + 1 in self._free:
            block = last + 1
        elif self._whole:
            block = next(iter(self._whole)) * RUN
        else:
            block = next(iter(self._free))
        del self._free[block]
        self._left[block // RUN] -= 1
        self._whole.pop(block // RUN, None)
        return block
