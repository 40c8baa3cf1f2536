"""Memory of a micro-batch's step columns, which stays: sets of columns for 1, 2, 4, 8 ... tokens, and of tables for 1,
2, 4, 8 ... sequences, at addresses that stay. A step has views of the smallest sets with room, and the next step in
these sets writes over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afserve.kernels.devices.device import Device, Event

_SPARE = 64  # blocks of a table beyond those of the longest sequence: drafts, and what a step has of a block


@dataclass(slots=True)
class _Set:
    """Where each column begins; the columns on the host, as NumPy and as PyTorch see them, and on the device, which is
    the same memory on a CPU. Until it has `copied` the last ones, the host must not write others."""

    places: list[int]
    host: NDArray[np.number[Any]]
    source: Tensor
    whole: Tensor
    copied: Event | None = None


class StepBuffers:
    """On `device`, for sequences of up to so many tokens."""

    def __init__(self, device: Device, most_tokens: int) -> None:
        self._device, self._most_tokens = device, most_tokens
        self._sets: dict[tuple[str, int], _Set] = {}

    def write(
        self,
        name: str,
        rows: int,
        dtype: torch.dtype,
        columns: Sequence[Sequence[float] | NDArray[np.number[Any]]],
        block_size: int = 0,
    ) -> list[Tensor]:
        """Columns of up to `rows` + 1 numbers; with a `block_size` the last one has a block table for each row. All are
        one piece of memory: one copy to a device, for which the host does not wait. NumPy reads a list in a third of
        PyTorch's time."""
        key = name, (rows - 1).bit_length()
        if key not in self._sets:
            most = self._most_tokens // block_size + _SPARE if block_size else 1
            self._sets[key] = self._open(1 << key[1], [1] * (len(columns) - 1) + [most], dtype)
        known = self._sets[key]
        if known.copied is not None:
            known.copied.wait()
        views, end = [], 0
        for first, numbers in zip(known.places, columns, strict=False):
            end = first + len(numbers)
            known.host[first:end] = numbers
            views.append(known.whole[first:end])
        if known.whole is not known.source:
            known.whole[:end].copy_(known.source[:end], non_blocking=True)
            known.copied = self._device.current().put_event()
        return views

    def _open(self, rows: int, most: Sequence[int], dtype: torch.dtype) -> _Set:
        """Each begins at a multiple of 16 bytes, which GPU kernels are compiled for."""
        places = list(accumulate(((rows * each + 4) & ~3 for each in most), initial=0))
        source = self._device.pinned(places[-1], dtype)
        whole = torch.empty_like(source, device=self._device.where) if self._device.later else source
        return _Set(places, source.numpy(), source, whole)
