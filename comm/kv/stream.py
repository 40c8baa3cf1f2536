"""One greeted connection, without blocking: messages in and out, and where the bytes of pieces lie meanwhile.

Whoever reads or writes is `alone` meanwhile (`duty`). Short messages are read many at a time. The bytes of a piece go
straight to a buffer, or lie in memory that both ends have and are not read at all.
"""

import errno
import itertools
import socket
import threading
from collections import deque
from collections.abc import Sequence

from afserve.comm.kv.aside import this_core
from afserve.comm.kv.forms import HEAD_BYTES, Head, decode, decode_head, encode
from afserve.comm.kv.messages import Ack, Fetched, Message, Payload, Piece, Placed
from afserve.comm.kv.rooms import NOWHERE, Buffers, OwnSlots, PeerSlots, Room, Rooms
from afserve.comm.transports.encrypted import Connection, Encrypted
from afserve.errors import ProtocolError

_BUFFER_BYTES = 4 << 20
_READS = 16  # of one connection before others have a turn
_STAGE_BYTES, _LONG_BYTES = 32 << 10, 16 << 10  # what is longer is read where it stays
_SENT_AT_ONCE = 16


def parts_of(message: Message) -> list[Room]:
    """What goes over the connection: the head, and what follows it. Of a piece in memory that both ends have, where."""
    if isinstance(message, Piece) and message.slot != NOWHERE:
        first, count, checksum = message.first, message.count, message.checksum
        message = Placed(message.transfer, first, count, checksum, message.slot, b"")
    head, body = encode(message)
    return [Room(memoryview(part)) for part in (head, body) if len(part)]


