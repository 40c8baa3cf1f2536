"""Memory of the host for caches: pages that are zero until touched. torch.zeros would write, and so occupy, all of them
at once."""

import math

import numpy as np
import torch
from torch import Tensor

from afserve.errors import DoesNotFitError
from afserve.kernels.devices.opened import device_of

CACHE_LINE, HUGE_PAGE = 64, 1 << 21
_NEAR_ROWS = "--kv-near-rows", "keep fewer tokens (--kv-tokens)"


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Where huge pages begin, if it is as large as one."""
    size = math.prod(shape) * dtype.itemsize
    align = HUGE_PAGE if size >= HUGE_PAGE else CACHE_LINE  # malloc's own splits every row over lines
    zeros = np.zeros(size + align, dtype=np.uint8)
    first = -zeros.ctypes.data % align
    return torch.from_numpy(zeros[first : first + size]).view(dtype).view(shape)


def lent_to(
    device: torch.device,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    asked: tuple[str, str] = _NEAR_ROWS,
) -> Tensor:
    """What this device reads and writes by itself, for as long as the process runs. Raises DoesNotFitError where it
    cannot, which says what `asked` for it and what to do."""
    memory = untouched(shape, dtype)
    try:
        device_of(device).pin_pages(memory.view(-1).view(torch.uint8))
    except OSError as error:
        told = f"{asked[0]}: of what {device} is to read of the host {error}; {asked[1]}"
        raise DoesNotFitError(told) from error
    return memory
