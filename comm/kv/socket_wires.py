"""Connections of KV blocks over sockets: a thread reads and writes them, so that the node that computes never does.

A node that has nothing else to do reads and writes them itself, and sleeps in them (`duty`). Inside a host the bytes of
pieces go through memory that both ends have (`rooms`). `reach` says where a node listens and connects, encrypted
between hosts where there are certificates. A helper thread greets; then the connection is everybody's. Memory is
bounded by what peers may send before they are answered (`lender.WINDOW_BYTES`) and by the size of a message, which is
checked first.
"""

import itertools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from afserve.comm.kv.aside import Aside, this_core
from afserve.comm.kv.duty import COMES, ROOM, Duty
from afserve.comm.kv.messages import Ack, Message, Piece, blocks_of_piece
from afserve.comm.kv.reach import address_of, connect
from afserve.comm.kv.rooms import OwnSlots, PeerSlots, Room, share, slot_bytes
from afserve.comm.kv.stream import PeerStream, parts_of
from afserve.comm.kv.wires import Closed, Event, PeerMessage, Wires
from afserve.comm.transports import greeting
from afserve.comm.transports.encrypted import Connection, Encrypted
from afserve.comm.transports.entrance import Entrance, Newcomer
from afserve.comm.transports.greeting import Words
from afserve.errors import AfserveError, ProtocolError, RendezvousError
from afserve.tls import Certificates

log = logging.getLogger("afserve.kv")
PROTOCOL = 9
_PURPOSE = f"kv {PROTOCOL}"
_DIAL_SECONDS = 1.5  # for a connection and its greeting
_REFUSED = "refused"
_SHORT_BYTES = 64 << 10
Slots = tuple[OwnSlots | None, PeerSlots | None]


def _gone(error: OSError) -> str:
    return f"its connection has ended ({error.strerror})"


