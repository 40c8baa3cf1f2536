"""Dense products on a CUDA device: PyTorch's (cuBLAS), and a Triton kernel's of maps whose weights stay in FP8 e4m3: a
scale per 128x128 block of weights, one per row and 128 columns of what is multiplied with them.

A step is one block: its product in float32 is multiplied by both scales and added. It knows no layer and no checkpoint.
Shapes: T rows, O outputs, I inputs; else as in `reference.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

import triton.language as tl
from afserve.kernels.formats.scaled import GROUP, BlockScaled
from afserve.kernels.packed import PackedLinear
from afserve.kernels.reference import Reference
from afserve.kernels.triton import norm as triton_norm
from afserve.kernels.triton.config import FUSED, Tile
from afserve.kernels.triton.experts import tile_of
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned
from afserve.kernels.triton.quant import quantise_groups
from afserve.kernels.triton.tiles import ALL, TileTable

FEW, SOME = 16, 128  # rows up to which tiles are the same: what warms a node up launches each class of them
NARROWEST = 32  # columns of a program


@launched(do_not_specialize=["rows", "x_scale_step"])
def _multiply_blocks(
    x_ptr, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, rows, x_scale_step, outputs, inputs, groups,
    EVEN: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS), BAND)
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    used = row < rows
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.where(column < outputs, column, 0).to(tl.int64)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * inputs + k[None, :]
    w_at = w_ptr + safe[None, :] * inputs + k[:, None]
    w_scale_at = w_scale_ptr + (column_tile * COLUMNS // DEPTH) * groups
    y = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(tl.cdiv(inputs, DEPTH)):
        if EVEN:
            x = tl.load(x_at, mask=used[:, None], other=0.0)
            w = tl.load(w_at)
        else:
            left = inputs - step * DEPTH
            x = tl.load(x_at, mask=used[:, None] & (k[None, :] < left), other=0.0)
            w = tl.load(w_at, mask=k[:, None] < left, other=0.0)
        x_scale = tl.load(x_scale_ptr + step * x_scale_step + row, mask=used, other=0.0)[:, None]
        y += tl.dot(x, w) * (x_scale * tl.load(w_scale_at + step))
        x_at += DEPTH
        w_at += DEPTH
    if BIAS:
        y += tl.load(bias_ptr + safe)[None, :].to(tl.float32)
    y_at = y_ptr + row[:, None] * outputs + column[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=used[:, None] & (column < outputs)[None, :])


def linear_fp8(x_TI: Tensor, weight: BlockScaled, bias_O: Tensor | None, tile: Tile) -> Tensor:
    """(T, O) of x_TI's dtype: rows rounded to e4m3 per 128 columns, times the blocks, plus the bias; rounded once."""
    assert tile.depth == GROUP and GROUP % tile.columns == 0, f"tile {tile} crosses scale blocks"
    rows, outputs = len(x_TI), len(weight.q_OI)
    y_TO = x_TI.new_empty(rows, outputs)
    if not rows:
        return y_TO
    q_TI, scale_TG = quantise_groups(x_TI)
    _multiplying(rows, weight.shape, bias_O is not None, tile)(
        q_TI, weight.q_OI, y_TO, scale_TG, weight.scale, bias_O
    )
    return y_TO


@planned
def _multiplying(rows: int, shape: tuple[int, int], bias: bool, tile: Tile) -> PreparedLaunch:
    outputs, inputs = shape
    return PreparedLaunch(
        _multiply_blocks, (cdiv(rows, tile.rows) * cdiv(outputs, tile.columns),),
        (rows, rows, outputs, inputs, cdiv(inputs, GROUP)),
        EVEN=inputs % GROUP == 0, BIAS=bias, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=GROUP, BAND=tile.band,
        num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip


def tile_of_map(tiles: TileTable, multiprocessors: int, rows: int, outputs: int) -> Tile:
    """That of the second product of experts in FP8, whose step is one block, for few rows, some or many. But for many
    it has the most columns that give three of four multiprocessors a program, or the fewest."""
    tile = tiles.expert_tiles("fp8", FEW if rows <= FEW else SOME if rows <= SOME else ALL).down
    columns = tile.columns
    while rows <= SOME and columns > NARROWEST and 4 * cdiv(outputs, columns) < 3 * multiprocessors:
        columns //= 2
    return replace(tile, columns=columns)


class DenseBackend(Reference):
    fp8_maps = True

    def __init__(self, device: torch.device, multiprocessors: int, tiles: TileTable, has_fp8: bool) -> None:
        super().__init__(device)
        self._multiprocessors, self.tiles, self._has_fp8 = multiprocessors, tiles, has_fp8
        self._expert_tiles = planned(tiles.expert_tiles)
        self._map_tile = planned(partial(tile_of_map, tiles, multiprocessors))

    def holds_fp8(self, dtype: torch.dtype) -> bool:
        return self._has_fp8 and dtype.itemsize == 2

    def pack_linear_fp8(self, weight: BlockScaled, bias_O: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        if not self.holds_fp8(dtype):
            return super().pack_linear_fp8(weight, bias_O, dtype)
        kept = BlockScaled(*(x.to(self.device).contiguous() for x in (weight.q_OI, weight.scale)))
        return PackedLinear(*weight.shape, None, bias_O, kept, dtype)

    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        if packed.handle is None:
            return super().linear(x_TI, packed)
        blocks = cast(BlockScaled, packed.handle)
        tile = self._map_tile(len(x_TI), packed.outputs)
        return linear_fp8(x_TI, blocks, packed.bias_O, tile)

    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        return self.linear(triton_norm.silu_mul(self.linear(x_TH, gate_up)), down)
