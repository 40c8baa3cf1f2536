"""Host memory that another process can map: what stands behind the seam to a device's driver where there is no GPU."""

import fcntl
import mmap
import os

import torch
from torch import Tensor

from afserve.comm.peer_memory.driver import Made, MemoryRefused

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostDriver:
    """A sealed memfd: all above a driver is tested over it."""

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
