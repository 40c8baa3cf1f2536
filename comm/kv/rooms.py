"""Where the bytes of pieces lie on their way: buffers of a process, or slots of memory that both ends of a connection
map.

Inside a host each end of a connection makes one sealed memfd, in which it alone writes, and hands it to the other over
the Unix socket. A piece is copied there out of the lender's cache and from there into the puller's; only its head
travels. Slots are fixed memory, taken as they are used first. It knows no blocks and no messages.
"""

import fcntl
import mmap
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from afserve.errors import ProtocolError, RendezvousError

SLOTS = 4  # of one end of a connection, each for one large piece
BUFFERS = 8
NOWHERE = -1
_PAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x10  # nobody maps it anew to write in it; Python names this seal from 3.15 on
_WITH, _WITHOUT = b"+", b"-"


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for the bytes of one piece; `slot` is its offset where both ends have it, else NOWHERE."""

    view: memoryview
    slot: int = NOWHERE


class Rooms(Protocol):
    """Room for what one end has under way. One thread takes, another may give back."""

    @property
    def free(self) -> bool: ...

    def take(self, size: int) -> Room:
        """Only while there is a `free` one, and not for more than one piece."""

    def give_back(self, room: Room) -> bool:
        """Whether it was taken here."""

    def close(self) -> None: ...


class Buffers:
    """Of this process, for `most` pieces of up to `size` bytes at a time. Used again, since memory that is new to a
    process costs more than a copy."""

    def __init__(self, size: int, most: int = BUFFERS) -> None:
        self._size, self._most = size, most
        self._made: dict[int, memoryview] = {}  # by the object that a view is of
        self._kept: deque[int] = deque()

    @property
    def free(self) -> bool:
        return bool(self._kept) or len(self._made) < self._most

    def take(self, size: int) -> Room:
        assert size <= self._size
        if not self._kept:
            memory = mmap.mmap(-1, self._size)
            self._made[id(memory)] = memoryview(memory)
            return Room(self._made[id(memory)][:size])
        return Room(self._made[self._kept.pop()][:size])

    def give_back(self, room: Room) -> bool:
        """Memory of others is left alone."""
        mine = (made := id(room.view.obj)) in self._made
        if mine:
            self._kept.append(made)
        return mine

    def close(self) -> None:
        self._made.clear()
        self._kept.clear()


class OwnSlots:
    """Memory that the other end reads: slots, and a page that says where this end runs. Raises OSError where there is
    none to be had."""

    def __init__(self, file: int, size: int) -> None:
        self._size, total = size, SLOTS * size + _PAGE
        os.ftruncate(file, total)
        self._memory = memoryview(mmap.mmap(file, total))
        self._core = self._memory[-_PAGE:].cast("i")
        self.tell_core(-1)
        try:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | _FUTURE_WRITE)
        except OSError:  # a system before Linux 5.1
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        self._free = deque(slot * size for slot in range(SLOTS))
        self._out: set[int] = set()

    @property
    def free(self) -> bool:
        return bool(self._free)

    def take(self, size: int) -> Room:
        """Once it is closed, memory of nobody else: what is said then goes nowhere."""
        assert size <= self._size
        try:
            slot = self._free.pop()  # the one used last: its bytes are near
        except IndexError:
            return Room(memoryview(bytearray(size)))
        self._out.add(slot)
        return Room(self._memory[slot : slot + size], slot)

    def give_back(self, room: Room) -> bool:
        """Said twice, it is one."""
        mine = room.slot in self._out
        if mine:
            self._out.discard(room.slot)
            self._free.append(room.slot)
        return mine

    def tell_core(self, core: int) -> None:
        """Where the thread of this end runs that says something now."""
        self._core[0] = core

    def close(self) -> None:
        """The map goes with the last view of it."""
        self._free.clear()


class PeerSlots:
    """Memory that the other end writes in, which can only be read here. Takes the descriptor over."""

    def __init__(self, file: int, size: int) -> None:
        self._size, total = size, SLOTS * size + _PAGE
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            there = os.fstat(file).st_size
            if sealed & fcntl.F_SEAL_SHRINK == 0 or there != total:
                raise RendezvousError(
                    f"KV blocks: the other end's memory has {there} bytes and the seals {sealed}, expected {total} "
                    "bytes that cannot shrink; tokens are computed again"
                )
            memory = memoryview(mmap.mmap(file, total, prot=mmap.PROT_READ))
            self._memory, self._core = memory[:-_PAGE], memory[-_PAGE:].cast("i")
        finally:
            os.close(file)

    @property
    def core(self) -> int:
        """Where the other end's thread ran when it last said something; whatever that end likes to write there."""
        return self._core[0]

    def piece(self, at: int, size: int) -> memoryview:
        """Raises ProtocolError where no slot begins or a piece does not fit."""
        if at % self._size or not 0 <= at < len(self._memory) or size > self._size:
            raise ProtocolError(
                f"KV blocks: {size} bytes at {at}, slots have {self._size} bytes and there are {SLOTS}"
            )
        return self._memory[at : at + size]


def slot_bytes(piece_bytes: int) -> int:
    """A piece in whole pages."""
    return -(-piece_bytes // _PAGE) * _PAGE


def share(connection: socket.socket, size: int) -> tuple[OwnSlots | None, PeerSlots | None]:
    """Hand over memory for slots of `size` bytes, and take the other end's; who has none sends pieces in messages.
    Within the connection's timeout. Raises RendezvousError for memory that is not as agreed, OSError where the other
    end hung up."""
    own, file = _own(size)
    try:
        socket.send_fds(connection, [_WITH if own else _WITHOUT], [file] if own else [])
    finally:
        if own:
            os.close(file)
    said, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not said:
        raise OSError("it hung up")
    if (said == _WITH) != bool(files):  # this process has no room for another descriptor, or may not have it
        for other in files:
            os.close(other)
        raise RendezvousError(
            "KV blocks: the other end's memory did not come with its greeting; tokens are computed again"
        )
    return own, PeerSlots(files[0], size) if files else None


def _own(size: int) -> tuple[OwnSlots | None, int]:
    """With its descriptor, for whoever hands it over."""
    try:
        file = os.memfd_create("afserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None, NOWHERE
    try:
        return OwnSlots(file, size), file
    except OSError:
        os.close(file)
        return None, NOWHERE
