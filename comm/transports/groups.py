"""How two nodes meet through a store that listens on one address, and gloo's groups of exactly two.

A store and its groups trust whoever can reach them, so they belong on a network of their own. What travels in them:
`group_pair.py`.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not listed there
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from afserve.comm.transports.in_time import in_time
from afserve.errors import RendezvousError

EXPERT_RANK, ATTENTION_RANK = 0, 1


@dataclass(frozen=True, slots=True)
class Meeting:
    """A store and how to reach it: `host` is the expert node's address, `mine` this end's own on the same network."""

    store: Store
    host: str
    port: int
    mine: str


def open_store(host: str) -> Meeting:
    """Listen on `host` and nowhere else, at a port that is free."""
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on {host}: {error.strerror}; give an address of this host"
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return Meeting(store, host, port, host)


def join_store(host: str, port: int, peer: str, timeout: float) -> Meeting:
    """Raises RendezvousError naming `peer` when nobody answers there in time."""
    try:
        with socket.create_connection((host, port), timeout) as probe:
            mine = probe.getsockname()[0]
        store = in_time(timeout, lambda: _store_client(host, port, timeout))
    except (OSError, RuntimeError) as error:
        raise RendezvousError(
            f"{peer}: nobody answers at {host}:{port} within {timeout:g} s; is it running, and reachable from here?"
        ) from error
    return Meeting(store, host, port, mine)


def _store_client(host: str, port: int, timeout: float) -> Store:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def gloo_device(mine: str) -> Any:
    """A thread of gloo that moves the bytes of groups and listens on this address alone, for as long as it is held.
    Raises RuntimeError where this host has no such address."""
    gloo: Any = ProcessGroupGloo  # the stubs lack most of it
    return gloo.create_device(hostname=mine)


def open_gloo(store: Store, rank: int, timeout: float, device: Any) -> Any:
    """Blocks until the other end does the same."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    return gloo(store, rank, 2, options)
