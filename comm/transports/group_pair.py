"""Payloads of two nodes through process groups of exactly these two: over gloo between host memories, or over nccl
between GPUs.

Each pair has groups of its own, so a node that comes or goes disturbs no other pair. It knows tensors of bytes, not
what they mean.
"""

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from afserve.comm.transports.groups import EXPERT_RANK, gloo_device, open_gloo
from afserve.comm.transports.in_time import Late, in_time
from afserve.comm.transports.venue import Introduction
from afserve.errors import ConfigError

_KEPT = 32  # a send whose handle is dropped before it is done is not sent; more than are ever under way
_LOOK_SECONDS = 0.001  # between two looks whether a first message has come
# nccl's watchdog ends this process when an operation takes longer. Who is gone is noticed long before, by its
# connection; a node that is stopped, by its silence.
_WATCHDOG_SECONDS = 600.0

_T = TypeVar("_T")
OpenCommunicator = Callable[[Store, int, float, torch.device], Any]


def check_device(device: torch.device) -> None:
    """Raises ConfigError where payloads on `device` have no way to travel."""
    if device.type == "cuda" and not hasattr(distributed_c10d, "ProcessGroupNCCL"):
        raise ConfigError(
            f"transport dist: payloads on {device} need a PyTorch with nccl, and {torch.__version__} has none; "
            "install one for CUDA, or use --transport tcp",
            param="transport",
        )


def open_pair(known: Introduction) -> "GlooPair | NcclPair":
    """Raises RuntimeError where the other end does not do the same in time."""
    return NcclPair(known) if known.device.type == "cuda" else GlooPair(known)


class GlooPair:
    """One group. Payloads go and come by their tags, in any order."""

    def __init__(self, known: Introduction) -> None:
        assert known.meeting is not None, "gloo meets through a store"
        self._other = 1 - known.rank
        self._sent: deque[object] = deque(maxlen=_KEPT)
        self._expected: dict[int, Any] = {}
        device, store = gloo_device(known.meeting.mine), PrefixStore(known.name, known.meeting.store)
        self._group: Any = in_time(
            known.timeout, lambda: open_gloo(store, known.rank, known.timeout, device), known.connection
        )

    def bind(self, inboxes: object, outboxes: object) -> None:
        """Mailboxes stay where they are."""

    def expect(self, inbox_B: Tensor, tag: int) -> None:
        """Let gloo know where the next payload of `tag` goes, so that its sender need not ask; it may be shorter."""
        if tag not in self._expected:
            self._expected[tag] = self._group.recv([inbox_B], self._other, tag)

    def send(self, payload_B: Tensor, tag: int) -> None:
        """Returns at once; the payload must stay as it is until its answer came. Raises RuntimeError when cut off."""
        self._sent.append(self._group.send([payload_B], self._other, tag))

    def receive(self, payload_B: Tensor, tag: int, limit: float) -> None:
        """Take in the payload that the other end has sent. Raises RuntimeError when cut off, or when `limit` seconds
        pass: nothing comes from this pair any more then."""
        self._expected.pop(tag).wait(timedelta(seconds=limit))

    def shared_region(self, tag: int) -> None:
        """There is no such memory."""

    def close(self) -> None:
        self._expected.clear()
        self._sent.clear()
        self._group = None


class NcclPair:
    """nccl keeps one order per communicator, whatever the tags, so each direction has one of its own.

    nccl connects two GPUs inside the first send and receive between them, and the host blocks there until the other
    end enters its own (`ncclP2PPreconnectFunc`; its issues 415 and 1487). A node sends a payload before the header
    that makes the other one receive it. So both directions have carried a message before a pair is used.
    `open_communicator` replaces nccl in tests.
    """

    def __init__(self, known: Introduction, open_communicator: OpenCommunicator | None = None) -> None:
        assert known.meeting is not None, "nccl meets through a store"
        self._other = 1 - known.rank
        self._sent: deque[object] = deque(maxlen=_KEPT)
        self._out: Any = None
        self._into: Any = None
        self._until, self._connection = time.monotonic() + known.timeout, known.connection
        try:
            self._open(known, known.meeting.store, open_communicator or _nccl)
        except RuntimeError:
            self.close()  # which also ends what was left behind in it
            raise

    def _open(self, known: Introduction, store: Store, open_communicator: OpenCommunicator) -> None:
        def communicator(way: str) -> Any:
            own = PrefixStore(f"{known.name}/{way}", store)
            return open_communicator(own, known.rank, known.timeout, known.device)

        first_B = torch.zeros(1, dtype=torch.uint8, device=known.device)
        if known.rank == EXPERT_RANK:
            self._into = self._in_time(partial(communicator, "dispatch"))
            self._out = self._in_time(partial(communicator, "combine"))
            self._first(lambda: self._into.recv([first_B], self._other, 0))
            self._first(lambda: self._out.send([first_B], self._other, 0))
        else:
            self._out = self._in_time(partial(communicator, "dispatch"))
            self._into = self._in_time(partial(communicator, "combine"))
            self._first(lambda: self._out.send([first_B], self._other, 0))
            self._first(lambda: self._into.recv([first_B], self._other, 0))

    def bind(self, inboxes: object, outboxes: object) -> None:
        """Mailboxes stay where they are."""

    def expect(self, inbox_B: Tensor, tag: int) -> None:
        """nccl is asked for a payload once its header is here."""

    def send(self, payload_B: Tensor, tag: int) -> None:
        """Returns at once; the payload must stay as it is until its answer came. Raises RuntimeError when cut off."""
        self._sent.append(self._out.send([payload_B], self._other, tag))

    def receive(self, payload_B: Tensor, tag: int, limit: float) -> None:
        """What is launched on the GPU from now on comes after the payload. Raises RuntimeError when cut off."""
        self._into.recv([payload_B], self._other, tag).wait()

    def shared_region(self, tag: int) -> None:
        """There is no such memory."""

    def close(self) -> None:
        """A kernel of nccl that waits for a peer that is gone would wait for ever."""
        for group in (self._out, self._into):
            if group is not None:
                group.abort()
        self._sent.clear()
        self._out = self._into = None

    def _first(self, begin: Callable[[], Any]) -> None:
        """The first message of a direction. The host may block in it, and the device until the other end is there."""

        def done() -> None:
            work = begin()
            while not work.is_completed():
                if time.monotonic() > self._until:
                    raise Late("its first message did not come in time")
                time.sleep(_LOOK_SECONDS)

        self._in_time(done)

    def _in_time(self, call: Callable[[], _T]) -> _T:
        return in_time(max(0.0, self._until - time.monotonic()), call, self._connection)


def _nccl(store: Store, rank: int, timeout: float, device: torch.device) -> Any:
    nccl: Any = distributed_c10d.ProcessGroupNCCL  # not in a PyTorch without CUDA
    options = nccl.Options()
    options._timeout = timedelta(seconds=max(timeout, _WATCHDOG_SECONDS))
    group = nccl(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group
