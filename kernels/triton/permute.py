"""Triton grouping of rows by expert slot, and the float32 sum that undoes it.

The plan is made on the device from the slot ids alone: no host sync, buffer sizes are upper bounds, so a CUDA graph
replays it with other routing. The rows themselves are not moved: the first expert product gathers them through
`pair_P`. Order within a slot is the order of the pairs, so results repeat exactly (no atomics).
Shapes: R rows, K choices per row, E slots, P padded places, M row tiles, H hidden.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import torch
from torch import Tensor

import triton.language as tl
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned, power_of_two

CHUNK = 128  # pairs one program ranks
_COUNTED = 1024  # pairs that it counts at once


class RowPlan(NamedTuple):
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


@launched(do_not_specialize=["pairs", "tiles"])
def _place_chunk(
    slot_ptr, pair_P_ptr, tile_slot_M_ptr, place_ptr, pairs, slots, tiles,
    TILE_ROWS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Places of CHUNK pairs, and the slots of CHUNK tiles with what no pair fills of them. Every program counts all
    pairs by slot, which takes less time than a launch before it that does."""
    chunk = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    total_E = tl.zeros((SLOTS,), dtype=tl.int32)
    before_E = tl.zeros((SLOTS,), dtype=tl.int32)
    for start in range(0, pairs, COUNTED):
        counted = start + tl.arange(0, COUNTED)
        slot = tl.load(slot_ptr + counted, mask=counted < pairs, other=-1).to(tl.int32)
        used = (slot >= 0) & (slot < slots)
        total_E += tl.histogram(slot, SLOTS, mask=used)
        if start < chunk * CHUNK:
            before_E += tl.histogram(slot, SLOTS, mask=used & (counted < chunk * CHUNK))
    end_E = tl.cumsum(tl.cdiv(total_E, TILE_ROWS) * TILE_ROWS, axis=0)
    start_E = end_E - tl.cdiv(total_E, TILE_ROWS) * TILE_ROWS
    pair = chunk * CHUNK + i
    slot = tl.load(slot_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    used = (slot >= 0) & (slot < slots)
    earlier = (slot[:, None] == slot[None, :]) & (i[None, :] < i[:, None])
    place = tl.gather(start_E + before_E, tl.where(used, slot, 0), axis=0) + tl.sum(
        earlier.to(tl.int32), axis=1
    )
    tl.store(place_ptr + pair, tl.where(used, place, -1), mask=pair < pairs)
    tl.store(pair_P_ptr + place, pair, mask=used)
    first = pair * TILE_ROWS  # from here on `pair` counts tiles
    slot = tl.sum((end_E[None, :] <= first[:, None]).to(tl.int32), axis=1)
    tl.store(tile_slot_M_ptr + pair, tl.where(slot < slots, slot, -1), mask=pair < tiles)
    full = tl.gather(start_E + total_E, tl.minimum(slot, SLOTS - 1), axis=0)
    at = first[:, None] + tl.arange(0, TILE_ROWS)[None, :]
    empty = (pair < tiles)[:, None] & ((at >= full[:, None]) | (slot >= slots)[:, None])
    tl.store(pair_P_ptr + at, tl.full((CHUNK, TILE_ROWS), -1, dtype=tl.int32), mask=empty)


@launched
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
    tiles, place = _placing(pairs, slots, tile_rows)
    pair_P = torch.empty(tiles * tile_rows, dtype=torch.int32, device=device)
    tile_slot_M, place_RK = pair_P.new_empty(tiles), pair_P.new_empty(*slot_RK.shape)
    if pairs:
        place(slot_RK, pair_P, tile_slot_M, place_RK)
    return RowPlan(pair_P, tile_slot_M, place_RK, tile_rows)


@planned
def _placing(pairs: int, slots: int, tile_rows: int) -> tuple[int, PreparedLaunch]:
    tiles = most_tiles(pairs, slots, tile_rows)
    return tiles, PreparedLaunch(
        _place_chunk, (cdiv(max(pairs, tiles), CHUNK),), (pairs, slots, tiles), TILE_ROWS=tile_rows,
        SLOTS=power_of_two(slots), CHUNK=CHUNK, COUNTED=_COUNTED, num_warps=8, **FUSED,
    )  # fmt: skip


def combine_rows(
    part_PH: Tensor, place_RK: Tensor, out_RH: Tensor, add: bool = False, columns: int = 1024
) -> None:
    """out_RH = sum over k of part_PH[place_RK], in float32, in the order of k; places below 0 add nothing.

    add: the sum starts from out_RH instead of zero.
    """
    stride, step = out_RH.stride()
    assert step == 1, "rows of out_RH must be contiguous"
    shape = place_RK.shape
    if shape[0]:
        _combining(shape, out_RH.shape[1], stride, add, columns)(part_PH, place_RK, out_RH)


@planned
def _combining(shape: tuple[int, int], hidden: int, stride: int, add: bool, columns: int) -> PreparedLaunch:
    rows, choices = shape
    columns = min(columns, power_of_two(hidden))
    constants = {"ADD": add, "CHOICES": choices, "COLUMNS": columns, **FUSED}
    return PreparedLaunch(_combine_rows, (rows, cdiv(hidden, columns)), (hidden, stride), **constants)
