"""Triton RMSNorm, alone or after adding the residual, sums added to rows, parts of several devices, and SwiGLU's
elementwise half.

Rounding follows the reference: the sum is rounded to its dtype before the norm reads it, the normalised value before
the weight multiplies it. Shapes: T tokens (or tokens x heads), H hidden (or head size), J = 2 I.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence

import torch
from torch import Tensor

import triton.language as tl
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned, power_of_two

MOST_PARTS = 8


@launched(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr, y_ptr, weight_ptr, out_ptr, rows, hidden, inner_rows, outer_stride, inner_stride, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < hidden)
    start = row // inner_rows * outer_stride + row % inner_rows * inner_stride
    flat = row[:, None] * hidden + column[None, :]
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if y_ptr is not None:
        x += tl.load(y_ptr + flat, mask=inside, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(x_ptr + start[:, None] + column[None, :], x.to(x_ptr.dtype.element_ty), mask=inside)
    mean = tl.sum(x * x, axis=1) / hidden
    x = (x * tl.rsqrt(mean + eps)[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out_ptr + flat, (x * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


@launched(do_not_specialize=["layer"])
def _add_sums(x_ptr, y_ptr, bad_ptr, hidden, x_stride, layer, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lost = 0
    for start in range(0, hidden, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < hidden
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(y_ptr + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        kept = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + column, kept, mask=inside)
        if bad_ptr is not None:
            lost += tl.sum((tl.abs(kept.to(tl.float32)) < float("inf")).to(tl.int32) - 1, axis=0)
    if bad_ptr is not None:
        before = tl.load(bad_ptr + row)
        tl.store(bad_ptr + row, tl.where((lost < 0) & (before < 0), layer, before))


@launched
def _add_parts(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr, out_ptr, hidden, COLUMNS: tl.constexpr
):  # fmt: skip
    """Each part lies in the memory of the device that made it; there are two at least."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + column
    total = tl.load(a_ptr + at, mask=inside) + tl.load(b_ptr + at, mask=inside)
    if c_ptr is not None:
        total += tl.load(c_ptr + at, mask=inside)
    if d_ptr is not None:
        total += tl.load(d_ptr + at, mask=inside)
    if e_ptr is not None:
        total += tl.load(e_ptr + at, mask=inside)
    if f_ptr is not None:
        total += tl.load(f_ptr + at, mask=inside)
    if g_ptr is not None:
        total += tl.load(g_ptr + at, mask=inside)
    if h_ptr is not None:
        total += tl.load(h_ptr + at, mask=inside)
    tl.store(out_ptr + at, total, mask=inside)


@launched
def _silu_mul(x_ptr, out_ptr, inner, x_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    h = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * inner + column, h.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; x may be a view of (T, heads, size)."""
    if x_TH.dim() not in (2, 3):
        return rms_norm(x_TH.reshape(-1, x_TH.shape[-1]), weight_H, eps).view(x_TH.shape)
    if x_TH.stride(-1) != 1:
        x_TH = x_TH.contiguous()
    return _launch(x_TH, None, weight_H, eps)


def add_rms_norm(x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x_TH += y_TH in place, and the norm of the new x_TH, in one pass."""
    assert x_TH.dim() == 2 and x_TH.stride(1) == 1, "x_TH is changed in place: its rows must be contiguous"
    return _launch(x_TH, y_TH.contiguous(), weight_H, eps)


def add_sums(x_TH: Tensor, y_TH: Tensor, bad_T: Tensor | None, layer: int) -> None:
    """x_TH += y_TH in place, rounded once; rows that are not finite then get `layer` where bad_T is below 0."""
    assert x_TH.stride(1) == 1, "x_TH is changed in place: its rows must be contiguous"
    if x_TH.shape[0]:
        _adding(x_TH.shape, x_TH.stride(0))(x_TH, y_TH.contiguous(), bad_T, free=layer)


@planned
def _adding(shape: tuple[int, int], stride: int) -> PreparedLaunch:
    rows, hidden = shape
    columns = min(1024, power_of_two(hidden))
    return PreparedLaunch(_add_sums, (rows,), (hidden, stride, 0), 2, COLUMNS=columns, **FUSED)


def add_parts(parts: Sequence[Tensor]) -> Tensor:
    """Up to `MOST_PARTS` float32 (T, H), added in their order, on the first one's device, which reads the others'."""
    first, absent = parts[0], (None,) * (MOST_PARTS - len(parts))
    assert 2 <= len(parts) <= MOST_PARTS, f"{len(parts)} parts"
    out_TH = torch.empty_like(first)
    if first.numel():
        _adding_parts(*first.shape)(*(part.contiguous() for part in parts), *absent, out_TH)
    return out_TH


@planned
def _adding_parts(rows: int, hidden: int) -> PreparedLaunch:
    columns = min(1024, power_of_two(hidden))
    return PreparedLaunch(_add_parts, (rows, cdiv(hidden, columns)), (hidden,), COLUMNS=columns)


def silu_mul(gate_up_TJ: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate, then up."""
    tokens, both = gate_up_TJ.shape
    assert gate_up_TJ.stride(1) == 1, "gate_up_TJ rows must be contiguous"
    out_TI = gate_up_TJ.new_empty(tokens, both // 2)
    if tokens:
        _joining(tokens, both // 2, gate_up_TJ.stride(0))(gate_up_TJ, out_TI)
    return out_TI


@planned
def _joining(tokens: int, inner: int, stride: int) -> PreparedLaunch:
    columns = min(1024, power_of_two(inner))
    return PreparedLaunch(
        _silu_mul, (tokens, cdiv(inner, columns)), (inner, stride), COLUMNS=columns, **FUSED
    )


def _launch(x: Tensor, y: Tensor | None, weight_H: Tensor, eps: float) -> Tensor:
    shape = x.shape
    if x.dtype is weight_H.dtype:
        out = x.new_empty(*shape)
    else:
        out = x.new_empty(*shape, dtype=torch.promote_types(x.dtype, weight_H.dtype))
    if shape[0] and shape[1]:
        _norming(shape, x.stride(), eps, y is None)(x, y, weight_H, out)
    return out


@planned
def _norming(shape: tuple[int, ...], stride: tuple[int, ...], eps: float, alone: bool) -> PreparedLaunch:
    """One with a residual, and one `alone`: a launch keeps one kind of tensors."""
    rows, *inside, hidden = shape
    inner_rows, inner_stride = (inside[0], stride[1]) if inside else (1, 0)
    rows *= inner_rows
    columns = power_of_two(hidden)
    block = max(1, 2048 // columns)
    return PreparedLaunch(
        _rms_norm, (cdiv(rows, block),), (rows, hidden, inner_rows, stride[0], inner_stride, eps),
        ROWS=block, COLUMNS=columns, num_warps=8 if columns > 4096 else 4, **FUSED,
    )  # fmt: skip
