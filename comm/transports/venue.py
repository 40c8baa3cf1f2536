"""Where an expert node and its attention nodes meet before payloads have a way: by a store between hosts, or on a Unix
socket inside one. What opens payloads is introduced to the other node there."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from afserve.comm.transport import Layout
from afserve.comm.transports import unix
from afserve.comm.transports.encrypted import Connection
from afserve.comm.transports.entrance import listen_on
from afserve.comm.transports.groups import Meeting, join_store, open_store
from afserve.comm.transports.in_time import Late, in_time
from afserve.errors import RendezvousError

_DOOR = "door"  # in the store: the port that attention nodes connect to


@dataclass(frozen=True, slots=True)
class Introduction:
    """Two nodes that have greeted each other on `connection`, where headers will travel. `name` is of this connection
    alone, and nobody else knows it; `rank` is that of `groups`. Both have `timeout` seconds to open a way."""

    connection: Connection
    meeting: Meeting | None
    name: str
    rank: int
    timeout: float
    device: torch.device
    layout: Layout


@dataclass(frozen=True, slots=True)
class ListeningVenue:
    """At an expert node. `where` follows the transport's name in its address."""

    listener: socket.socket
    where: str
    meeting: Meeting | None = None


@dataclass(frozen=True, slots=True)
class FoundVenue:
    """At an attention node. `dial`, given the seconds that are left, raises RendezvousError naming the expert node."""

    dial: Callable[[float], socket.socket]
    meeting: Meeting | None = None


@dataclass(frozen=True, slots=True)
class Venue:
    """`listen(host)`, and `find(where, peer, timeout)`; both raise RendezvousError. `form` is how `where` looks."""

    form: str
    listen: Callable[[str], ListeningVenue]
    find: Callable[[str, str, float], FoundVenue | None]  # None where `where` does not look so


def _listen_by_store(host: str) -> ListeningVenue:
    meeting, listener = open_store(host), listen_on(host)
    meeting.store.set(_DOOR, str(listener.getsockname()[1]))
    return ListeningVenue(listener, f"{meeting.host}:{meeting.port}", meeting)


def _find_by_store(where: str, peer: str, timeout: float) -> FoundVenue | None:
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal():
        return None
    meeting = join_store(host, int(port), peer, timeout)
    return FoundVenue(partial(dial_by_store, meeting, peer), meeting)


def dial_by_store(meeting: Meeting, peer: str, timeout: float) -> socket.socket:
    try:
        door = in_time(timeout, lambda: meeting.store.get(_DOOR))
        return socket.create_connection((meeting.host, int(door)), timeout)
    except Late as error:
        raise RendezvousError(
            f"{peer} said nothing for {timeout:g} s after it was reached; is it stopped?"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"{peer}: its store at {meeting.host}:{meeting.port} is no expert node's"
        ) from error


def _listen_in_host(host: str) -> ListeningVenue:
    listener = unix.listen_here("rows")
    return ListeningVenue(listener, unix.name_of(listener))


def _find_in_host(where: str, peer: str, timeout: float) -> FoundVenue | None:
    return FoundVenue(partial(_dial_in_host, where, peer)) if where.startswith("afserve-rows-") else None


def _dial_in_host(name: str, peer: str, timeout: float) -> socket.socket:
    try:
        return unix.dial_here(name, timeout)
    except OSError as error:
        raise RendezvousError(
            f"{peer}: nobody answers at {name} ({error.strerror or error}); is it running, on this host and in the "
            "same network namespace?"
        ) from error


BY_STORE = Venue("HOST:PORT", _listen_by_store, _find_by_store)
IN_HOST = Venue("NAME", _listen_in_host, _find_in_host)
