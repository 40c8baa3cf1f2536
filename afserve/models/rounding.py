"""How far weights are from what a few bits hold of them, measured while they are loaded.

Every 16th output of each weight is looked at, so that loading is not much slower. It keeps two sums, which several
threads may add to; in which order they do changes the last digits at most.
"""

import threading

import torch
from torch import Tensor

from afserve.kernels.grouped import int4_rounded, int8_rounded

EVERY = 16


class RoundingError:
    """Root mean square of the differences, as a part of that of the weights."""

    def __init__(self, group: int | None) -> None:
        """group: that of int4; None for int8 with a scale per output."""
        self._group = group
        self._lost = self._whole = 0.0
        self._adding = threading.Lock()

    def look_at(self, weight_OI: Tensor) -> None:
        some = weight_OI[::EVERY].float()
        kept = int8_rounded(some) if self._group is None else int4_rounded(some, self._group)
        lost = float(torch.sum((kept - some) ** 2, dtype=torch.float64))
        whole = float(torch.sum(some**2, dtype=torch.float64))
        with self._adding:
            self._lost += lost
            self._whole += whole

    @property
    def relative(self) -> float | None:
        """None before the first weight."""
        return (self._lost / self._whole) ** 0.5 if self._whole else None
