"""GPUs of one NVLink domain: each GPU writes its peer's mailboxes in place and raises a flag there when they are full.

As in `dist`, each pair of nodes has one connection, which carries headers and shows when a peer is gone. The payload
needs no host: the sender launches a kernel that raises the flag after the kernels that wrote the payload, and the
receiver launches a kernel that waits for the flag before those that read it. The address is `symm:HOST:PORT`.
`bench/symm_device.py` needs no headers either.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from afserve.comm.mailbox.wire import Frame, aligned
from afserve.comm.transport import Connecting, Kind, Layout, ListenSpec
from afserve.comm.transports import dist
from afserve.comm.transports.groups import Meeting
from afserve.comm.transports.pair_stream import Boxes, Carriage
from afserve.errors import ConfigError

_FLAG_BYTES = 256  # a flag has its own line, and what follows it is aligned for any vector
_ALIGN = 256
_LIMIT_SECONDS = (
    30.0  # how long a kernel waits for an announced payload: longer than a stopped peer goes unnoticed
)


@dataclass(frozen=True, slots=True)
class Shared:
    """The same number of bytes at two nodes, each of which reads and writes both; `keeper` holds what must live on."""

    mine_B: Tensor
    theirs_B: Tensor
    keeper: object = None


class Domain(Protocol):
    """Where memory comes from that both ends of a pair can write."""

    def share(self, name: str, rank: int, size: int, device: torch.device, store: Store) -> Shared:
        """Zeros at first. Blocks until the other end does the same; raises RuntimeError when it does not."""


class NvlinkDomain:
    """PyTorch's symmetric memory, in groups of two."""

    def share(self, name: str, rank: int, size: int, device: torch.device, store: Store) -> Shared:
        from torch._C._distributed_c10d import _SymmetricMemory

        with torch.cuda.device(device):
            _SymmetricMemory.set_group_info(name, rank, 2, store)
            mine_B = _SymmetricMemory.empty_strided_p2p([size], [1], torch.uint8, device).zero_()
            torch.cuda.synchronize(device)
            handle = _SymmetricMemory.rendezvous(mine_B, name)
            return Shared(mine_B, handle.get_buffer(1 - rank, [size], torch.uint8), handle)


class SymmPair:
    """Payloads of one attention node and one expert node. Both write into the other one's memory."""

    def __init__(
        self,
        domain: Domain,
        timed: bool,
        meeting: Meeting,
        name: str,
        rank: int,
        timeout: float,
        device: torch.device,
        layout: Layout,
    ) -> None:
        from afserve.kernels.triton import symm as triton_symm

        self._kernels, self._timed = triton_symm, timed
        self._limit = int(_LIMIT_SECONDS * 1e9) if timed else 1000
        self._stride = _FLAG_BYTES + aligned(
            max(Frame(kind, layout).capacity for kind in _DIRECTIONS), _ALIGN
        )
        whole = f"afserve/{meeting.host}:{meeting.port}/{name}"  # names of groups are the process's
        store = PrefixStore(whole, meeting.store)
        store.set_timeout(timedelta(seconds=timeout))
        size = layout.micro_batches * self._stride
        self._shared: Shared | None = domain.share(whole, rank, size, device, store)
        self._outboxes: Boxes = {}
        self._sent = [0] * layout.micro_batches
        self._received = [0] * layout.micro_batches
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def bind(self, inboxes: Boxes, outboxes: Boxes) -> None:
        shared, self._outboxes = self._open(), outboxes
        for memory_B, boxes in ((shared.mine_B, inboxes), (shared.theirs_B, outboxes)):
            for tag, box in boxes.items():
                start = tag * self._stride + _FLAG_BYTES
                box.bind(memory_B[start : start + box.payload_B.numel()])

    def expect(self, inbox_B: Tensor, tag: int) -> None:
        """Whoever sends writes without asking."""

    def send(self, payload_B: Tensor, tag: int) -> None:
        """The payload was written in place, by kernels that were launched before."""
        self._sent[tag] += 1
        flag = self._open().theirs_B.data_ptr() + tag * self._stride
        with _current(payload_B):
            self._kernels.raise_flag[(1,)](flag, self._sent[tag], num_warps=1)

    def receive(self, payload_B: Tensor, tag: int, limit: float) -> None:
        """What is launched from now on comes after the payload."""
        self._received[tag] += 1
        flag = self._open().mine_B.data_ptr() + tag * self._stride
        with _current(payload_B):
            self._kernels.await_flag[(1,)](
                flag, self._received[tag], payload_B, payload_B.numel(), self._error.data_ptr(), self._limit,
                TIMED=self._timed, BYTES=1024,
            )  # fmt: skip

    def close(self) -> None:
        """Give the memory back once no kernel uses it; who still fills a mailbox fills one that goes nowhere."""
        if self._shared is not None and self._shared.mine_B.is_cuda:
            torch.cuda.synchronize(self._shared.mine_B.device)
        for box in self._outboxes.values():
            box.bind(torch.empty_like(box.payload_B))
        self._outboxes = {}
        self._shared = None

    def _open(self) -> Shared:
        if self._shared is None or int(self._error[0]):
            raise RuntimeError("a payload that was announced did not come")
        return self._shared


_DIRECTIONS = (Kind.DISPATCH, Kind.COMBINE)


def _current(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the current device; on none, in its interpreter."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


def carriage(device: torch.device, domain: Domain, *, timed: bool) -> Carriage:
    """`timed` is whether the device has a clock, as GPUs have and Triton's interpreter has not."""
    return Carriage(device, 0, "symm", partial(SymmPair, domain, timed))


def on_gpu(device: torch.device) -> Carriage:
    """Raises ConfigError where there is no such GPU or no Triton."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f"transport symm: payloads lie in GPU memory, and device {device} is none of this machine's GPUs; "
            "start nodes with --device cuda on GPUs of one NVLink domain, or use another --transport",
            param="transport",
        )
    return carriage(device, NvlinkDomain(), timed=True)


def listen(at: ListenSpec) -> tuple[dist.DistTransport, str]:
    return dist.listen(at, on_gpu(at.device))


def connect(to: Connecting) -> dist.DistTransport:
    return dist.connect(to, on_gpu(to.device))
