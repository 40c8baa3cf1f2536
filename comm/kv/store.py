"""What moving blocks needs of the memory that they are in: the seam between the protocol and a node's KV cache.

Blocks are numbers of that memory, names are the same everywhere.
"""

from collections.abc import Sequence
from typing import Protocol

from afserve.comm.kv.messages import Name, Payload


class BlockStore(Protocol):
    """All calls come from one thread. Whoever holds a block releases it, once."""

    @property
    def block_bytes(self) -> int: ...

    def find(self, names: Sequence[Name]) -> list[int]:
        """Hold the blocks with these names, the longest run from the first on that is here."""

    def reserve(self, count: int, *, copies: bool, spare: bool = False) -> list[int]:
        """Hold up to `count` blocks with unknown content; fewer, where others need the memory more than `copies`, or
        where no more is `spare`: nothing is thrown out for that."""

    def release(self, blocks: Sequence[int], *, copies: bool = False, awaited: bool = False) -> None:
        """Let them go. A block with a name stays findable until its memory is needed, one of `copies` for longer, one
        that is `awaited` by a request until that begins."""

    def publish(self, block: int, name: Name) -> None:
        """A held block is written: others may find it from now on."""

    def take(self, blocks: Sequence[int], names: Sequence[Name], into: memoryview) -> int:
        """Copy the bytes of held blocks there, one behind the other. Their `checksum_of`, under these names."""

    def fill(self, blocks: Sequence[int], names: Sequence[Name], payload: Payload) -> int:
        """Replace held blocks that nobody can find yet by what `take` gave elsewhere. The `checksum_of` what was there:
        if it is not what was said, they have to be cleared."""

    def clear(self, blocks: Sequence[int]) -> None:
        """What is in these held blocks is no number that anybody may read."""
