"""Triton quantisation to FP8 e4m3: one scale per token and group of columns, or per square block of a weight.

value = quantised * scale, as in DeepSeek-V3 (arXiv 2412.19437, 3.3): 1x128 groups for activations, 128x128 blocks
for weights; `formats/scaled.py` is the oracle. It knows nothing about who multiplies the results. Shapes: T tokens,
H columns, O x I weight, G groups = ceil(columns / group).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.formats import scaled
from afserve.kernels.formats.scaled import FP8, GROUP, LARGEST
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned

FP8_MAX = tl.constexpr(LARGEST)
TINY = tl.constexpr(scaled.TINY)


@triton.jit
def fp8_scale(largest):
    """The scale that maps `largest` onto the edge of the FP8 range."""
    return tl.div_rn(tl.maximum(largest, TINY), FP8_MAX)


@triton.jit
def to_fp8(scaled):
    """Clamped first: rounding of the scale must not push the largest value past the range. NaN stays NaN."""
    return tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@launched(do_not_specialize=["rows", "scale_row", "scale_column"])
def _quantise_tile(
    x_ptr, q_ptr, scale_ptr, rows, columns, x_stride, scale_row, scale_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    if PER_ROW:
        scale = fp8_scale(largest)
        tl.store(scale_ptr + row * scale_row + tl.program_id(1) * scale_column, scale, mask=row < rows)
        q = to_fp8(tl.div_rn(x, scale[:, None]))  # the exact division: as torch rounds, to the bit
    else:
        one = fp8_scale(tl.max(largest, axis=0))
        tl.store(scale_ptr + tl.program_id(0) * scale_row + tl.program_id(1) * scale_column, one)
        q = to_fp8(tl.div_rn(x, one))
    tl.store(q_ptr + row[:, None] * columns + column[None, :], q, mask=inside)


def quantise_groups(x_TH: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """(q_TH e4m3, scale_TG float32): one scale per token and `group` columns.

    scale_TG lies by group, so that a product's step reads the scales of its rows side by side.
    """
    tokens, columns = x_TH.shape
    scale_TG = x_TH.new_empty(-(-columns // group), tokens, dtype=torch.float32).t()
    return _launch(x_TH, scale_TG, 8, group, True), scale_TG


def quantise_blocks(weight_OI: Tensor, block: int = GROUP) -> tuple[Tensor, Tensor]:
    """(q_OI e4m3, scale float32 of ceil(O / block) x ceil(I / block)): one scale per square block."""
    outputs, inputs = weight_OI.shape
    scale = weight_OI.new_empty((-(-outputs // block), -(-inputs // block)), dtype=torch.float32)
    return _launch(weight_OI, scale, block, block, False), scale


def _launch(x_TH: Tensor, scale: Tensor, rows: int, columns: int, per_row: bool) -> Tensor:
    assert columns & (columns - 1) == 0, f"quantisation group {columns} is not a power of two"
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    q_TH = x_TH.new_empty(*x_TH.shape, dtype=FP8)
    if x_TH.numel():
        tile = rows, columns, per_row
        _quantising(x_TH.shape, x_TH.stride(0), scale.shape[1], scale.stride(), tile)(x_TH, q_TH, scale)
    return q_TH


@planned
def _quantising(
    shape: tuple[int, int], stride: int, groups: int, strides: tuple[int, int], tile: tuple[int, int, bool]
) -> PreparedLaunch:
    rows, columns, per_row = tile
    return PreparedLaunch(
        _quantise_tile, (cdiv(shape[0], rows), groups), (*shape, stride, *strides),
        ROWS=rows, COLUMNS=columns, PER_ROW=per_row, num_warps=8 if not per_row else 4, **FUSED,
    )  # fmt: skip
