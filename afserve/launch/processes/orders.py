"""What is said between who wants nodes, the keeper of their processes and the fork server: one JSON object per message.

Sockets are SOCK_SEQPACKET: a message comes whole or not at all, whoever dies meanwhile, and a descriptor with its own.
"""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MESSAGE_BYTES = 1 << 18
_IN_LINE_BYTES = 1 << 15  # what is longer, such as a gateway's thousand keys, is memory that is passed along
_PASSED = b"@"


@dataclass(frozen=True, slots=True)
class Order:
    """Become a node. `log` takes its stdout and stderr. `token` is the run's. `binding` is a `Binding`'s fields."""

    name: str
    role: str
    index: int
    join: str
    token: str
    log: str
    # of a gateway: its options; a listening socket comes with the order
    gateway: dict[str, Any] | None = None
    certs: str = ""
    binding: dict[str, Any] | None = None

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to this process of a node, if it is still there."""

    name: str
    pid: int
    signal: int

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def order_of(line: bytes) -> Order | Signal:
    fields = json.loads(line)
    return Signal(**fields) if "signal" in fields else Order(**fields)


def report(what: Mapping[str, object]) -> bytes:
    return json.dumps(what).encode()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends; both wait for nothing unless they are told to."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def receive(sock: socket.socket) -> tuple[bytes, int | None] | None:
    """A message and the descriptor that came with it; nothing at the end, None where there is no message now."""
    try:
        line, descriptors, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 2)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b"", None
    if line == _PASSED:
        with open(descriptors.pop(0), "rb") as memory:
            memory.seek(0)
            line = memory.read()
    return line, descriptors[0] if descriptors else None


def send(sock: socket.socket, line: bytes, passed: int | None = None) -> bool:
    """Whether it was taken. Raises OSError where the other end is gone."""
    also = [] if passed is None else [passed]
    try:
        if len(line) <= _IN_LINE_BYTES:
            socket.send_fds(sock, [line], also)
        else:
            with open(os.memfd_create("afserve-order"), "wb") as memory:
                memory.write(line)
                memory.flush()
                socket.send_fds(sock, [_PASSED], [memory.fileno(), *also])
    except (BlockingIOError, InterruptedError):
        return False
    return True


def close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
