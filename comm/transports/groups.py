"""Process groups of exactly two nodes over gloo or nccl, which meet through a store that listens on one address.

Each pair has groups of its own, so a node that comes or goes disturbs no other pair. The groups and their store trust
whoever can reach them, so they belong on a network of their own. It knows tensors of bytes, not what they mean.
"""

import socket
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from afserve.comm.transports.in_time import in_time
from afserve.errors import ConfigError, RendezvousError

EXPERT_RANK, ATTENTION_RANK = 0, 1
_KEPT = 32  # a send whose handle is dropped before it is done is not sent; more than are ever under way


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


def check_device(device: torch.device) -> None:
    """Raises ConfigError where payloads on `device` have no way to travel."""
    if device.type == "cuda" and not hasattr(_distributed_c10d, "ProcessGroupNCCL"):
        raise ConfigError(
            f"transport dist: payloads on {device} need a PyTorch with nccl, and {torch.__version__} has none; "
            "install one for CUDA, or use --transport tcp",
            param="transport",
        )


class Pair:
    """Payloads of one attention node and one expert node, over gloo between host memories or nccl between GPUs.

    nccl keeps one order per communicator, whatever the tags, so each direction has one of its own.
    """

    def __init__(
        self, meeting: Meeting, name: str, rank: int, timeout: float, device: torch.device, _: object = None
    ) -> None:
        """Blocks until the other end does the same; raises RuntimeError when it does not within `timeout` seconds."""
        self._other = 1 - rank
        self._sent: deque[object] = deque(maxlen=_KEPT)
        self._expected: dict[int, Any] = {}
        self.in_order_of_device = device.type == "cuda"
        if self.in_order_of_device:
            dispatch = _nccl(PrefixStore(f"{name}/dispatch", meeting.store), rank, timeout, device)
            combine = _nccl(PrefixStore(f"{name}/combine", meeting.store), rank, timeout, device)
            self._out, self._into = (combine, dispatch) if rank == EXPERT_RANK else (dispatch, combine)
        else:
            device_here, store = gloo_device(meeting.mine), PrefixStore(name, meeting.store)
            self._out = self._into = in_time(timeout, lambda: open_gloo(store, rank, timeout, device_here))

    def bind(self, inboxes: object, outboxes: object) -> None:
        """Mailboxes stay where they are."""

    def expect(self, inbox_B: Tensor, tag: int) -> None:
        """Let gloo know where the next payload of `tag` goes, so that its sender need not ask; it may be shorter."""
        if not self.in_order_of_device and tag not in self._expected:
            self._expected[tag] = self._into.recv([inbox_B], self._other, tag)

    def send(self, payload_B: Tensor, tag: int) -> None:
        """Returns at once; the payload must stay as it is until its answer came. Raises RuntimeError when cut off."""
        self._sent.append(self._out.send([payload_B], self._other, tag))

    def receive(self, payload_B: Tensor, tag: int, limit: float) -> None:
        """Take in the payload that the other end has sent; on a GPU, what is launched from now on comes after it.

        Raises RuntimeError when cut off, or when `limit` seconds pass: nothing comes from this pair any more then.
        """
        if self.in_order_of_device:
            self._into.recv([payload_B], self._other, tag).wait()
        else:
            self._expected.pop(tag).wait(timedelta(seconds=limit))

    def close(self) -> None:
        """A kernel of nccl that waits for a peer that is gone would wait for ever."""
        for group in {self._out, self._into} - {None} if self.in_order_of_device else ():
            group.abort()
        self._expected.clear()
        self._sent.clear()
        self._out = self._into = None


def gloo_device(mine: str) -> Any:
    """A thread of gloo that moves the bytes of groups and listens on this address alone, for as long as it is held.
    Raises RuntimeError where this host has no such address."""
    gloo: Any = ProcessGroupGloo  # the stubs lack most of it
    return gloo.create_device(hostname=mine)


def open_gloo(store: Store, rank: int, timeout: float, device: Any) -> Any:
    """Blocks as `Pair` does."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    return gloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, timeout: float, device: torch.device) -> Any:
    nccl: Any = _distributed_c10d.ProcessGroupNCCL  # not in a PyTorch without CUDA
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout)
    group = nccl(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group
