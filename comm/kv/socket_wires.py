"""Connections of KV blocks over sockets: a thread reads and writes them, so that the node that computes never does.

Inside a host the bytes of pieces go through memory that both ends have (`rooms`), and while they do the node's thread
reads and writes their heads itself (`near`). `reach` says where a node listens and connects, encrypted between hosts
where there are certificates. A helper thread greets; then the one thread of all connections takes over. Memory is
bounded by what peers may send before they are answered (`lender.WINDOW_BYTES`) and by the size of a message, which is
checked first.
"""

import itertools
import logging
import queue
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping

from afserve.comm.kv.greeting import GREETING_SECONDS, answer, dial
from afserve.comm.kv.messages import Ack, Message, Piece, blocks_of_piece
from afserve.comm.kv.near import NearStreams
from afserve.comm.kv.reach import address_of, connect, received
from afserve.comm.kv.rooms import OwnSlots, PeerSlots, Room, share, slot_bytes
from afserve.comm.kv.stream import PeerStream, parts_of
from afserve.comm.kv.wires import Closed, Event, Said
from afserve.comm.transports.encrypted import Connection, Encrypted
from afserve.errors import AfserveError, ProtocolError
from afserve.tls import Certificates, why_refused

log = logging.getLogger("afserve.kv")
DIAL_SECONDS = 0.5
_SHORT_BYTES = 64 << 10
Slots = tuple[OwnSlots | None, PeerSlots | None]


def _gone(error: OSError) -> str:
    return f"its connection has ended ({error.strerror})"


class SocketWires:
    """`terms` is what both ends must agree on. Another thread calls `wake` when `receive` has something new, or a peer
    `has_room` again; who dials and sends need not be who receives. Where `shares` is said, pieces go through memory of
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
        self._listener, self._token, self._terms, self._wake = listener, token, dict(terms), wake
        self._sizes = block_bytes, slot_bytes(blocks_of_piece(block_bytes, large=True) * block_bytes)
        self._shares = shares
        self._numbers = itertools.count(1)
        self._events: deque[Event] = deque()
        self._woken = threading.Event()  # somebody was woken and has not looked yet
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rung = False  # the thread was told of commands and has not looked yet
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, PeerStream] = {}
        self._early: dict[int, deque[Room]] = {}  # for connections that do not stand yet
        self._near = NearStreams(
            lambda stream: self._order(stream, self._watch), lambda stream: self._order(stream, self._fail)
        )
        self._said = self._obeyed = 0  # messages that the thread was told to send, and that it has taken
        self._running = True
        self._thread = threading.Thread(target=self._run, name="kv-wires", daemon=True)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread.start()

    # ---- by the node's thread

    def dial(self, address: str) -> int:
        peer = next(self._numbers)
        self._command(lambda: self._early.update({peer: deque()}))
        threading.Thread(target=self._greet_owner, args=(peer, address), name="kv-dial", daemon=True).start()
        return peer

    def send(self, peer: int, message: Message) -> None:
        """What the thread was told before goes first."""
        parts, stream = parts_of(message), self._streams.get(peer)
        if stream is not None and isinstance(message, Ack):
            stream.answered(message)
        if stream is not None and self._said == self._obeyed and self._puts(stream, parts):
            self._put(stream, parts)
            return
        self._said += 1
        self._command(lambda: self._send(peer, parts))

    def _puts(self, stream: PeerStream, parts: list[Room]) -> bool:
        """Whether this thread does itself: what is short, or while it has nothing else to do."""
        if isinstance(stream.connection, Encrypted):
            return False
        return stream.near or stream.held or sum(len(part.view) for part in parts) <= _SHORT_BYTES

    def _put(self, stream: PeerStream, parts: list[Room]) -> None:
        try:
            left = stream.put(parts)
        except OSError as error:
            stream.error = error
            self._order(stream, self._fail)
            return
        self._near.expect(stream)
        if left:
            self._order(stream, self._write)

    def has_room(self, peer: int) -> bool:
        return peer not in self._streams or self._streams[peer].has_room

    def takes_large(self, peer: int) -> bool:
        """Where the bytes do not go over the connection: there, smaller ones come sooner."""
        stream = self._streams.get(peer)
        return stream is not None and stream.near

    def room(self, peer: int, size: int) -> Room:
        stream = self._streams.get(peer)
        return Room(memoryview(bytearray(size))) if stream is None else stream.room(size)

    def used(self, said: Said) -> None:
        stream = self._streams.get(said.peer)
        if stream is None or not isinstance(said.message, Piece):
            return
        if (fetched := stream.used(said.message)) is not None:
            self.send(said.peer, fetched)

    @property
    def kept(self) -> bool:
        return self._near.kept

    @property
    def moving(self) -> bool:
        return self._near.moving

    def receive(self, keep: bool = False) -> list[Event]:
        self._woken.clear()
        self._near.take(keep)
        told = [self._events.popleft() for _ in range(len(self._events))]
        return told + self._near.read(keep)

    def close(self) -> None:
        """What was sent and not yet handed to the kernel is lost."""
        if self._thread.ident is None:
            self._shut()
            return
        self._command(self._stop)
        self._thread.join()

    def _command(self, act: Callable[[], None]) -> bool:
        """To be done by the wires' thread; False where that has ended."""
        self._commands.put(act)
        if self._rung:
            return self._running
        self._rung = True
        try:
            self._ringer.send(b"!")
        except OSError:
            return False
        return True

    def _order(self, stream: PeerStream, act: Callable[[PeerStream], None]) -> None:
        """To be done with this connection by the wires' thread, if it is still there."""
        self._command(lambda: act(stream) if self._streams.get(stream.peer) is stream else None)

    # ---- by a helper's

    def _greet_owner(self, peer: int, address: str) -> None:
        try:
            connection = connect(address, DIAL_SECONDS, self._certificates)
        except AfserveError as error:
            self._refuse(peer, error.message)
            return
        self._greet(peer, connection, address, dial)

    def _greet_caller(self, peer: int, plain: socket.socket) -> None:
        plain.settimeout(GREETING_SECONDS)
        try:
            connection = received(plain, self._certificates)
        except (OSError, AfserveError) as error:
            plain.close()
            why = why_refused(error) if isinstance(error, ssl.SSLError) else str(error)
            self._refuse(peer, f"who called: {why}")
            return
        self._greet(peer, connection, "who called", answer)

    def _greet(
        self,
        peer: int,
        connection: Connection,
        whom: str,
        greet: Callable[[Connection, str, Mapping[str, str], str], None],
    ) -> None:
        try:
            connection.settimeout(GREETING_SECONDS)
            greet(connection, self._token, self._terms, whom)
            slots = self._share(connection)
        except (OSError, AfserveError, ValueError) as error:
            connection.close()
            self._refuse(peer, error.message if isinstance(error, AfserveError) else f"{whom}: {error}")
            return
        if not self._command(lambda: self._welcome(peer, connection, slots)):
            connection.close()

    def _share(self, connection: Connection) -> Slots:
        if not self._shares or isinstance(connection, Encrypted) or connection.family != socket.AF_UNIX:
            return None, None
        return share(connection, self._sizes[1])

    def _refuse(self, peer: int, why: str) -> None:
        log.warning("a connection for KV blocks was not made: %s", why)
        self._command(lambda: self._end(peer, why))

    # ---- by the wires' thread

    def _run(self) -> None:
        try:
            while self._running:
                for key, events in self._selector.select():
                    if key.fileobj is self._bell:
                        self._obey()
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, PeerStream) and key.data.peer in self._streams:
                        self._move(key.data, events)
        finally:
            self._shut()

    def _obey(self) -> None:
        self._bell.recv(4096)
        self._rung = False  # what comes from here on rings again
        while not self._commands.empty():
            self._commands.get()()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("a connection for KV blocks could not be taken: %s", error)
            return
        args = (next(self._numbers), connection)
        threading.Thread(target=self._greet_caller, args=args, name="kv-greet", daemon=True).start()

    def _welcome(self, peer: int, connection: Connection, slots: Slots) -> None:
        if not self._running:
            connection.close()
            return
        stream = PeerStream(peer, connection, self._sizes, *slots)
        stream.out = self._early.pop(peer, deque())
        self._streams[peer] = stream  # from here on others may put something behind that
        self._write(stream)

    def _send(self, peer: int, parts: list[Room]) -> None:
        stream = self._streams.get(peer)
        out = self._early.get(peer) if stream is None else stream.out
        if out is not None:
            out.extend(parts)
        self._obeyed += 1
        if stream is not None:
            self._write(stream)

    def _move(self, stream: PeerStream, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(stream)
        if not events & selectors.EVENT_READ or stream.peer not in self._streams:
            return
        if stream.near or not self._read(stream):
            self._bring(stream)
        elif stream.error is not None:
            self._fail(stream)

    def _read(self, stream: PeerStream) -> bool:
        """Whether this thread may."""
        with stream.alone:
            if not stream.held:
                self._tell([Said(stream.peer, message) for message in stream.read()])
            return not stream.held

    def _bring(self, stream: PeerStream) -> None:
        """The node's thread reads it from now on."""
        stream.watched = False
        self._near.bring(stream)
        self._tell([], news=True)  # to be woken takes long, so that goes first
        self._look_at(stream)

    def _watch(self, stream: PeerStream) -> None:
        stream.watched = True
        self._look_at(stream)

    def _write(self, stream: PeerStream) -> None:
        try:
            room = stream.write()
        except OSError as error:
            stream.error = error
            self._fail(stream)
            return
        self._tell([], news=room)
        self._look_at(stream)

    def _look_at(self, stream: PeerStream) -> None:
        """For what this thread waits of it."""
        wanted = (selectors.EVENT_READ if stream.watched else 0) | (
            selectors.EVENT_WRITE if stream.out else 0
        )
        known = self._selector.get_map().get(stream.connection)
        if known is None and wanted:
            self._selector.register(stream.connection, wanted, stream)
        elif known is not None and not wanted:
            self._selector.unregister(stream.connection)
        elif known is not None and known.events != wanted:
            self._selector.modify(stream.connection, wanted, stream)

    def _fail(self, stream: PeerStream) -> None:
        error = stream.error
        if error is not None:
            self._end(stream.peer, error.message if isinstance(error, ProtocolError) else _gone(error))

    def _end(self, peer: int, why: str) -> None:
        """Who called and was not let in was never anybody's peer; to hear of its end harms nobody."""
        self._early.pop(peer, None)
        if (stream := self._streams.pop(peer, None)) is not None:
            if stream.connection in self._selector.get_map():
                self._selector.unregister(stream.connection)
            stream.close()
        self._tell([Closed(peer, why)])

    def _tell(self, events: list[Event], news: bool = False) -> None:
        self._events.extend(events)
        if (events or news) and not self._woken.is_set():
            self._woken.set()
            self._wake()

    def _stop(self) -> None:
        self._running = False

    def _shut(self) -> None:
        """The bell first: what a helper brings from now on it keeps, and what it has brought is closed here."""
        self._running = False
        for end in (self._ringer, self._bell, self._listener):
            end.close()
        while not self._commands.empty():
            self._commands.get()()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._selector.close()
