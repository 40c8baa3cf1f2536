"""Process groups of exactly two over gloo, met through a store that listens on one address only.

A pair has a group of its own, so that members come and go without the others noticing. Gloo and its store trust whoever
can reach them: they belong on a network of their own. It knows tensors of bytes, not what they mean.
"""

import socket
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from afserve.errors import RendezvousError

EXPERT_RANK, ATTENTION_RANK = 0, 1
_KEPT = 32  # a send whose handle is dropped before it is done is not sent; more than are ever under way
_FOREVER = timedelta(days=1000)


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
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
    except (OSError, RuntimeError) as error:
        raise RendezvousError(
            f"{peer}: nobody answers at {host}:{port} within {timeout:g} s; is it running, and reachable from here?"
        ) from error
    return Meeting(store, host, port, mine)


class Pair:
    """Both directions of one attention node with one expert node. Messages of one tag keep their order."""

    def __init__(self, meeting: Meeting, name: str, rank: int, timeout: float) -> None:
        """Blocks until the other end does the same; raises RuntimeError when it does not within `timeout` seconds."""
        gloo: Any = ProcessGroupGloo  # the stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=meeting.mine)]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 1
        self._group = gloo(PrefixStore(name, meeting.store), rank, 2, options)
        self._other = 1 - rank
        self._sent: deque[object] = deque(maxlen=_KEPT)

    def send(self, message_B: Tensor, tag: int) -> None:
        """Returns at once; `message_B` must stay as it is until its answer came. Raises RuntimeError when cut off."""
        self._sent.append(self._group.send([message_B], self._other, tag))

    def receive(self, inbox_B: Tensor, tag: int) -> None:
        """Wait for the next message, which may be shorter than `inbox_B`. Raises RuntimeError when cut off."""
        self._group.recv([inbox_B], self._other, tag).wait(_FOREVER)
