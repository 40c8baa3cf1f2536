"""Rows that are fetched from memory of the host by the GPU itself: a program for each reads it there.

Shapes as in `NearRows`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton.language as tl
from afserve.kernels.indexer import NearRows
from afserve.kernels.triton.launch import launched, power_of_two


@launched
def _fetch_rows(far_ptr, near_ptr, brings_ptr, slot_ptr, place_ptr, words, WIDE: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    if tl.load(brings_ptr + m) != 0:
        w = tl.arange(0, WIDE)
        from_ptr = far_ptr + tl.load(slot_ptr + m) * words
        row = tl.load(from_ptr + w, mask=w < words, other=0)
        tl.store(near_ptr + tl.load(place_ptr + m) * words + w, row, mask=w < words)


class FetchedRows(NearRows):
    reads_host = True

    def copy_rows(self, brings_M: Tensor, slot_M: Tensor, place_M: Tensor) -> None:
        word = torch.int32 if self.row_RC.shape[1] * self.row_RC.itemsize % 4 == 0 else torch.uint8
        far_SW, near_RW = self.far_SC.view(word), self.row_RC.view(word)
        words = near_RW.shape[1]
        rows = brings_M.view(torch.uint8), slot_M, place_M
        _fetch_rows[(len(slot_M),)](far_SW, near_RW, *rows, words, WIDE=power_of_two(words), num_warps=4)
