"""How two attention nodes reach each other for KV blocks: where one listens, how the other connects, and TLS.

Inside a host it is a Unix socket without a file (`unix:NAME`). Between hosts it is `tcp:HOST:PORT`, or with
certificates `tcp+tls:HOST:PORT`, where both ends must have one for attention nodes. It knows no greeting and nothing of
what travels.
"""

import socket

from afserve.comm.transports import entrance, unix
from afserve.comm.transports.encrypted import Connection
from afserve.errors import RendezvousError
from afserve.tls import Certificates, CertifiedRole, is_loopback


def listen_at(host: str) -> socket.socket:
    """Inside this host where `host` is its loopback, else at that address of it."""
    return listen_here() if is_loopback(host) else entrance.listen_on(host)


def listen_here() -> socket.socket:
    """Inside this host: an abstract Unix socket, which leaves no file."""
    return unix.listen_here("kv")


def address_of(listener: socket.socket, certificates: Certificates | None = None) -> str:
    """What `connect` takes."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{unix.name_of(listener)}"
    return entrance.address_of(listener, certificates)


def connect(address: str, timeout: float, certificates: Certificates | None = None) -> Connection:
    """`timeout` seconds for each step. Raises RendezvousError that names the address: nobody answers there, one end
    refuses the other's certificate, or it is no address."""
    kind, _, name = address.partition(":")
    if kind != "unix" or not name:
        return entrance.dial(address, "KV blocks", timeout, certificates, CertifiedRole.ATTENTION)
    try:
        return unix.dial_here(name, timeout)
    except OSError as error:
        raise RendezvousError(f"nobody answers at {address} ({error})") from error
