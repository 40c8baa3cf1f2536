"""Connections of KV blocks over sockets: a thread reads and writes them, so that the node that computes never does.

`reach` says where a node listens and connects, encrypted between hosts where there are certificates. A helper thread
greets; then the one thread of all connections takes over. Memory is bounded by what peers may send before they are
answered (`lender.WINDOW_BYTES`) and by the size of a message, which is checked first.
"""

import errno
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
from afserve.comm.kv.messages import HEAD_BYTES, Head, Message, Payload, decode, decode_head, encode
from afserve.comm.kv.reach import address_of, connect, received
from afserve.comm.kv.wires import Closed, Event, Said
from afserve.comm.transports.encrypted import Connection, Encrypted
from afserve.errors import AfserveError, ProtocolError
from afserve.tls import Certificates, why_refused

log = logging.getLogger("afserve.kv")
DIAL_SECONDS = 0.5
_BUFFER_BYTES = 4 << 20
_READS = 16  # of one connection before others have a turn


def _gone(error: OSError) -> str:
    return f"its connection has ended ({error.strerror})"


class _Stream:
    """One connection that was greeted, without blocking; of the wires' thread."""

    def __init__(self, peer: int, connection: Connection, block_bytes: int) -> None:
        connection.setblocking(False)
        if isinstance(connection, Encrypted) or connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
        self.peer, self.connection = peer, connection
        self._block_bytes = block_bytes
        self.out: deque[memoryview] = deque()
        self._into = memoryview(bytearray(HEAD_BYTES))
        self._done = 0
        self._head: Head | None = None

    def write(self) -> None:
        """Hand the kernel what it takes. Raises OSError."""
        while self.out:
            try:
                sent = self._give()
            except BlockingIOError:
                return
            while sent:
                if sent < len(self.out[0]):
                    self.out[0] = self.out[0][sent:]
                    break
                sent -= len(self.out.popleft())

    def _give(self) -> int:
        if isinstance(self.connection, Encrypted):
            return self.connection.send(self.out[0])
        return self.connection.sendmsg(list(itertools.islice(self.out, 8)))

    def read(self) -> list[Message]:
        """The messages that are complete now. Raises OSError and ProtocolError."""
        found, reads = [], 0
        while reads < _READS or (isinstance(self.connection, Encrypted) and self.connection.pending):
            reads += 1
            try:
                count = self.connection.recv_into(self._into[self._done :])
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "closed")
            self._done += count
            while self._done == len(self._into):
                if (message := self._complete()) is not None:
                    found.append(message)
        return found

    def _complete(self) -> Message | None:
        """A part was read whole: the head of a message, or what follows it."""
        if self._head is None:
            self._head = decode_head(self._into, self._block_bytes)
            if self._head.following:
                self._into, self._done = memoryview(bytearray(self._head.following)), 0
                return None
            body: Payload = b""
        else:
            body = self._into
        message, self._head = decode(self._head, body), None
        self._into, self._done = memoryview(bytearray(HEAD_BYTES)), 0
        return message


class SocketWires:
    """`terms` is what both ends must agree on. Another thread calls `wake` when `receive` has something new; who dials
    and sends need not be who receives."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        terms: Mapping[str, str],
        block_bytes: int,
        wake: Callable[[], None],
        certificates: Certificates | None = None,
    ) -> None:
        self.address = address_of(listener, certificates)
        self._certificates = certificates
        self._listener, self._token, self._terms, self._wake = listener, token, dict(terms), wake
        self._block_bytes = block_bytes
        self._numbers = itertools.count(1)
        self._events: deque[Event] = deque()
        self._woken = threading.Event()  # somebody was woken and has not looked yet
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, _Stream] = {}
        self._early: dict[int, deque[memoryview]] = {}  # for connections that do not stand yet
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
        head, body = encode(message)
        self._command(lambda: self._send(peer, memoryview(head), memoryview(body)))

    def receive(self) -> list[Event]:
        if not self._events:
            return []
        self._woken.clear()
        return [self._events.popleft() for _ in range(len(self._events))]

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
        try:
            self._ringer.send(b"!")
        except OSError:
            return False
        return True

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
        except (OSError, AfserveError, ValueError) as error:
            connection.close()
            self._refuse(peer, error.message if isinstance(error, AfserveError) else f"{whom}: {error}")
            return
        if not self._command(lambda: self._welcome(peer, connection)):
            connection.close()

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
                    elif isinstance(key.data, _Stream) and key.data.peer in self._streams:
                        self._move(key.data, events)
        finally:
            self._shut()

    def _obey(self) -> None:
        for _ in self._bell.recv(4096):
            self._commands.get()()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("a connection for KV blocks could not be taken: %s", error)
            return
        args = (next(self._numbers), connection)
        threading.Thread(target=self._greet_caller, args=args, name="kv-greet", daemon=True).start()

    def _welcome(self, peer: int, connection: Connection) -> None:
        if not self._running:
            connection.close()
            return
        stream = self._streams[peer] = _Stream(peer, connection, self._block_bytes)
        stream.out = self._early.pop(peer, deque())
        self._selector.register(connection, selectors.EVENT_READ, stream)
        self._write(stream)

    def _send(self, peer: int, head: memoryview, body: memoryview) -> None:
        stream = self._streams.get(peer)
        out = self._early.get(peer) if stream is None else stream.out
        if out is not None:
            out.append(head)
            if len(body):
                out.append(body)
        if stream is not None:
            self._write(stream)

    def _move(self, stream: _Stream, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(stream)
        if events & selectors.EVENT_READ and stream.peer in self._streams:
            try:
                messages = stream.read()
            except ProtocolError as error:
                self._end(stream.peer, error.message)
                return
            except OSError as error:
                self._end(stream.peer, _gone(error))
                return
            self._tell([Said(stream.peer, message) for message in messages])

    def _write(self, stream: _Stream) -> None:
        try:
            stream.write()
        except OSError as error:
            self._end(stream.peer, _gone(error))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.out else 0)
        self._selector.modify(stream.connection, wanted, stream)

    def _end(self, peer: int, why: str) -> None:
        """Who called and was not let in was never anybody's peer; to hear of its end harms nobody."""
        self._early.pop(peer, None)
        if (stream := self._streams.pop(peer, None)) is not None:
            self._selector.unregister(stream.connection)
            stream.connection.close()
        self._tell([Closed(peer, why)])

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._events.extend(events)
            if not self._woken.is_set():
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
            stream.connection.close()
        self._streams.clear()
        self._selector.close()
