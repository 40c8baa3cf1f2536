"""Connections inside a host: abstract Unix sockets, which leave no file and reach no further than the host's network
namespace. Memory can be handed over on them. It knows nothing of what travels.
"""

import secrets
import socket

from afserve.comm.transports.entrance import BACKLOG


def listen_here(purpose: str) -> socket.socket:
    """Under a name that nobody can guess."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0afserve-{purpose}-{secrets.token_hex(12)}")
    listener.listen(BACKLOG)
    return listener


def name_of(listener: socket.socket) -> str:
    """What `dial_here` takes."""
    return str(listener.getsockname()[1:].decode())


def dial_here(name: str, timeout: float) -> socket.socket:
    """`timeout` is seconds for each step. Raises OSError where nobody answers."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection
