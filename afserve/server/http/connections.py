"""Who is connected, and who has to go when there are too many: the one that has waited longest without a request.

A connection waits while no whole request of it is being answered: TLS is not agreed on, it is idle, or its head or body
is still to come. One that is being answered never has to go. Knows no bytes.
"""

import asyncio
import ipaddress
from typing import Protocol

CONNECTION = "afserve.connection"  # in a scope's state: what the request came by
READ_BYTES = 16_384  # at once from one socket: one-byte chunks make 2,700 events of them, 15 ms


class Connection(Protocol):
    client_address: str

    def quiet(self, seconds: float) -> bool:
        """Whether nothing of a request has come, and nothing was answered, for so long."""

    def make_room(self) -> None:
        """Makes room, after what is written already."""

    def abort(self) -> None:
        """At once: nobody reads what is written."""


class Connections:
    def __init__(self, most: int, most_per_client: int) -> None:
        self._most = most
        self._most_per_client = most_per_client
        self._clients: dict[str, set[Connection]] = {}
        self._waiting: dict[str, dict[Connection, None]] = {}  # by client, longest waiting first
        self._longest: dict[Connection, None] = {}
        self._count = 0
        self.closed = 0
        self.leaving = False  # every answer is the last one of its connection
        self.buffer = bytearray(READ_BYTES)

    def __len__(self) -> int:
        return self._count

    def let_in(self, connection: Connection) -> bool:
        """False when there is no place, because all others are being answered."""
        client = connection.client_address
        if len(self._clients.get(client, ())) >= self._most_per_client:
            if not self._close_first(self._waiting.get(client, {})):
                return False
        elif self._count >= self._most and not self._close_first(self._longest):
            return False
        self._clients.setdefault(client, set()).add(connection)
        self._count += 1
        self.note_waiting(connection)
        return True

    def note_waiting(self, connection: Connection) -> None:
        self._longest[connection] = None
        self._waiting.setdefault(connection.client_address, {})[connection] = None

    def note_busy(self, connection: Connection) -> None:
        self._longest.pop(connection, None)
        waiting = self._waiting.get(connection.client_address)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[connection.client_address]

    def note_gone(self, connection: Connection) -> None:
        """It has gone. May be said again."""
        mine = self._clients.get(connection.client_address, set())
        if connection not in mine:
            return
        self.note_busy(connection)
        mine.discard(connection)
        self._count -= 1
        if not mine:
            del self._clients[connection.client_address]

    def close_quiet(self, seconds: float) -> None:
        """Those on which nothing has happened for so long: their clients, too, take them for unused."""
        for connection in [one for one in self._longest if one.quiet(seconds)]:
            connection.make_room()

    def _close_first(self, waiting: dict[Connection, None]) -> bool:
        first = next(iter(waiting), None)
        if first is None:
            return False
        self.note_gone(first)
        self.closed += 1
        first.make_room()
        return True


def client_address(transport: asyncio.BaseTransport) -> str:
    return client_address_of(transport.get_extra_info("peername"))


def client_address_of(peer: object) -> str:
    """Who counts as one client: an IPv4 address, or a network of 64 bits, which one host has to itself."""
    address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in address:
        return address
    network = ipaddress.ip_network((address.partition("%")[0], 64), strict=False)
    return str(network.network_address)