class PeerStream:
    """`own` and `theirs` are memory that the two ends have given each other, if any."""

    def __init__(
        self,
        peer: int,
        connection: Connection,
        sizes: tuple[int, int],
        own: OwnSlots | None = None,
        theirs: PeerSlots | None = None,
    ) -> None:
        """`sizes` of a block and of the largest piece."""
        connection.setblocking(False)
        if isinstance(connection, Encrypted) or connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
        self.peer, self.connection = peer, connection
        self._block_bytes, piece_bytes = sizes
        self._own, self._theirs = own, theirs
        self.near = own is not None and theirs is not None
        self.moved = 0  # bytes, both ways
        self.alone = threading.RLock()
        self.closed = False
        self._placed: set[int] = set()  # where pieces lie that are not answered
        self._rooms: Rooms = own or Buffers(piece_bytes)
        self._arriving = Buffers(piece_bytes)
        self.out: deque[Room] = deque()
        self.error: OSError | ProtocolError | None = None
        self._stage, self._staged = memoryview(bytearray(_STAGE_BYTES)), 0
        self._head: Head | None = None  # of a body that is longer than what is staged
        self._body, self._done = memoryview(b""), 0

    # ---- by the node's thread

    @property
    def has_room(self) -> bool:
        return self._rooms.free

    def room(self, size: int) -> Room:
        return self._rooms.take(size)

    def answered(self, ack: Ack) -> None:
        """It says what `used` would."""
        self._placed.discard(ack.slot)

    def used(self, piece: Piece) -> Fetched | None:
        """What the other end is told, if anything."""
        if piece.slot in self._placed:
            self._placed.discard(piece.slot)
            return Fetched(piece.transfer, piece.slot)
        if piece.slot != NOWHERE:
            return None
        self._arriving.give_back(Room(memoryview(piece.payload)))
        return None

    # ---- by whoever is `alone`

    @property
    def core(self) -> int:
        """Where the other end ran when it last wrote; -1 where that cannot be known."""
        return -1 if self._theirs is None else self._theirs.core

    def tell_core(self) -> None:
        if self._own is not None:
            self._own.tell_core(this_core())

    def write(self, parts: Sequence[Room] = (), *, at_once: bool = True) -> bool:
        """Hand the kernel what it takes of what waits and of this behind it, if that is to be done `at_once`. Whether
        there is more room than before. Raises OSError."""
        room = False
        at_once &= not (parts and self.out)
        self.out.extend(parts)
        if not at_once:
            return False
        self.tell_core()
        while self.out:
            try:
                sent = self._give()
            except BlockingIOError:
                break
            self.moved += sent
            while sent:
                view = self.out[0].view
                if sent < len(view):
                    self.out[0] = Room(view[sent:])
                    break
                sent -= len(view)
                room |= self._rooms.give_back(self.out.popleft())
        return room

    def _give(self) -> int:
        if isinstance(self.connection, Encrypted):
            return self.connection.send(self.out[0].view)
        return self.connection.sendmsg([room.view for room in itertools.islice(self.out, _SENT_AT_ONCE)])

    def read(self) -> list[Message]:
        """The messages that are complete now; behind them there may be an `error`, and then nothing more comes."""
        found: list[Message] = []
        try:
            if not self.closed:
                self._read(found)
        except (OSError, ProtocolError) as error:
            self.error = error
        return found

    def _read(self, found: list[Message]) -> None:
        reads = 0
        while reads < _READS or (isinstance(self.connection, Encrypted) and self.connection.pending):
            reads += 1
            into = self._body[self._done :] if self._head is not None else self._stage[self._staged :]
            try:
                count = self.connection.recv_into(into)
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "closed")
            self.moved += count
            if self._head is None:
                self._staged += count
                self._unstage(found)
            elif (message := self._filled(count)) is not None:
                found.append(message)
                if not isinstance(self.connection, Encrypted):
                    break  # whoever waits for it begins
            if count < len(into) and not isinstance(self.connection, Encrypted):
                break  # the kernel had no more

    def _filled(self, count: int) -> Message | None:
        """Bytes of a long body have come."""
        self._done += count
        if self._head is None or self._done < len(self._body):
            return None
        message, self._head = self._decoded(self._head, self._body), None
        self._body = memoryview(b"")
        return message

    def _unstage(self, found: list[Message]) -> None:
        """All messages that are staged whole. What is there of a long one goes to a body of its own."""
        at, end = 0, self._staged
        while end - at >= HEAD_BYTES:
            head = decode_head(self._stage[at : at + HEAD_BYTES], self._block_bytes)
            body = at + HEAD_BYTES
            if head.following > min(end - body, _LONG_BYTES):
                if head.following <= _LONG_BYTES:
                    break
                at = body + self._begin(head, self._stage[body:end])
                if self._head is not None:
                    break
                found.append(self._decoded(head, self._body))
                continue
            at = body + head.following
            found.append(self._decoded(head, memoryview(bytearray(self._stage[body:at]))))
        self._stage[: end - at] = bytes(self._stage[at:end])
        self._staged = end - at

    def _begin(self, head: Head, staged: memoryview) -> int:
        """Of a long body, as much as is staged; how many bytes that is."""
        piece = head.kind is Piece
        self._body = (
            self._arriving.take(head.following).view
            if piece and self._arriving.free
            else memoryview(bytearray(head.following))
        )
        count = min(len(staged), head.following)
        self._body[:count] = staged[:count]
        self._head, self._done = (head if count < head.following else None), count
        return count

    def _decoded(self, head: Head, body: Payload) -> Message:
        message = decode(head, body)
        if isinstance(message, Placed) and self._theirs is not None:
            size = message.count * self._block_bytes
            view = self._theirs.piece(message.at, size)
            first, count, checksum = message.first, message.count, message.checksum
            self._placed.add(message.at)
            return Piece(message.transfer, first, count, checksum, view, message.at)
        return message

    def fetched(self, message: Message) -> bool:
        """Where it says that a slot is free again, it is. Whether it says nothing else: nobody else hears of that."""
        if self._own is None:
            return False
        if isinstance(message, Ack):
            self._own.give_back(Room(memoryview(b""), message.slot))
        elif isinstance(message, Fetched):
            self._own.give_back(Room(memoryview(b""), message.at))
            return True
        return False

    def close(self) -> None:
        with self.alone:  # nobody may read what has this number next
            self.closed = True
            self.connection.close()
        self._rooms.close()
        self._arriving.close()
