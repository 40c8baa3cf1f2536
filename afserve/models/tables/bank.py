"""An expert bank that also holds slices of a look-up table: experts without arithmetic.

A slice is so many rows of the table; there are as many slices as experts. Slice s is in the slots that expert s of the
first MoE layer is in, so placements, replicas, epochs and lost nodes are those of that layer, and to fill a slot with a
slice reads nothing. A look-up is a dispatch of the layer behind all MoE layers: a choice's slot says the slice, and its
weight, an exact whole number in float32, which row of the slice. The sum of a row has the table's numbers of head n at
columns n D to (n + 1) D; what is in slices of other nodes is 0 there, and theirs is added.

Shapes: R rows, K choices, H numbers of a row, D numbers of a table's row.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from afserve.comm.m2n.bank import Bank
from afserve.errors import CheckpointError
from afserve.kernels.packed import PackedExperts
from afserve.models.experts import Held, Progress
from afserve.models.tables.rows import TableRows
from afserve.placement.expert_memory import ExpertMemoryStats

log = logging.getLogger("afserve.models")


class FilledBank(Protocol):
    """A bank whose slots are filled one by one."""

    slots: int
    expert_bytes: int

    @property
    def rounding_error(self) -> float | None: ...

    @property
    def packed(self) -> Sequence[PackedExperts] | None: ...

    def load(self, held: Held, progress: Progress) -> None: ...

    def fill(self, layer: int, slot: int, expert: int) -> None: ...

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None: ...

    def stats(self) -> ExpertMemoryStats: ...

    def close(self) -> None: ...


class TabledBank(Bank):
    """`layer` is the number that look-ups have, `slices` how many there are of the whole table."""

    def __init__(self, bank: FilledBank, rows: TableRows, layer: int, slices: int) -> None:
        self.inner, self._rows, self._layer = bank, rows, layer
        self._slices, self._size = slices, rows.table.slice_rows(slices)
        self._slice_S = torch.full((bank.slots,), -1, dtype=torch.int64)
        self._starts_N = torch.tensor(rows.table.starts)
        self.slots, self.expert_bytes = bank.slots, bank.expert_bytes

    @property
    def rounding_error(self) -> float | None:
        return self.inner.rounding_error

    @property
    def packed(self) -> Sequence[PackedExperts] | None:
        """Of the MoE layers."""
        return self.inner.packed

    def load(self, held: Held, progress: Progress) -> None:
        """As `ExpertBank.load`."""
        self.inner.load(held, progress)
        for layer, slot, expert in held:
            self._note(layer, slot, expert)

    def fill(self, layer: int, slot: int, expert: int) -> None:
        """As `ExpertBank.fill`."""
        self.inner.fill(layer, slot, expert)
        self._note(layer, slot, expert)

    def _note(self, layer: int, slot: int, expert: int) -> None:
        if layer == 0:
            self._slice_S[slot] = expert

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """As `ExpertBank.forward`. A row that names what is not in its slice, or what cannot be read, gets NaN, which
        ends its request and nobody else's."""
        if layer != self._layer:
            self.inner.forward(layer, x_RH, slot_RK, weight_RK, out_RH, add)
            return
        found_RH, wrong_R = self._looked_up(slot_RK.cpu(), weight_RK.cpu(), out_RH.shape[1])
        found_RH.masked_fill_(wrong_R[:, None], torch.nan)
        found_RH = found_RH.to(out_RH.device)
        out_RH.copy_(out_RH + found_RH if add else found_RH)

    def _looked_up(self, slot_RK: Tensor, weight_RK: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Float32 rows, and which of them are not to be used. Every number is checked before anything is read."""
        width, made_RH = self._rows.table.width, torch.zeros((len(slot_RK), columns))
        slice_RK, inside_RK = self._slice_S[slot_RK.clamp(min=0).long()], weight_RK.long()
        number_RK = slice_RK * self._size + inside_RK
        named_RK = slot_RK >= 0
        good_RK = (
            named_RK
            & (slice_RK >= 0)
            & (weight_RK >= 0)
            & (weight_RK < self._size)
            & (inside_RK == weight_RK)
            & (number_RK < self._rows.table.rows)
        )
        wrong_R = (named_RK & ~good_RK).any(1)
        row_I, choice_I = (good_RK & ~wrong_R[:, None]).nonzero(as_tuple=True)
        if not len(row_I):
            return made_RH, wrong_R
        number_I = number_RK[row_I, choice_I]
        head_I = torch.searchsorted(self._starts_N, number_I, right=True) - 1
        read_ID = self._read(number_I.tolist(), head_I.tolist())
        wrong_R[row_I[read_ID[:, 0].isnan()]] = True
        column_ID = head_I[:, None] * width + torch.arange(width)
        made_RH[row_I[:, None], column_ID] = read_ID
        return made_RH, wrong_R

    def _read(self, numbers: list[int], heads: list[int]) -> Tensor:
        """Float32, (I, D). Where one of them cannot be read, they are read one by one, and that one is NaN."""
        try:
            return self._rows.read(numbers, heads)
        except CheckpointError as error:
            log.warning("look-up table: %s", error.message)
        found_ID = torch.full((len(numbers), self._rows.table.width), torch.nan)
        for at, (number, head) in enumerate(zip(numbers, heads, strict=True)):
            with contextlib.suppress(CheckpointError):  # said above
                found_ID[at] = self._rows.read([number], [head])[0]
        return found_ID

    def stats(self) -> ExpertMemoryStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()
