"""Where memory comes from that another process can map: the seam to a device's driver, and host memory behind it.

What is handed over is a file descriptor. It goes over a Unix socket, so the memory has no name that anybody else could
open, and it is gone with the last process that maps it. It knows no peers.
"""

import fcntl
import mmap
import os
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryRefused(RuntimeError):
    """Memory could not be made, handed over or mapped; the text says what and why."""


class Made(NamedTuple):
    """`memory_B` is as long as was asked for; the driver made `whole` bytes. Whoever made it closes `file`."""

    memory_B: Tensor
    file: int
    whole: int


class MemoryDriver(Protocol):
    """Memory stays mapped as long as there is a tensor of it. What fails raises MemoryRefused."""

    @property
    def name(self) -> str:
        """At most 8 letters. Ends of another driver's name cannot map this one's memory."""

    def make(self, size: int) -> Made:
        """`size` bytes, zeros."""

    def open(self, file: int, size: int, whole: int) -> Tensor:
        """The first `size` bytes of what another process made. The caller closes `file`."""


class HostDriver:
    """A sealed memfd: for ends without a GPU, and for tests of everything above a driver."""

    name = "host"

    def make(self, size: int) -> Made:
        file = os.memfd_create("afserve-peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            return Made(_mapped(file, size), file, size)
        except OSError as error:
            os.close(file)
            raise MemoryRefused(
                f"{size} bytes of host memory could not be made ({error.strerror})"
            ) from error

    def open(self, file: int, size: int, whole: int) -> Tensor:
        try:
            sealed, there = fcntl.fcntl(file, fcntl.F_GET_SEALS), os.fstat(file).st_size
        except OSError as error:
            raise MemoryRefused(f"what came is no memory ({error.strerror})") from error
        if sealed & fcntl.F_SEAL_SHRINK == 0 or there != size:
            raise MemoryRefused(
                f"what came has {there} bytes and the seals {sealed}, not {size} that cannot shrink"
            )
        return _mapped(file, size)


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
