"""Triton grouping of rows by expert slot, and the float32 sum that undoes it.

The plan is made on the device from the slot ids alone: no host sync, buffer sizes are upper bounds, so a CUDA graph
replays it with other routing. The rows themselves are not moved: the first expert product gathers them through
`pair_P`. Order within a slot is the order of the pairs, so results repeat exactly (no atomics).
Shapes: R rows, K choices per row, E slots, P padded places, M row tiles, H hidden.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.triton.config import FUSED

CHUNK = 128  # pairs one program ranks


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Places of (row, choice) pairs grouped by slot, each slot's group padded to whole tiles of `tile_rows`.

    pair_P       int32, row * K + choice at each place, -1 in padding
    tile_slot_M  int32, the slot of each tile of places, -1 for unused tiles (always the last ones)
    place_RK     int32, where each pair went, -1 for slots below 0
    """

    pair_P: Tensor
    tile_slot_M: Tensor
    place_RK: Tensor
    tile_rows: int

    @property
    def tiles(self) -> int:
        return self.tile_slot_M.shape[0]


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _count_chunk(slot_ptr, count_EC_ptr, pairs, slots, chunks, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(slot_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    e = tl.arange(0, SLOTS)
    count_E = tl.sum((slot[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(count_EC_ptr + e * chunks + chunk, count_E, mask=e < slots)


@triton.jit(do_not_specialize=["chunks"])
def _scan_slot(count_EC_ptr, total_E_ptr, chunks, CHUNKS: tl.constexpr):
    """Turn one slot's counts into the number of its pairs in earlier chunks, in place."""
    slot = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    at = count_EC_ptr + slot * chunks + c
    count_C = tl.load(at, mask=c < chunks, other=0)
    tl.store(at, tl.cumsum(count_C, axis=0) - count_C, mask=c < chunks)
    tl.store(total_E_ptr + slot, tl.sum(count_C, axis=0))


@triton.jit(do_not_specialize=["pairs", "chunks", "tiles"])
def _place_chunk(
    slot_ptr, before_EC_ptr, total_E_ptr, pair_P_ptr, tile_slot_M_ptr, place_ptr, pairs, slots, chunks, tiles,
    TILE_ROWS: tl.constexpr, ONE_CHUNK: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    e = tl.arange(0, SLOTS)
    pair = chunk * CHUNK + i
    slot = tl.load(slot_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    slot = tl.where(slot < slots, slot, -1)
    mine = slot[:, None] == e[None, :]
    if ONE_CHUNK:
        total_E = tl.sum(mine.to(tl.int32), axis=0)
    else:
        total_E = tl.load(total_E_ptr + e, mask=e < slots, other=0)
    padded_E = tl.cdiv(total_E, TILE_ROWS) * TILE_ROWS
    end_E = tl.cumsum(padded_E, axis=0)
    earlier = (slot[:, None] == slot[None, :]) & (i[None, :] < i[:, None])
    place = tl.sum(tl.where(mine, (end_E - padded_E)[None, :], 0), axis=1) + tl.sum(
        earlier.to(tl.int32), axis=1
    )
    used = slot >= 0
    if not ONE_CHUNK:
        place += tl.load(before_EC_ptr + slot * chunks + chunk, mask=used, other=0)
    tl.store(place_ptr + pair, tl.where(used, place, -1), mask=pair < pairs)
    tl.store(pair_P_ptr + place, pair, mask=used)
    ended = tl.sum(
        (end_E[None, :] <= (pair * TILE_ROWS)[:, None]).to(tl.int32), axis=1
    )  # `pair` counts tiles here
    tl.store(tile_slot_M_ptr + pair, tl.where(ended < slots, ended, -1), mask=pair < tiles)


@triton.jit
def _combine_rows(
    part_PH_ptr, place_ptr, out_ptr, hidden, out_stride,
    ADD: tl.constexpr, CHOICES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    if ADD:
        total += tl.load(out_ptr + row * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(CHOICES):
        place = tl.load(place_ptr + row * CHOICES + k).to(tl.int64)
        known = tl.where(place >= 0, hidden, 0)  # a skipped place has no columns
        part = tl.load(part_PH_ptr + place * hidden + column, mask=column < known, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def most_tiles(pairs: int, slots: int, tile_rows: int) -> int:
    """No routing of this many pairs needs more tiles: a slot wastes less than one."""
    return pairs // tile_rows + min(pairs, slots)


def plan_rows(slot_RK: Tensor, slots: int, tile_rows: int) -> RowPlan:
    """Group the pairs of slot_RK (any integer dtype, contiguous) by slot. Ids outside 0..slots-1 are skipped."""
    pairs, device = slot_RK.numel(), slot_RK.device
    chunks = triton.cdiv(pairs, CHUNK)
    tiles = most_tiles(pairs, slots, tile_rows)
    pair_P = torch.full((tiles * tile_rows,), -1, dtype=torch.int32, device=device)
    tile_slot_M = torch.empty(tiles, dtype=torch.int32, device=device)
    place_RK = torch.empty(slot_RK.shape, dtype=torch.int32, device=device)
    width = triton.next_power_of_2(slots)
    count_EC = torch.empty((slots, chunks), dtype=torch.int32, device=device)
    total_E = torch.empty(slots, dtype=torch.int32, device=device)
    alone = chunks == 1 and tiles <= CHUNK  # one program sees every pair and writes every tile
    if pairs and not alone:
        _count_chunk[(chunks,)](
            slot_RK, count_EC, pairs, slots, chunks, SLOTS=width, CHUNK=CHUNK, num_warps=8, **FUSED,
        )  # fmt: skip
        _scan_slot[(slots,)](
            count_EC, total_E, chunks, CHUNKS=max(16, triton.next_power_of_2(chunks)), **FUSED
        )
    if pairs:
        grid = (max(chunks, triton.cdiv(tiles, CHUNK)),)
        _place_chunk[grid](
            slot_RK, count_EC, total_E, pair_P, tile_slot_M, place_RK, pairs, slots, chunks, tiles,
            TILE_ROWS=tile_rows, ONE_CHUNK=alone, SLOTS=width, CHUNK=CHUNK, num_warps=8, **FUSED,
        )  # fmt: skip
    return RowPlan(pair_P, tile_slot_M, place_RK, tile_rows)


def combine_rows(
    part_PH: Tensor, place_RK: Tensor, out_RH: Tensor, add: bool = False, columns: int = 1024
) -> None:
    """out_RH = sum over k of part_PH[place_RK], in float32, in the order of k; places below 0 add nothing.

    add: the sum starts from out_RH instead of zero.
    """
    rows, choices = place_RK.shape
    hidden = out_RH.shape[1]
    assert out_RH.stride(1) == 1, "rows of out_RH must be contiguous"
    columns = min(columns, triton.next_power_of_2(hidden))
    if rows:
        _combine_rows[(rows, triton.cdiv(hidden, columns))](
            part_PH, place_RK, out_RH, hidden, out_RH.stride(0),
            ADD=add, CHOICES=choices, COLUMNS=columns, **FUSED,
        )  # fmt: skip
