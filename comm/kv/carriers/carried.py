"""Connections whose payloads go beside them: a library reads them from the lender's memory (`carriers/`).

A Piece is put into a slot of this end's memory, lent to the peer and said as Placed. The other end's library reads it
into a slot there, and the Piece goes on as if it had come over the connection: names, checksums, leases and deadlines
are those of all wires. What the libraries at both ends have to say to each other goes as Told. A thread does it, so
that the node that computes never waits. Slots are fixed memory, and no peer gets more than half of them. A read that
fails or takes too long ends its transfer, and what is missing is computed.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from afserve.clock import Clock
from afserve.comm.kv.carriers.carrier import Carrier, Memory
from afserve.comm.kv.lender import LEASE_SECONDS
from afserve.comm.kv.messages import (
    Abort,
    EndTransfer,
    Fetched,
    Message,
    Piece,
    Placed,
    Told,
    blocks_of_piece,
)
from afserve.comm.kv.puller import STALL_SECONDS
from afserve.comm.kv.socket_wires import SocketWires
from afserve.comm.kv.wires import Closed, Event, PeerMessage, Wires

log = logging.getLogger("afserve.kv")
SLOTS = 16  # in each direction
OF_A_PEER = SLOTS // 2
READ_SECONDS = STALL_SECONDS
LENT_SECONDS = LEASE_SECONDS + READ_SECONDS  # a slot that the puller says nothing of
CLOSE_SECONDS = 5.0
_SHORT, _LONG = 50e-6, 1e-3  # between two looks while something is under way
_PAGE = 4096
Wake = Callable[[], None]


def slot_bytes(block_bytes: int) -> int:
    """The largest piece, in whole pages."""
    return -(-blocks_of_piece(block_bytes) * block_bytes // _PAGE) * _PAGE


def memory_for(block_bytes: int) -> Memory:
    """Takes real memory as slots are used first, unless the library pins it."""
    return Memory(2 * SLOTS * slot_bytes(block_bytes))


@dataclass(slots=True)
class _Lent:
    """A slot that a peer reads."""

    peer: int
    until: float


@dataclass(slots=True)
class _Read:
    """`into` a slot here. One that was given up keeps its slot until the library is done with it."""

    peer: int
    placed: Placed
    into: int
    until: float
    given_up: bool = False


class CarriedWires(Wires):
    """`over(wake)` makes the connections that say everything but payloads; `memory` is that of `carrier`."""

    def __init__(
        self,
        over: Callable[[Wake], SocketWires],
        carrier: Carrier,
        memory: Memory,
        block_bytes: int,
        wake: Wake,
        clock: Clock,
    ) -> None:
        self._bell = threading.Event()
        self._wires = over(self._bell.set)
        self.address = self._wires.address
        self._carrier, self._memory, self._wake, self._clock = carrier, memory, wake, clock
        self._block_bytes, self._slot = block_bytes, slot_bytes(block_bytes)
        self._commands: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._woken = threading.Event()  # somebody was woken and has not looked yet
        self._to_place: deque[tuple[int, Piece]] = deque()
        self._lent: dict[int, _Lent] = {}  # by offset
        self._to_read: deque[tuple[int, Placed, float]] = deque()
        self._reads: dict[int, _Read] = {}
        self._where: dict[int, bytes] = {}
        self._forgotten: set[bytes] = set()
        self._free_out = [slot * self._slot for slot in range(SLOTS)]
        self._free_in = [slot * self._slot for slot in range(SLOTS, 2 * SLOTS)]
        self._running = True
        self._thread = threading.Thread(target=self._run, name="kv-carrier", daemon=True)

    def start(self) -> None:
        self._wires.start()
        self._thread.start()

    # ---- by the node's thread

    def dial(self, address: str) -> int:
        return self._wires.dial(address)

    def send(self, peer: int, message: Message) -> None:
        self._commands.put((peer, message))
        self._bell.set()

    def receive(self, keep: bool = False) -> list[Event]:
        self._woken.clear()
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        """What was sent and has not left yet is lost."""
        self._running = False
        self._bell.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("the library that carries KV blocks did not end within %g s", CLOSE_SECONDS)
                return
        self._wires.close()
        self._carrier.close()

    # ---- by the carrier's thread

    def _run(self) -> None:
        pause = _SHORT
        while self._running:
            under_way = self._lent or self._reads or self._to_read
            self._bell.wait(pause if under_way else None)
            self._bell.clear()
            pause = _SHORT if self._turn() else min(2 * pause, _LONG)

    def _turn(self) -> bool:
        """Whether anything has moved."""
        now = self._clock.now()
        heard = self._wires.receive()
        moved = bool(heard) or not self._commands.empty()
        while not self._commands.empty():
            peer, message = self._commands.get()
            if isinstance(message, Piece):
                self._to_place.append((peer, message))
            else:
                self._wires.send(peer, message)
        self._tell([event for event in heard if not self._takes(event, now)])
        for ended in self._carrier.ended():
            moved = True
            self._end(self._reads.pop(ended.read), ended.why)
        self._give_up(now)
        self._place(now)
        self._start_reads(now)
        for peer, what in self._carrier.said():
            moved = True
            self._wires.send(peer, Told(0, what))
        return moved

    def _takes(self, event: Event, now: float) -> bool:
        """Whether it concerns nobody else."""
        if isinstance(event, Closed):
            self._closed(event.peer)
            return False
        if isinstance(event.message, Placed):
            self._to_read.append((event.peer, event.message, now + READ_SECONDS))
            return True
        if isinstance(event.message, Fetched):
            self._take_back(event.peer, event.message.at)
            return True
        if isinstance(event.message, Told):
            self._carrier.heard(event.peer, event.message.what)
            return True
        return False

    def _place(self, now: float) -> None:
        """Pieces whose peers have room, into slots."""
        waiting: deque[tuple[int, Piece]] = deque()
        while self._to_place and self._free_out:
            peer, piece = self._to_place.popleft()
            if sum(lent.peer == peer for lent in self._lent.values()) >= OF_A_PEER:
                waiting.append((peer, piece))
                continue
            at = self._free_out.pop()
            self._memory.view[at : at + len(piece.payload)] = piece.payload
            self._lent[at] = _Lent(peer, now + LENT_SECONDS)
            where = self._carrier.lend(peer, at, len(piece.payload))
            placed = Placed(piece.transfer, piece.first, piece.count, piece.checksum, at, where)
            self._wires.send(peer, placed)
        self._to_place.extendleft(reversed(waiting))

    def _take_back(self, peer: int, at: int) -> None:
        """Said late or by another peer, it is of an earlier piece."""
        if at in self._lent and self._lent[at].peer == peer:
            del self._lent[at]
            self._free_out.append(at)

    def _start_reads(self, now: float) -> None:
        waiting: deque[tuple[int, Placed, float]] = deque()
        while self._to_read and self._free_in:
            peer, placed, until = self._to_read.popleft()
            if sum(read.peer == peer for read in self._reads.values()) >= OF_A_PEER:
                waiting.append((peer, placed, until))
                continue
            size = placed.count * self._block_bytes
            if size > self._slot:
                self._answer(peer, placed, 0, f"{size} bytes are more than a slot's {self._slot}")
                continue
            into = self._free_in.pop()
            self._where[peer] = placed.where
            number = self._carrier.read(peer, placed.where, placed.at, into, size)
            self._reads[number] = _Read(peer, placed, into, until)
        self._to_read.extendleft(reversed(waiting))

    def _end(self, read: _Read, why: str) -> None:
        """The library is done with it."""
        if not read.given_up:
            self._answer(read.peer, read.placed, read.into, why)
        self._free_in.append(read.into)

    def _answer(self, peer: int, placed: Placed, into: int, why: str) -> None:
        """The piece, or the end of its transfer."""
        self._wires.send(peer, Fetched(placed.transfer, placed.at))
        if why:
            last = placed.first + placed.count - 1
            log.warning("blocks %d to %d of a transfer did not come: %s", placed.first, last, why)
            self._wires.send(peer, Abort(placed.transfer))
            told = f"blocks {placed.first} to {last} did not come: {why}"
            self._tell([PeerMessage(peer, EndTransfer(placed.transfer, told))])
            return
        payload = bytearray(self._memory.view[into : into + placed.count * self._block_bytes])
        piece = Piece(placed.transfer, placed.first, placed.count, placed.checksum, memoryview(payload))
        self._tell([PeerMessage(peer, piece)])

    def _give_up(self, now: float) -> None:
        late = f"nothing came for {READ_SECONDS:g} s"
        for read in self._reads.values():
            if not read.given_up and now >= read.until:
                read.given_up = True
                self._answer(read.peer, read.placed, read.into, late)
        while self._to_read and now >= self._to_read[0][2]:
            peer, placed, _ = self._to_read.popleft()
            self._answer(peer, placed, 0, late)
        for at, lent in list(self._lent.items()):
            if now >= lent.until:
                self._take_back(lent.peer, at)
        if self._forgotten:
            needed = {read.placed.where for read in self._reads.values()} | set(self._where.values())
            for where in self._forgotten - needed:
                self._carrier.forget(where)
            self._forgotten &= needed

    def _closed(self, peer: int) -> None:
        """What this peer still reads is not its any more: it would be wrong bytes to a transfer that is over."""
        self._to_place = deque(one for one in self._to_place if one[0] != peer)
        self._to_read = deque(one for one in self._to_read if one[0] != peer)
        for at, lent in list(self._lent.items()):
            if lent.peer == peer:
                self._take_back(peer, at)
        for read in self._reads.values():
            read.given_up = read.given_up or read.peer == peer
        where = self._where.pop(peer, None)
        if where is not None and where not in self._where.values():
            self._forgotten.add(where)
        self._carrier.left(peer)

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._events.extend(events)
            if not self._woken.is_set():
                self._woken.set()
                self._wake()
