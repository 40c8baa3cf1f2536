"""How many rows an expert node has computed per MoE layer and slot. Counting is put off until there is nothing to do.

Shapes: R rows, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MOST_PENDING = 256  # calls


class SlotRows:
    def __init__(self, layers: int, slots: int) -> None:
        self._slots = slots
        self._total_LS = torch.zeros(layers, slots, dtype=torch.int64)
        self._pending: list[tuple[int, Tensor]] = []
        self._totals: tuple[tuple[int, ...], ...] = tuple((0,) * slots for _ in range(layers))

    def note(self, layer: int, slots: Sequence[Tensor]) -> None:
        """Slot ids of one call; -1 is not counted. The tensors are kept until they are counted."""
        self._pending += [(layer, slot_RK) for slot_RK in slots]
        if len(self._pending) >= _MOST_PENDING:
            self.fold()

    def fold(self) -> None:
        """Count what is pending."""
        if not self._pending:
            return
        for layer, slot_RK in self._pending:
            counts = torch.bincount(slot_RK.flatten() + 1, minlength=self._slots + 1)
            self._total_LS[layer] += counts[1:]
        self._pending.clear()
        self._totals = tuple(tuple(row) for row in self._total_LS.tolist())

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """As of the last fold; safe to read from another thread."""
        return self._totals
