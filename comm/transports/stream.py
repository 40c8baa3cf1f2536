"""One connection as a stream of messages, received straight into their mailboxes and sent whole; it never blocks.

It reads a message's header just far enough to find the message's end. The caller says which mailbox it belongs to.
"""

import socket
from collections import deque
from collections.abc import Callable

from afserve.comm.mailbox.wire import HEADER_BYTES
from afserve.comm.transports.encrypted import Connection, Encrypted

Place = Callable[[memoryview], memoryview]  # header -> the memory for the whole message, of its exact length
# Seconds, seconds, milliseconds. A peer whose host says nothing is left within 2 s; four packets in a row may be lost
# before, since the kernel sends again after 0.2, 0.6 and 1.4 s. A stopped process is not meant: its kernel answers.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_USER_TIMEOUT": 1500}
_BUFFER_BYTES = 4 << 20  # asked of the kernel; its own growth starts at 16 KiB: 285 us became 128 at 128 KiB


class MessageStream:
    """Owns `connection`, which may be encrypted. `lost` says why it ended, once it has."""

    def __init__(self, connection: Connection) -> None:
        connection.setblocking(False)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
        if isinstance(connection, Encrypted) or connection.family != socket.AF_UNIX:
            _notice_silence(connection)
        self._connection = connection
        self._number = connection.fileno()
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._into = self._head
        self._done = 0
        self._out: deque[memoryview] = deque()
        self.lost: str | None = None

    def fileno(self) -> int:
        """Also of a stream that has ended: whoever polls it has to forget this number."""
        return self._number

    @property
    def sending(self) -> bool:
        """Whether bytes are waiting until the kernel takes more."""
        return bool(self._out)

    @property
    def arriving(self) -> bool:
        """Whether a part of a message is here whose rest is on its way."""
        return self._done > 0 or self._into is not self._head

    def send(self, message: memoryview) -> None:
        """`message` must stay as it is until it is answered."""
        self._out.append(message)
        self.flush()

    def flush(self) -> None:
        """Hand the kernel what it takes."""
        try:
            while self._out and self.lost is None:
                sent = self._connection.send(self._out[0])
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
        except BlockingIOError:
            return
        except OSError as error:
            self.end(f"its connection has ended ({error.strerror})")

    def receive(self, place: Place) -> list[memoryview]:
        """The messages that are complete now, each where `place` said. Whatever `place` raises is passed on.

        What TLS has read ahead is all that was there: the kernel is not asked again whether more is. Whoever polls is
        told.
        """
        complete = []
        while self._advance():
            if self._into is self._head:
                self._into = place(self._head)
                self._into[:HEADER_BYTES] = self._head
            if self._done == len(self._into):
                complete.append(self._into)
                self._into, self._done = self._head, 0
                if isinstance(self._connection, Encrypted) and not self._connection.pending:
                    break
        return complete

    def end(self, why: str) -> None:
        """Close; the first reason stays."""
        if self.lost is None:
            self.lost = why
        self._out.clear()
        self._connection.close()

    def _advance(self) -> bool:
        """Read on; False when nothing more is there, True when the part that is being read is complete."""
        while self._done < len(self._into):
            if self.lost is not None:
                return False
            try:
                count = self._connection.recv_into(self._into[self._done :])
            except BlockingIOError:
                return False
            except OSError as error:
                self.end(f"its connection has ended ({error.strerror})")
                return False
            if count == 0:
                self.end("its connection has ended")
                return False
            self._done += count
        return True


def _notice_silence(connection: Connection) -> None:
    """Inside a host the kernel says at once who is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
