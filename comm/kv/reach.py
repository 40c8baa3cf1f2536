"""How two attention nodes reach each other for KV blocks: where one listens, how the other connects, and TLS.

Inside a host it is a Unix socket without a file (`unix:NAME`). Between hosts it is `tcp:HOST:PORT`, or with
certificates `tcp+tls:HOST:PORT`, where both ends must have one for attention nodes. It knows no greeting and nothing of
what travels.
"""

import secrets
import socket

from afserve.comm.transports import entrance
from afserve.comm.transports.encrypted import Connection
from afserve.errors import RendezvousError
from afserve.tls import Certificates, CertifiedRole, is_loopback


def listen_at(host: str) -> socket.socket:
    """Inside this host where `host` is its loopback, else at that address of it."""
    return listen_here() if is_loopback(host) else entrance.listen_on(host)


def listen_here() -> socket.socket:
    """Inside this host: an abstract Unix socket, which leaves no file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0afserve-kv-{secrets.token_hex(12)}")
    listener.listen(entrance.BACKLOG)
    return listener


def address_of(listener: socket.socket, certificates: Certificates | None = None) -> str:
    """What `connect` takes."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()[1:].decode()}"
    return entrance.address_of(listener, certificates)


def connect(address: str, timeout: float, certificates: Certificates | None = None) -> Connection:
    """`timeout` seconds for each step. Raises RendezvousError that names the address: nobody answers there, one end
    refuses the other's certificate, or it is no address."""
    kind, _, name = address.partition(":")
    if kind != "unix" or not name:
        return entrance.dial(address, "KV blocks", timeout, certificates, CertifiedRole.ATTENTION)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(f"\0{name}")
    except OSError as error:
        connection.close()
        raise RendezvousError(f"nobody answers at {address} ({error})") from error
    return connection
