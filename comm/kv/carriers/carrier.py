"""Libraries that carry payloads between attention nodes: the seam between pieces of KV and a transfer engine.

Each end lends the library one stretch of memory, and reads from the stretches of others. Peers are numbers of greeted
connections. It knows no blocks and no requests.
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

    def lend(self, peer: int, at: int, length: int) -> bytes:
        """This peer may read `length` bytes from offset `at` of this end's memory from now on; what its end calls that
        memory, other bytes in each life."""

    def read(self, peer: int, where: bytes, at: int, into: int, length: int) -> int:
        """Begin to copy `length` bytes from offset `at` of the memory that `peer` calls `where` to offset `into` of
        this end's; the read's number. One that cannot begin has ended at once."""

    def ended(self) -> list[Ended]:
        """Reads that have ended since the last call. What others read here may go on only while this is called."""

    def forget(self, where: bytes) -> None:
        """Its owner has gone, and nothing is read from it now."""

    def said(self) -> list[tuple[int, bytes]]:
        """What the carriers of these peers are to hear from this one, since the last call."""

    def heard(self, peer: int, what: bytes) -> None:
        """What this peer's carrier has `said`, in its order."""

    def left(self, peer: int) -> None:
        """Its connection has ended: nobody waits for what is still read from it, and it reads nothing more."""

    def close(self) -> None: ...


class OneSided:
    """What a library leaves open that reads a peer's memory without this end's help."""

    where: bytes

    def lend(self, peer: int, at: int, length: int) -> bytes:
        """All of the memory may be read at any time."""
        return self.where

    def said(self) -> list[tuple[int, bytes]]:
        return []

    def heard(self, peer: int, what: bytes) -> None:
        """No such carrier says anything."""

    def left(self, peer: int) -> None:
        """`forget` says when a memory is of nobody."""