class SocketWires(Wires):
    """`terms` is what both ends must agree on. Another thread calls `wake` when `receive` has something new, or a peer
    `has_room` again; who dials need not be who sends and receives. Where `shares` is said, pieces go through memory of
    both ends inside a host."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        terms: Mapping[str, str],
        block_bytes: int,
        wake: Callable[[], None],
        certificates: Certificates | None = None,
        *,
        shares: bool = False,
    ) -> None:
        self.address = address_of(listener, certificates)
        self._certificates = certificates
        self._entrance = Entrance(listener, certificates)
        self._token, self._terms, self._wake = token, dict(terms), wake
        self._sizes = block_bytes, slot_bytes(blocks_of_piece(block_bytes, large=True) * block_bytes)
        self._shares = shares
        self._numbers = itertools.count(1)
        self._events: deque[Event] = deque()
        self._woken = threading.Event()  # somebody was woken and has not looked yet
        self._duty = Duty()
        self._moving = False
        self._aside = Aside()
        self._last: PeerStream | None = None  # that has moved something
        self._joining = threading.Lock()  # who begins to stand, or sends before that, or ends all
        self._streams: dict[int, PeerStream] = {}
        self._early: dict[int, deque[Room]] = {}  # for connections that do not stand yet
        self._running = True
        self._thread = threading.Thread(target=self._run, name="kv-wires", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._entrance.start(self._let_in)

    # ---- by the node's thread

    def dial(self, address: str) -> int:
        peer = next(self._numbers)
        with self._joining:
            self._early[peer] = deque()
        threading.Thread(target=self._greet_owner, args=(peer, address), name="kv-dial", daemon=True).start()
        return peer

    def send(self, peer: int, message: Message) -> None:
        parts, stream = parts_of(message), self._streams.get(peer)
        if stream is None:
            with self._joining:
                stream = self._streams.get(peer)
                if stream is None and peer in self._early:
                    self._early[peer].extend(parts)
        if stream is not None:
            if isinstance(message, Ack):
                stream.answered(message)
            self._put(stream, parts)

    def _put(self, stream: PeerStream, parts: list[Room]) -> None:
        """This thread writes what is short, or while it has nothing else to do."""
        at_once = stream.near or self._duty.writes or sum(len(part.view) for part in parts) <= _SHORT_BYTES
        with stream.alone:
            if stream.closed:
                return
            self._write(stream, parts, at_once=at_once)
            if isinstance(stream.error, OSError):
                self._end(stream.peer, _gone(stream.error))
                self._tell()
        if stream.near:
            self._duty.expect()

    def has_room(self, peer: int) -> bool:
        return peer not in self._streams or self._streams[peer].has_room

    def takes_large(self, peer: int) -> bool:
        """Where the bytes do not go over the connection: there, smaller ones come sooner."""
        stream = self._streams.get(peer)
        return stream is not None and stream.near

    def room(self, peer: int, size: int) -> Room:
        stream = self._streams.get(peer)
        return Room(memoryview(bytearray(size))) if stream is None else stream.room(size)

    def used(self, said: PeerMessage) -> None:
        stream = self._streams.get(said.peer)
        if stream is None or not isinstance(said.message, Piece):
            return
        if (fetched := stream.used(said.message)) is not None:
            self.send(said.peer, fetched)

    @property
    def kept(self) -> bool:
        return self._duty.mine

    @property
    def moving(self) -> bool:
        return self._moving

    def receive(self, keep: bool = False) -> list[Event]:
        self._woken.clear()
        self._moving = False
        for stream, what in self._duty.take(keep):
            self._last, before = stream, stream.moved
            self._serve(stream, what)
            self._moving |= stream.moved != before
        return [self._events.popleft() for _ in range(len(self._events))]

    def give_way(self) -> None:
        if self._aside.give_way() and (other := self._last) is not None:
            self._aside.leave(
                other.core if other.near else this_core()
            )  # between hosts nobody says who has it

    def apart(self, peer: int) -> None:
        if self._duty.writes and (stream := self._streams.get(peer)) is not None:
            self._aside.leave(stream.core)
            stream.tell_core()

    def leave(self) -> None:
        self._duty.leave()

    def sleep(self, seconds: float) -> None:
        """Until `receive` finds something that nobody is woken for, until a `ring`, or for so long."""
        self._duty.sleep(seconds)

    def ring(self) -> None:
        """By any thread: who sleeps wakes, who does not will not."""
        self._duty.ring()

    def close(self) -> None:
        """What was sent and not yet handed to the kernel is lost."""
        self._entrance.close()
        if self._thread.is_alive():
            self._running = False
            self._duty.stop()
            self._thread.join()
        self._shut()

    # ---- by a helper's

    def _greet_owner(self, peer: int, address: str) -> None:
        try:
            connection, words = greeting.greet(
                lambda seconds: connect(address, seconds, self._certificates),
                self._token,
                _PURPOSE,
                self._terms,
                address,
                _DIAL_SECONDS,
            )
        except AfserveError as error:
            self._refuse(peer, error.message)
            return
        try:
            compare(self._terms, words, address)
            self._welcome(peer, connection)
        except (OSError, AfserveError) as error:
            connection.close()
            self._refuse(peer, error.message if isinstance(error, AfserveError) else f"{address}: {error}")

    def _let_in(self, newcomer: Newcomer) -> None:
        """Raises why it is not let in."""
        caller = greeting.listen(newcomer.connection, self._token, _PURPOSE, newcomer.until)
        newcomer.proven()
        try:
            compare(self._terms, caller.words, "who called")
        except RendezvousError as error:
            caller.send_answer(self._terms | {_REFUSED: error.message})
            raise
        caller.send_answer(self._terms)
        self._welcome(next(self._numbers), newcomer.connection)

    def _share(self, connection: Connection) -> Slots:
        if not self._shares or isinstance(connection, Encrypted) or connection.family != socket.AF_UNIX:
            return None, None
        return share(connection, self._sizes[1])

    def _refuse(self, peer: int, why: str) -> None:
        log.warning("a connection for KV blocks was not made: %s", why)
        self._end(peer, why)
        self._tell()

    def _welcome(self, peer: int, connection: Connection) -> None:
        """What was sent to it before goes first; from here on others may put something behind that."""
        stream = PeerStream(peer, connection, self._sizes, *self._share(connection))
        with self._joining, stream.alone:
            if not self._running:
                stream.close()
                return
            stream.out = self._early.pop(stream.peer, deque())
            self._streams[stream.peer] = stream
            self._serve(stream, COMES | ROOM)
        self._tell()

    # ---- by the wires' thread

    def _run(self) -> None:
        while self._running:
            served = [self._serve(stream, what) for stream, what in self._duty.wait(self._tell)]
            if any(served):
                self._tell()

    # ---- by whoever looks after a connection

    def _serve(self, stream: PeerStream, what: int) -> bool:
        """Whether there is something to receive, or room. What one thread has read is told before another reads."""
        with stream.alone:
            if stream.closed:
                return False
            said = stream.read() if what & ~ROOM else []
            self._events += [PeerMessage(stream.peer, one) for one in said if not stream.fetched(one)]
            room = stream.error is None and self._write(stream)
            if (found := stream.error) is not None:
                self._end(stream.peer, found.message if isinstance(found, ProtocolError) else _gone(found))
            return bool(said or found or room)

    def _write(self, stream: PeerStream, parts: Sequence[Room] = (), *, at_once: bool = True) -> bool:
        """Whether there is more room. What the kernel does not take is for whoever looks after the connection."""
        try:
            room = stream.write(parts, at_once=at_once)
            self._duty.look(stream)
            return room
        except OSError as error:
            stream.error = error
            return False

    def _end(self, peer: int, why: str) -> None:
        """Who called and was not let in was never anybody's peer; to hear of its end harms nobody."""
        self._early.pop(peer, None)
        if (stream := self._streams.pop(peer, None)) is not None:
            with stream.alone:
                self._duty.forget(stream)
                stream.close()
        self._events.append(Closed(peer, why))

    def _tell(self) -> None:
        """There may be something to receive, or room."""
        if not self._woken.is_set():
            self._woken.set()
            self._wake()

    def _shut(self) -> None:
        """Whom a helper greets from now on it lets go."""
        with self._joining:
            self._running = False
            streams = list(self._streams)
        for peer in streams:
            self._end(peer, "this node ends")
        self._duty.close()


def compare(mine: Words, theirs: Words, peer: str) -> None:
    """Raises RendezvousError naming the first field in which the two differ."""
    for field in sorted(mine.keys() | theirs.keys() - {_REFUSED}):
        here, there = mine.get(field, "nothing"), theirs.get(field, "nothing")
        if here != there:
            raise RendezvousError(
                f"KV blocks of {peer}: {field} is {there} there and {here} here; tokens are computed again",
                param=field,
            )
    if _REFUSED in theirs:
        raise RendezvousError(theirs[_REFUSED])
