"""Memory of a micro-batch's step columns, which stays: sets of columns for 1, 2, 4, 8 ... tokens, and of tables for 1,
2, 4, 8 ... sequences, at addresses that stay. A step has views of the smallest sets with room, and the next step in
these sets writes over them."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SPARE = 64  # blocks of a table beyond those of the longest sequence: drafts, and what a step has of a block
Columns = tuple[
    list[int], NDArray[np.integer], Tensor, Tensor
]  # where each begins, on the host twice, on the device


class StepBuffers:
    """On `device`, for sequences of up to so many tokens."""

    def __init__(self, device: torch.device, most_tokens: int) -> None:
        self._device, self._most_tokens = device, most_tokens
        self._sets: dict[tuple[str, int], Columns] = {}

    @property
    def held_bytes(self) -> int:
        return sum(whole.nbytes for _, _, _, whole in self._sets.values())

    def write(
        self, name: str, rows: int, dtype: type[np.integer], columns: Sequence[list[int]], block_size: int = 0
    ) -> list[Tensor]:
        """Columns of up to `rows` + 1 numbers; with a `block_size` the last one has a block table for each row. All are
        one piece of memory: one copy to a device. NumPy reads a list in a third of PyTorch's time."""
        key = name, (rows - 1).bit_length()
        if key not in self._sets:
            most = self._most_tokens // block_size + _SPARE if block_size else 1
            self._sets[key] = self._open(1 << key[1], [1] * (len(columns) - 1) + [most], dtype)
        places, host, source, whole = self._sets[key]
        views, end = [], 0
        for first, numbers in zip(places, columns, strict=False):
            end = first + len(numbers)
            host[first:end] = numbers
            views.append(whole[first:end])
        if whole is not source:
            whole[:end].copy_(source[:end])
        return views

    def _open(self, rows: int, most: Sequence[int], dtype: type[np.integer]) -> Columns:
        """Each begins at a multiple of 16 bytes, which GPU kernels are compiled for."""
        places = list(accumulate(((rows * each + 4) & ~3 for each in most), initial=0))
        host = np.zeros(places[-1], dtype)  # pages are taken when they are written
        source = torch.from_numpy(host)
        return places, host, source, source.to(self._device)
