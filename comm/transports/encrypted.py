"""A TCP connection under TLS that asks the kernel once for many records.

Python's SSLSocket asks it three times for every 16 KiB. Here records are made and read in memory, and cross the socket
in large pieces. It behaves as a socket does, as far as `MessageStream` and the greeting need one.
"""

import socket
import ssl

_PIECE = 256 << 10  # plain bytes that are encrypted at once, and what is asked of the kernel at once
_RECORDS = _PIECE + 16 * 64  # the same with what encryption adds


class Encrypted:
    """Owns `connection`. Call `shake_hands` before anything else, while it blocks or has a timeout."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, server_hostname: str | None
    ) -> None:
        """`server_hostname` None: this end was dialled."""
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = server_hostname is None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server, server_hostname)
        self._arrived = memoryview(bytearray(_RECORDS))
        self._pending = memoryview(b"")  # records that the kernel has not taken
        self._covers = 0  # how many plain bytes they stand for

    def shake_hands(self) -> None:
        """Raises ssl.SSLError where either end refuses the other, OSError where it does not answer."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
                if not self._fill():
                    raise ConnectionResetError("it hung up") from None
                continue
            except ssl.SSLError:
                self._connection.sendall(self._outgoing.read())  # why
                raise
            self._connection.sendall(self._outgoing.read())
            return

    @property
    def pending(self) -> bool:
        """Whether bytes have come that `recv_into` can give, though the socket itself may have nothing more."""
        return bool(self._incoming.pending or self._tls.pending())

    def names(self) -> tuple[str, ...]:
        """The DNS names in the certificate of the other end."""
        return dns_names(self._tls)

    def send(self, data: memoryview) -> int:
        """Raises BlockingIOError while the kernel takes no more; call it again with the same bytes."""
        if not self._pending:
            data = data[:_PIECE]
            self._covers = 0
            while self._covers < len(data):
                self._covers += self._tls.write(data[self._covers :])
            self._pending = memoryview(self._outgoing.read())
        while self._pending:
            self._pending = self._pending[self._connection.send(self._pending) :]
        return self._covers

    def recv_into(self, into: memoryview) -> int:
        """As much of `into` as has come. Raises BlockingIOError where nothing is there; 0 is the end."""
        if not self.pending and not self._fill():
            return 0
        done = 0
        while done < len(into):
            try:
                count: int = self._tls.read(len(into) - done, into[done:])  # type: ignore[assignment]
                done += count
            except ssl.SSLWantReadError:  # of the next record a part is there, or nothing
                if done or not self._fill():
                    return done
            except ssl.SSLZeroReturnError:
                return done
        return done

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self.send(left) :]

    def recv(self, most: int) -> bytes:
        into = memoryview(bytearray(most))
        return bytes(into[: self.recv_into(into)])

    def fileno(self) -> int:
        return self._connection.fileno()

    def settimeout(self, seconds: float) -> None:
        self._connection.settimeout(seconds)

    def setblocking(self, blocking: bool) -> None:
        self._connection.setblocking(blocking)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._connection.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self._connection.shutdown(how)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Encrypted":
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def _fill(self) -> bool:
        """Whether bytes have come; False at the end of the connection."""
        count = self._connection.recv_into(self._arrived)
        self._incoming.write(self._arrived[:count])
        return count > 0


Connection = socket.socket | Encrypted


def dns_names(tls: ssl.SSLObject) -> tuple[str, ...]:
    found: dict[str, object] = dict(tls.getpeercert() or {})
    names = found.get("subjectAltName", ())
    assert isinstance(names, tuple)
    return tuple(str(value) for kind, value in names if kind == "DNS")
