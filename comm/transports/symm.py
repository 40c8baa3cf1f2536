"""GPUs of one host: each GPU writes its peer's mailboxes in place and raises a flag there when they are full.

As in `dist`, each pair of nodes has one connection, which carries headers and shows when a peer is gone; here it is a
Unix socket, on which the two hand each other their memory (`peer_memory`). The payload needs no host: the sender
launches a kernel that raises the flag after the kernels that wrote the payload, and the receiver launches a kernel that
waits for the flag before those that read it. Two nodes may be on one GPU. The address is `symm:NAME`.
`device_exchange/ends.py` needs no headers either.
"""

import socket
from functools import partial

import torch
from torch import Tensor

from afserve.comm.device_exchange.region import region_bytes
from afserve.comm.mailbox.wire import Frame, aligned
from afserve.comm.peer_memory.cuda_driver import CudaDriver
from afserve.comm.peer_memory.driver import MemoryDriver, MemoryRefused
from afserve.comm.peer_memory.ipc_domain import IpcDomain, Shared
from afserve.comm.transport import Connecting, Kind, ListenSpec, SharedRegion
from afserve.comm.transports import dist
from afserve.comm.transports.pair_stream import Boxes, Carriage
from afserve.comm.transports.venue import IN_HOST, Introduction
from afserve.errors import ConfigError
from afserve.kernels.devices.cuda import count_gpus
from afserve.kernels.devices.opened import device_of

_FLAG_BYTES = 256  # a flag has its own line, and what follows it is aligned for any vector
_ALIGN = 256
_COUNT_WORDS = 64  # of 4 bytes, between two boxes' numbers: their addresses are alike to the compiler
_LIMIT_SECONDS = 30.0  # for an announced payload: a stopped peer is noticed sooner
_BYTES = 1024  # of a payload that one program spoils at once
_LOOKS = 1000  # the same where the device has no clock
_ERROR, _ABORT = 0, 1  # words that host and device share: `kernels/triton/symm.py`
_DIRECTIONS = (Kind.DISPATCH, Kind.COMBINE)


class SymmPair:
    """Payloads of one attention node and one expert node. Both write into the other one's memory.

    `chip` is whether kernels run on one; Triton's interpreter has no clock and no instructions of a chip.
    """

    def __init__(self, driver: MemoryDriver, chip: bool, known: Introduction) -> None:
        from afserve.kernels.triton import symm as triton_symm

        self._kernels, self._chip = triton_symm, chip
        self._limit = int(_LIMIT_SECONDS * 1e9) if chip else _LOOKS
        layout, device = known.layout, known.device
        self._stride = _FLAG_BYTES + aligned(max(Frame(way, layout).capacity for way in _DIRECTIONS), _ALIGN)
        shape = 2, layout.micro_batches, _COUNT_WORDS
        self._sent, self._received = torch.zeros(shape, dtype=torch.int32, device=device)
        self._words = device_of(device).pinned(2, torch.int32)
        assert isinstance(known.connection, socket.socket), "memory is handed over on a plain Unix socket"
        self._regions, self._region = layout.micro_batches * self._stride, 0
        if layout.exchange:
            self._region = aligned(region_bytes(layout), _ALIGN)
        size = self._regions + layout.micro_batches * self._region
        self._shared: Shared | None = IpcDomain(driver).share(known.connection, size, known.timeout)
        self._outboxes: Boxes = {}

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
        flag = self._open().theirs_B.data_ptr() + tag * self._stride
        with device_of(payload_B.device).as_current():  # Triton launches on the current device
            self._kernels.raise_flag[(1,)](flag, self._sent, tag, CHIP=self._chip, num_warps=1)

    def receive(self, payload_B: Tensor, tag: int, limit: float) -> None:
        """What is launched from now on comes after the payload."""
        flag = self._open().mine_B.data_ptr() + tag * self._stride
        with device_of(payload_B.device).as_current():  # Triton launches on the current device
            self._kernels.await_flag[(1,)](
                flag, self._received, tag, payload_B, payload_B.numel(), self._words.data_ptr(), self._limit,
                CHIP=self._chip, BYTES=_BYTES,
            )  # fmt: skip

    def shared_region(self, tag: int) -> SharedRegion | None:
        """Behind the mailboxes, where both ends are to exchange messages by themselves."""
        shared, start = self._shared, self._regions + tag * self._region
        if shared is None or not self._region:
            return None
        return SharedRegion(shared.mine_B.data_ptr() + start, shared.theirs_B.data_ptr() + start, shared)

    def close(self) -> None:
        """End every wait, and give the memory back once no kernel uses it. Who still fills a mailbox fills one that
        goes nowhere."""
        self._words[_ABORT] = 1
        if self._shared is not None:
            device_of(self._shared.mine_B.device).finish()
        for box in self._outboxes.values():
            box.bind(torch.empty_like(box.payload_B))
        self._outboxes = {}
        self._shared = None

    def _open(self) -> Shared:
        if self._shared is None or int(self._words[_ERROR]):
            raise RuntimeError("a payload that was announced did not come")
        return self._shared


def rehearse(device: torch.device, *, chip: bool) -> bool:
    """Both kernels once, over memory of its own, so that they are compiled before a message waits for them. Whether the
    flag that was raised was found; it waits for the device."""
    from afserve.kernels.triton import symm as kernels

    place = device_of(device)
    memory_B = torch.zeros(_FLAG_BYTES + _BYTES, dtype=torch.uint8, device=device)
    sent, received = torch.zeros((2, _COUNT_WORDS), dtype=torch.int32, device=device)
    words, limit = place.pinned(2, torch.int32), int(_LIMIT_SECONDS * 1e9) if chip else _LOOKS
    with place.as_current():  # Triton launches on the current device
        kernels.raise_flag[(1,)](memory_B.data_ptr(), sent, 0, CHIP=chip, num_warps=1)
        kernels.await_flag[(1,)](
            memory_B.data_ptr(), received, 0, memory_B[_FLAG_BYTES:], _BYTES, words.data_ptr(), limit, CHIP=chip,
            BYTES=_BYTES,
        )  # fmt: skip
    place.finish()
    return not int(words[_ERROR])


def carriage(device: torch.device, driver: MemoryDriver, *, chip: bool) -> Carriage:
    """`chip`: see `SymmPair`."""
    return Carriage(device, 0, "symm", partial(SymmPair, driver, chip), IN_HOST, regions=True)


def on_gpu(device: torch.device) -> Carriage:
    """Raises ConfigError where there is no such GPU, or it cannot share memory."""
    if device.type != "cuda" or not count_gpus():
        raise ConfigError(
            f"transport symm: payloads lie in GPU memory, and device {device} is none of this machine's GPUs; "
            "start nodes with --device cuda on GPUs of one host, or use another --transport",
            param="transport",
        )
    if not rehearse(device, chip=True):
        raise ConfigError(
            f"transport symm: on {device} a flag that one kernel raised was not found by the next; use --transport shm "
            "or dist, and please report it",
            param="transport",
        )
    try:
        return carriage(device, CudaDriver(device), chip=True)
    except MemoryRefused as error:
        raise ConfigError(
            f"transport symm: {error}; use --transport shm or dist", param="transport"
        ) from error


def listen(at: ListenSpec) -> tuple[dist.DistTransport, str]:
    return dist.listen(at, on_gpu(at.device))


def connect(to: Connecting) -> dist.DistTransport:
    return dist.connect(to, on_gpu(to.device))
