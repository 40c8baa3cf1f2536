"""The map of the memory that one expert node shares with its attention nodes: terms, node records, flags, mailboxes.

It says where everything lies, and reads and writes the terms and the records. It does not know where the memory comes
from, nor who waits on it.

    page 0     magic, segment bytes, the terms of the rendezvous
    page 1...  one line per node: pid, state, bell, sleepers, turn (expert first, then the attention nodes), and behind
               them four words about the loan of its core, which kernels/native/lent_core.h names, and its door's number
    then       one line per direction of each box: its flag, and how much of the next message is there
    then       the mailboxes, each on pages of its own
"""

import ctypes
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.comm.binding import own_memory, place
from afserve.comm.mailbox.flags import BellWord, LaneWords
from afserve.comm.mailbox.mailbox import Mailbox
from afserve.comm.mailbox.rendezvous import FIELDS
from afserve.comm.mailbox.wire import MAGIC, SEQUENCES, Frame, aligned
from afserve.comm.transport import Box, Kind, Layout
from afserve.errors import RendezvousError

log = logging.getLogger("afserve.comm")
PAGE = 4096
LINE = 64
_TERMS = struct.Struct("<QQ" + "Q" * len(FIELDS))
_PID, _STATE, _BELL, _SLEEPERS, _TURN, _LOAN, _WAITING, _DOOR = 0, 4, 8, 12, 16, 24, 36, 40
_BORROWER = 0  # the attention node that an expert node may lend its core to
_PROGRESS = 8  # of a flag's line
_MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

EMPTY, HERE, LEFT = 0, 1, 2
_TURN_SEQUENCES = 1 << 20


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """Offsets, from the layout alone; both ends compute them and compare the total.

    It is of the attention nodes from `first` on, which is 0 but where one of them maps its own mailboxes only.
    """

    layout: Layout
    expert: int
    attention_nodes: int
    first: int = 0

    @property
    def _lanes(self) -> int:
        return self.attention_nodes * self.layout.micro_batches

    @property
    def _flags(self) -> int:
        return PAGE + aligned((1 + self.attention_nodes) * LINE, PAGE)

    @property
    def _boxes(self) -> int:
        return self._flags + aligned(2 * self._lanes * LINE, PAGE)

    def _stride(self) -> tuple[int, int]:
        dispatch, combine = Frame(Kind.DISPATCH, self.layout), Frame(Kind.COMBINE, self.layout)
        return aligned(dispatch.capacity, PAGE), aligned(combine.capacity, PAGE)

    @property
    def total_bytes(self) -> int:
        return self._boxes + self._lanes * sum(self._stride())

    def boxes(self, attention: int | None = None) -> Iterator[Box]:
        """The boxes of one attention node, or of all of them."""
        every = range(self.first, self.first + self.attention_nodes)
        for a in every if attention is None else (attention,):
            for m in range(self.layout.micro_batches):
                yield Box(a, self.expert, m)

    def record(self, attention: int | None) -> int:
        """Offset of a node's line; None is the expert node."""
        return PAGE + LINE * (0 if attention is None else 1 + attention - self.first)

    def flag(self, box: Box, kind: Kind) -> int:
        return self._flags + LINE * (2 * self._lane(box) + (kind is Kind.COMBINE))

    def mailbox(self, box: Box, kind: Kind) -> int:
        dispatch, combine = self._stride()
        return (
            self._boxes + self._lane(box) * (dispatch + combine) + (dispatch if kind is Kind.COMBINE else 0)
        )

    def _lane(self, box: Box) -> int:
        return (box.attention - self.first) * self.layout.micro_batches + box.micro_batch


