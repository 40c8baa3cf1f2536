"""Libraries that carry payloads between attention nodes: the seam between pieces of KV and a transfer engine.

Each end lends the library one stretch of memory, and reads from the stretches of others. It knows no blocks, no
requests and no connections.
"""

import ctypes
import mmap
from dataclasses import dataclass
from typing import Protocol


class Memory:
    """`size` bytes that stay at one `address` for as long as the process lives: a library may write there late."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


@dataclass(frozen=True, slots=True)
class Ended:
    """A read by its number; `why` is empty where all bytes came."""

    read: int
    why: str = ""


class Carrier(Protocol):
    """All calls come from one thread; none waits, but to meet a peer's library the first time."""

    @property
    def where(self) -> bytes:
        """What other ends need to read this end's memory; other bytes in each life."""
        ...

    def read(self, where: bytes, at: int, into: int, length: int) -> int:
        """Begin to copy `length` bytes from offset `at` of the memory that its owner calls `where` to offset `into`
        of this end's; the read's number. One that cannot begin has ended at once."""
        ...

    def ended(self) -> list[Ended]:
        """Reads that have ended since the last call. What others read here may go on only while this is called."""
        ...

    def forget(self, where: bytes) -> None:
        """Its owner has gone, and nothing is read from it now."""
        ...

    def close(self) -> None: ...
