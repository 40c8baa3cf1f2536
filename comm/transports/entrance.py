"""How two nodes get a TCP connection: an expert node's entrance, an attention node's dial, over TLS with certificates.

Every newcomer is greeted in a thread of its own, so one that says nothing keeps nobody else waiting; there are never
many of them. An address is `tcp:HOST:PORT`, or `tcp+tls:HOST:PORT`. It knows nothing of what travels.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Callable

from afserve.comm.transports.encrypted import Connection, Encrypted
from afserve.errors import RendezvousError
from afserve.tls import Certificates, CertifiedRole, lacks, why_refused

log = logging.getLogger("afserve.comm")
_HELLO_SECONDS = 5.0
_AT_ONCE = 64  # newcomers that are being greeted; more are turned away, and dial again
TLS = "tcp+tls"
# Lets a newcomer in, who then owns the connection, and returns True; or returns False.
Greet = Callable[[Connection], bool]


class Entrance:
    """Listens on `host` from the beginning, and lets in from `start` to `close`."""

    def __init__(self, host: str, certificates: Certificates | None) -> None:
        """Raises RendezvousError where `host` is no address of this machine."""
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise RendezvousError(
                f"cannot listen on {host}: {error.strerror}; give an address of this host"
            ) from error
        self._certificates = certificates
        kind = "tcp" if certificates is None else TLS
        self.address = f"{kind}:{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._greeted: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="entrance", daemon=True)
        self._greet: Greet = lambda connection: False

    def start(self, greet: Greet) -> None:
        """`greet` is called by one thread at a time."""
        self._greet = greet
        self._accepting.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            greeters = dict(self._greeted)
            for connection in greeters.values():
                _end(connection)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepting, *greeters):
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, (peer, *_) = self._listener.accept()
            except OSError:
                return  # closed
            greeter = threading.Thread(
                target=self._receive, args=(connection, peer), name="greeter", daemon=True
            )
            with self._lock:
                if self._closed or len(self._greeted) >= _AT_ONCE:
                    connection.close()
                    continue
                self._greeted[greeter] = connection
                greeter.start()

    def _receive(self, plain: socket.socket, peer: str) -> None:
        """By a newcomer's own thread."""
        plain.settimeout(_HELLO_SECONDS)
        welcome = False
        try:
            connection: Connection = plain
            if self._certificates is not None:
                connection = secured(plain, self._certificates, CertifiedRole.ATTENTION)
            welcome = not self._closed and self._greet(connection)
            if not welcome:
                log.warning("%s was refused: it does not greet as an attention node of this run", peer)
        except ssl.SSLError as error:
            log.warning("%s was refused: %s", peer, why_refused(error))
        except (OSError, RendezvousError) as error:
            log.warning("%s was refused: %s", peer, error)
        finally:
            with self._lock:
                del self._greeted[threading.current_thread()]
            if not welcome:
                plain.close()


def secured(plain: socket.socket, certificates: Certificates, role: CertifiedRole) -> Encrypted:
    """The end that was dialled, by whoever has a certificate for `role`. Raises RendezvousError, or OSError as TLS."""
    connection = Encrypted(plain, certificates.server(), None)
    connection.shake_hands()
    if why := lacks(connection.names(), role):
        raise RendezvousError(why)
    return connection


def dial(
    address: str,
    peer: str,
    timeout: float,
    certificates: Certificates | None,
    role: CertifiedRole = CertifiedRole.EXPERT,
) -> Connection:
    """Raises RendezvousError naming `peer` where nobody answers, or not with a certificate for `role`."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("tcp", TLS) or not host or not port.isdecimal():
        raise RendezvousError(f"{peer}: {address!r} is not an address of the form tcp:HOST:PORT")
    if (kind == TLS) is not (certificates is not None):
        mine, theirs = ("has", "has none") if certificates else ("has no", "asks for them")
        raise RendezvousError(
            f"{peer}: this node {mine} certificates and {host}:{port} {theirs}; give --certs on all hosts or on none"
        )
    try:
        connection = socket.create_connection((host, int(port)), timeout)
    except OSError as error:
        raise RendezvousError(
            f"{peer}: nobody answers at {host}:{port} within {timeout:g} s; is it running, and reachable from here?"
        ) from error
    if certificates is None:
        return connection
    try:
        encrypted = Encrypted(connection, certificates.client(), role.dns)
        encrypted.shake_hands()
        return encrypted
    except OSError as error:
        connection.close()
        why = why_refused(error) if isinstance(error, ssl.SSLError) else str(error)
        raise RendezvousError(f"{peer} at {host}:{port}: {why}") from error


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself
