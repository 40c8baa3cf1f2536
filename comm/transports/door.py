"""Where a node of a host that sleeps in its connections is woken: a datagram socket without a file, known by a number.

The number stands in the memory that both ends map. Native code knocks there (`kernels/native/door.h`), and only while
the node says that it sleeps so. A knock says nothing, so a stranger's costs a look and no more.
"""

import secrets
import socket


class Door:
    """Owns `socket`."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.number = secrets.randbits(32)  # of one that is taken, OSError
        self.socket.bind(f"\0afserve-door-{self.number:08x}")

    def close(self) -> None:
        self.socket.close()
