"""How many rows an expert node has computed per MoE layer and slot, counted as they are computed.

Shapes: R rows, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.comm.native import native_library


class SlotRows:
    def __init__(self, layers: int, slots: int) -> None:
        self._slots = slots
        self._total_LS = torch.zeros(layers, slots, dtype=torch.int64)
        self._native = native_library()
        self._address = [row_S.data_ptr() for row_S in self._total_LS]

    def note(self, layer: int, slots: Sequence[Tensor]) -> None:
        """Slot ids (int32) of one call; -1 is not counted."""
        for slot_RK in slots:
            if self._native is not None and slot_RK.is_cpu and slot_RK.is_contiguous():
                address, count = self._address[layer], slot_RK.numel()
                self._native.count_slots(slot_RK.data_ptr(), count, address, self._slots)
            else:
                counts = torch.bincount(slot_RK.flatten() + 1, minlength=self._slots + 1)
                self._total_LS[layer] += counts[1:].cpu()

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """May be called from another thread; a count is then of one call or the next."""
        return tuple(tuple(row) for row in self._total_LS.tolist())