def unused_bytes(size: int) -> Tensor:
    """Zeros in this process's memory, of which only what is touched becomes resident: more than the machine has may be
    asked for."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def release(address: int, size: int) -> None:
    """Of memory that `unused_bytes` or a shared file gave: whole pages, which are zeros then and take no memory."""
    if _LIBC.madvise(address, size, mmap.MADV_REMOVE):
        raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")


class Segment:
    """A map over real memory."""

    def __init__(self, where: SegmentMap, memory_B: Tensor) -> None:
        assert memory_B.numel() >= where.total_bytes
        self.map = where
        self.memory_B = memory_B
        raw = memory_B.numpy().data
        self._head = raw[:PAGE]
        self._words = raw.cast("I")

    @classmethod
    def private(cls, where: SegmentMap, attention: int | None = None, turn: int = 0) -> "Segment":
        """In this process's own memory, of which only what is used becomes resident: room for more attention nodes than
        ever come costs addresses.

        `turn` is how many processes have had an attention node's place so far: its numbers begin where no answer to a
        predecessor can be taken for its own.
        """
        segment = cls(where, unused_bytes(where.total_bytes))
        for box in where.boxes(attention) if attention is not None else ():
            for kind in (Kind.DISPATCH, Kind.COMBINE):
                segment.set_word(box, kind, turn * _TURN_SEQUENCES % SEQUENCES)
        return segment

    def write_terms(self, terms: dict[str, int]) -> None:
        _TERMS.pack_into(self._head, 0, MAGIC, self.map.total_bytes, *(terms[field] for field in FIELDS))

    def pid(self, attention: int | None) -> int:
        return self._words[(self.map.record(attention) + _PID) // 4]

    def state(self, attention: int | None) -> int:
        return self._words[(self.map.record(attention) + _STATE) // 4]

    def turn(self, attention: int | None) -> int:
        """How many processes have had this place; 0 while nobody came."""
        return self._words[(self.map.record(attention) + _TURN) // 4]

    def claim(self, attention: int | None, pid: int) -> None:
        """Take a node's place. The last word written tells the peers."""
        turn = self.turn(attention)
        self._set(attention, _PID, pid)
        self._set(attention, _SLEEPERS, 0)  # a predecessor may have died asleep
        self._set(attention, _LOAN, 0)  # or while its core was lent
        if attention == _BORROWER:  # or while it computed on the expert node's, or waited to
            self._set(None, _LOAN, 0)
            self._set(None, _WAITING, 0)
        self._set(attention, _STATE, HERE)
        self._set(attention, _TURN, turn + 1 & 0xFFFFFFFF)

    def set_door(self, attention: int | None, number: int) -> None:
        """Where a node is woken that sleeps in its connections, before it does."""
        self._set(attention, _DOOR, number)

    def draw_near(self, attention: int | None) -> None:
        """What this node reads lies in its own memory from now on, whoever writes there first, where it was bound to
        some. The node is the caller's thread; pages that have been written stay where they are."""
        memory, kind = own_memory(), Kind.DISPATCH if attention is None else Kind.COMBINE
        if memory is None:
            return
        size = aligned(Frame(kind, self.map.layout).capacity, PAGE)
        for box in self.map.boxes(attention):
            if refused := place(self._address(box, kind), size, memory):
                log.warning("mailboxes lie where they are written first: %s", refused)
                return

    def leave(self, attention: int | None) -> None:
        self._set(attention, _STATE, LEFT)

    def word(self, box: Box, kind: Kind) -> int:
        return self._words[self.map.flag(box, kind) // 4]

    def set_word(self, box: Box, kind: Kind, value: int) -> None:
        """Before anybody looks: where the sequence numbers of a box begin."""
        self._words[self.map.flag(box, kind) // 4] = value

    def bell(self, attention: int | None) -> BellWord:
        return BellWord(self.memory_B, self.map.record(attention) + _BELL)

    def lane_words(self, box: Box, *, attention_side: bool) -> LaneWords:
        dispatch, combine = self.map.flag(box, Kind.DISPATCH), self.map.flag(box, Kind.COMBINE)
        if attention_side:
            return LaneWords(self.memory_B, combine, dispatch, self.map.record(None) + _BELL)
        return LaneWords(self.memory_B, dispatch, combine, self.map.record(box.attention) + _BELL)

    def mailbox(self, box: Box, kind: Kind) -> Mailbox:
        frame = Frame(kind, self.map.layout)
        start = self.map.mailbox(box, kind)
        progress = self.memory_B.data_ptr() + self.map.flag(box, kind) + _PROGRESS
        return Mailbox(box, frame, self.memory_B[start : start + aligned(frame.capacity)], progress)

    @property
    def gives_back(self) -> bool:
        """Whether pages of its mailboxes can be given back."""
        return True

    def release_pages(self, box: Box, rows: int) -> None:
        """The pages of both of its mailboxes behind messages of `rows` rows: they are zeros then and take no memory."""
        for kind in (Kind.DISPATCH, Kind.COMBINE):
            frame = Frame(kind, self.map.layout)
            keep, whole = aligned(frame.span(rows).end, PAGE), aligned(frame.capacity, PAGE)
            if keep < whole:
                release(self._address(box, kind) + keep, whole - keep)

    def _address(self, box: Box, kind: Kind) -> int:
        """Of the first page of a mailbox."""
        return self.memory_B.data_ptr() + self.map.mailbox(box, kind)

    def _set(self, attention: int | None, field: int, value: int) -> None:
        self._words[(self.map.record(attention) + field) // 4] = value


@dataclass(frozen=True, slots=True)
class DialledSegment:
    """An expert node's memory that is mapped and not yet claimed: all that `dial` makes where memory is shared."""

    segment: Segment

    @property
    def expert(self) -> int:
        return self.segment.map.expert

    def close(self) -> None:
        """Nothing was claimed; the map goes with the last tensor over it."""


def read_terms(head: memoryview, peer: str) -> tuple[int, dict[str, int]]:
    """(segment bytes, terms) of the first page. Raises RendezvousError when it is not afserve's."""
    magic, size, *values = _TERMS.unpack_from(head)
    if magic != MAGIC:
        raise RendezvousError(
            f"{peer}: its shared memory does not begin like afserve's; is the address still current?"
        )
    return size, dict(zip(FIELDS, values, strict=True))
