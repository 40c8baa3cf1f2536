"""How two nodes get a TCP connection: an entrance, which takes all comers, and a dial, over TLS with certificates.

Who has not proved itself is in a small place of its own: one thread each, a deadline for all of it, and the oldest is
dropped when the place is full. So strangers, however many and however slow, keep nobody out. An address is
`tcp:HOST:PORT`, or `tcp+tls:HOST:PORT`. It knows neither what proves a newcomer nor what travels.
"""

import logging
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from afserve.comm.transports.encrypted import Connection, Encrypted
from afserve.comm.transports.greeting import TurnedAway
from afserve.comm.transports.refusals import Refusals
from afserve.errors import AfserveError, RendezvousError
from afserve.tls import Certificates, CertifiedRole, lacks, why_refused

log = logging.getLogger("afserve.comm")
_GREETING_SECONDS = 5.0  # from the first byte to the proof, TLS included
_AT_ONCE = 128  # newcomers that have not proved themselves
_LOOKS = 1.0  # seconds between two looks at the clock, where nobody comes
BACKLOG = 512  # that the kernel keeps until they are taken
_NO_ROOM = 0.05  # seconds without accepting where this process has no room for another connection
TLS = "tcp+tls"


@dataclass(eq=False, slots=True)
class Newcomer:
    """A connection that nothing is known of. It has to prove itself before `until`, of time.monotonic."""

    plain: socket.socket
    name: str
    until: float
    prove: Callable[["Newcomer"], None] = field(repr=False)
    connection: Connection = field(init=False)
    dropped: bool = False

    def proven(self) -> None:
        """It is dropped for nobody from now on. Raises ConnectionAbortedError where it was before."""
        self.prove(self)


# By a newcomer's own thread: lets it in, who then owns the connection, or raises why not. It says when it is `proven`.
Greet = Callable[[Newcomer], None]


class Entrance:
    """Owns `listener`, and lets in from `start` to `close`. Newcomers have to have a certificate for attention nodes,
    where there are certificates and they are not of this host."""

    def __init__(self, listener: socket.socket, certificates: Certificates | None) -> None:
        self._listener, self._certificates = listener, certificates
        self._lock = threading.Lock()
        self._unproven: dict[Newcomer, None] = {}  # the oldest first
        self._greeters: dict[threading.Thread, Newcomer] = {}
        self._closed = threading.Event()
        self._refusals = Refusals(log, _named(listener))
        self._accepting = threading.Thread(target=self._accept_all, name="entrance", daemon=True)
        self._greet: Greet

    def start(self, greet: Greet) -> None:
        self._greet = greet
        self._listener.setblocking(False)
        self._accepting.start()

    def close(self) -> None:
        """Nobody is being greeted afterwards."""
        self._closed.set()
        _end(self._listener)
        if self._accepting.ident is not None:
            self._accepting.join()
        with self._lock:
            greeters = list(self._greeters)
            for newcomer in self._greeters.values():
                _end(newcomer.plain)
        for thread in greeters:
            thread.join()
        self._listener.close()

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._closed.is_set():
            poll.poll(1e3 * self._seconds_left())
            self._drop_late()
            self._refusals.say_unsaid()
            try:
                plain, address = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                self._make_room(error)
                continue
            self._receive(plain, str(address[0]) if isinstance(address, tuple) else "a process of this host")

    def _seconds_left(self) -> float:
        with self._lock:
            oldest = next(iter(self._unproven), None)
        return _LOOKS if oldest is None else min(_LOOKS, max(0.0, oldest.until - time.monotonic()))

    def _drop_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [newcomer for newcomer in self._unproven if newcomer.until <= now]
        for newcomer in late:
            self._drop(newcomer, f"it did not prove itself within {_GREETING_SECONDS:g} s")

    def _make_room(self, error: OSError) -> None:
        """A connection could not be taken: it has hung up again, or this process may open no more files."""
        if self._closed.is_set() or isinstance(error, ConnectionError):
            return
        self._refusals.log_refusal("a newcomer", f"it could not be taken ({error.strerror})")
        self._drop_one("to make room")
        self._closed.wait(_NO_ROOM)

    def _receive(self, plain: socket.socket, name: str) -> None:
        newcomer = Newcomer(plain, name, time.monotonic() + _GREETING_SECONDS, self._prove)
        if len(self._unproven) >= _AT_ONCE:
            self._drop_one("to make room for others")
        greeter = threading.Thread(target=self._greet_one, args=(newcomer,), name="greeter", daemon=True)
        with self._lock:
            self._unproven[newcomer] = None
            self._greeters[greeter] = newcomer
            try:
                greeter.start()
            except RuntimeError:  # this process may have no more threads
                del self._unproven[newcomer]
                del self._greeters[greeter]
                plain.close()

    def _drop_one(self, why: str) -> None:
        """The oldest of the address that has most: a host that comes again and again only takes its own places."""
        with self._lock:
            of = Counter(newcomer.name for newcomer in self._unproven)
            most = max(of.values(), default=0)
            oldest = next((one for one in self._unproven if of[one.name] == most), None)
        if oldest is not None:
            self._drop(oldest, f"it had proved nothing and was dropped {why}")

    def _drop(self, newcomer: Newcomer, why: str) -> None:
        """Its thread ends it."""
        with self._lock:
            if newcomer not in self._unproven:
                return
            del self._unproven[newcomer]
            newcomer.dropped = True
            _end(newcomer.plain)
        self._refusals.log_refusal(newcomer.name, why)

    def _prove(self, newcomer: Newcomer) -> None:
        with self._lock:
            if newcomer not in self._unproven:
                raise ConnectionAbortedError("it was dropped")
            del self._unproven[newcomer]

    def _greet_one(self, newcomer: Newcomer) -> None:
        """By a newcomer's own thread."""
        try:
            newcomer.connection = newcomer.plain
            newcomer.plain.settimeout(_GREETING_SECONDS)
            if self._certificates is not None and newcomer.plain.family != socket.AF_UNIX:
                newcomer.connection = secured(newcomer.plain, self._certificates, CertifiedRole.ATTENTION)
            self._greet(newcomer)
        except (OSError, ValueError, AfserveError) as error:
            newcomer.plain.close()
            self._refuse(newcomer, error)
        finally:
            with self._lock:
                self._unproven.pop(newcomer, None)
                self._greeters.pop(threading.current_thread(), None)

    def _refuse(self, newcomer: Newcomer, error: Exception) -> None:
        if not newcomer.dropped and not self._closed.is_set():
            why = why_refused(error) if isinstance(error, ssl.SSLError) else str(error)
            self._refusals.log_refusal(newcomer.name, why)


def listen_on(host: str) -> socket.socket:
    """On this address alone, at a port that is free. Raises RendezvousError where it is no address of this machine."""
    try:
        return socket.create_server((host, 0), backlog=BACKLOG)
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on {host}: {error.strerror}; give an address of this host"
        ) from error


def address_of(listener: socket.socket, certificates: Certificates | None) -> str:
    """What `dial` takes."""
    host, port = listener.getsockname()[:2]
    return f"{'tcp' if certificates is None else TLS}:{host}:{port}"


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
        if isinstance(error, ConnectionError):
            raise TurnedAway(f"{peer} at {host}:{port} hung up in TLS's handshake ({error})") from error
        why = why_refused(error) if isinstance(error, ssl.SSLError) else str(error)
        raise RendezvousError(f"{peer} at {host}:{port}: {why}") from error


def _named(listener: socket.socket) -> str:
    name = listener.getsockname()
    return f"port {name[1]}" if isinstance(name, tuple) else "a socket of this host"


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself
