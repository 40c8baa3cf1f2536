"""How two attention nodes reach each other for KV blocks: where one listens, how the other connects, and TLS.

Inside a host it is a Unix socket without a file (`unix:NAME`). Between hosts it is `tcp:HOST:PORT`, or with
certificates `tcp+tls:HOST:PORT`, where both ends must have one for attention nodes. It knows no greeting and nothing of
what travels.
"""

import secrets
import socket

from afserve.comm.transports.encrypted import Connection
from afserve.comm.transports.entrance import TLS, dial, secured
from afserve.errors import RendezvousError
from afserve.tls import Certificates, CertifiedRole


def listen_here() -> socket.socket:
    """Inside this host: an abstract Unix socket, which leaves no file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0afserve-kv-{secrets.token_hex(12)}")
    listener.listen(64)
    return listener


def listen_on(host: str) -> socket.socket:
    """Raises RendezvousError where this host has no such address."""
    try:
        return socket.create_server((host, 0), backlog=64)
    except OSError as error:
        raise RendezvousError(f"KV blocks: cannot listen on {host}: {error.strerror}") from error


def address_of(listener: socket.socket, certificates: Certificates | None = None) -> str:
    """What `connect` takes."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()[1:].decode()}"
    host, port = listener.getsockname()[:2]
    return f"{'tcp' if certificates is None else TLS}:{host}:{port}"


def connect(address: str, timeout: float, certificates: Certificates | None = None) -> Connection:
    """`timeout` seconds for each step. Raises RendezvousError that names the address: nobody answers there, one end
    refuses the other's certificate, or it is no address."""
    kind, _, name = address.partition(":")
    if kind != "unix" or not name:
        return dial(address, "KV blocks", timeout, certificates, CertifiedRole.ATTENTION)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(f"\0{name}")
    except OSError as error:
        connection.close()
        raise RendezvousError(f"nobody answers at {address} ({error})") from error
    return connection


def received(connection: socket.socket, certificates: Certificates | None) -> Connection:
    """A connection that `listen_on` or `listen_here` brought, while it has a timeout: between hosts with certificates
    it is encrypted from here on. Raises RendezvousError or OSError for a stranger."""
    if certificates is None or connection.family == socket.AF_UNIX:
        return connection
    return secured(connection, certificates, CertifiedRole.ATTENTION)
