"""Triton kernels for steps of rows between products: what a gate opens, what states keep, heads normalised and gated.

Each is one launch where PyTorch takes four to seven. Rounding follows `row_steps.RowSteps`. Shapes: T tokens, A heads,
D numbers of each, V value heads, E decays of a token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.packed import SWIGLU, Gating
from afserve.kernels.row_steps import Normed, RowSteps
from afserve.kernels.triton import norm as triton_norm
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned, power_of_two

_COLUMNS = 1024
_ROWS = 2048  # numbers of a program that normalises


@triton.jit
def _softplus(x):
    """Of a number as large as that itself, as `pointwise.softplus`; log(1 + y) keeps its digits where y is small."""
    y = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + y
    # Goldberg's log1p: what 1 + y loses of y is put back
    log = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log)


@launched
def _open_rows(
    x_ptr, gate_ptr, out_ptr, width, each, gate_stride, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    kind = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + column // each, mask=inside, other=0.0).to(tl.float32)
    opened = _softplus(gate) if SOFTPLUS else 1.0 / (1.0 + tl.exp(-gate))
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (x * opened.to(kind).to(tl.float32)).to(kind), mask=inside)


@launched
def _forget_rows(
    forget_ptr, replace_ptr, step_ptr, rate_ptr, decay_ptr, beta_ptr, decays, heads, forget_stride, replace_stride,
    floor, COLUMNS: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < decays
    step = tl.load(forget_ptr + row * forget_stride + column, mask=inside, other=0.0).to(tl.float32)
    step += tl.load(step_ptr + column, mask=inside, other=0.0)
    rate = tl.load(rate_ptr + column, mask=inside, other=0.0)
    if FLOOR:
        decay = floor / (1.0 + tl.exp(-rate * step))
    else:
        step = _softplus(step)
        decay = rate * step
    tl.store(decay_ptr + row * decays + column, decay, mask=inside)
    inside = column < heads
    if replace_ptr is None:
        tl.store(beta_ptr + row * heads + column, step, mask=inside)
    else:
        beta = tl.load(replace_ptr + row * replace_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(beta_ptr + row * heads + column, 1.0 / (1.0 + tl.exp(-beta)), mask=inside)


@launched(do_not_specialize=["rows"])
def _gate_heads(
    read_ptr, gate_ptr, norm_ptr, out_ptr, rows, width, parts, gate_stride, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """With FIRST the gate comes before the norm, whose weights are of each number of a token."""
    kind = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    flat = row[:, None] * width + column[None, :]
    of_token = (row % parts * width)[:, None] + column[None, :]
    gate = tl.load(gate_ptr + (row // parts * gate_stride)[:, None] + of_token, mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    opened = (gate if SILU else 1.0) / (1.0 + tl.exp(-gate))
    x = tl.load(read_ptr + flat, mask=inside, other=0.0)
    if FIRST:
        x = x * opened
        weight = tl.load(norm_ptr + of_token, mask=inside, other=0.0).to(tl.float32)
    else:
        x = x.to(kind).to(tl.float32)
        weight = tl.load(norm_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(x * x, axis=1) / width
    x = (x * tl.rsqrt(mean + eps)[:, None]).to(kind).to(tl.float32)
    x = (x * weight).to(kind)
    if not FIRST:
        x = (x.to(tl.float32) * opened).to(kind)
    tl.store(out_ptr + flat, x, mask=inside)


class TritonRowSteps(RowSteps):
    def join_rows(self, gating: Gating, both_TJ: Tensor) -> Tensor:
        plain = gating == SWIGLU and both_TJ.dim() == 2 and both_TJ.stride(1) == 1
        return triton_norm.silu_mul(both_TJ) if plain else super().join_rows(gating, both_TJ)

    def open_rows(self, x_TAD: Tensor, gate: Tensor, *, softplus: bool = False) -> Tensor:
        if not x_TAD.is_contiguous() or gate.dim() != 2 or gate.stride(1) != 1:
            return super().open_rows(x_TAD, gate, softplus=softplus)
        out_TAD = torch.empty_like(x_TAD)
        if x_TAD.numel():
            _opening(x_TAD.shape, gate.shape[1], gate.stride(0), softplus)(x_TAD, gate, out_TAD)
        return out_TAD

    def forget_rows(
        self,
        forget_TE: Tensor,
        replace_TV: Tensor | None,
        step_E: Tensor,
        rate_E: Tensor,
        floor: float | None,
    ) -> tuple[Tensor, Tensor]:
        tokens, decays = forget_TE.shape
        heads = decays if replace_TV is None else replace_TV.shape[1]
        made = step_E.new_empty(tokens, decays), step_E.new_empty(tokens, heads)
        if tokens:
            apart = 0 if replace_TV is None else replace_TV.stride(0)
            strides = forget_TE.stride(0), apart
            _forgetting(tokens, decays, heads, strides, floor)(forget_TE, replace_TV, step_E, rate_E, *made)
        return made

    def gate_heads(
        self, normed: Normed, read_TVD: Tensor, norm_D: Tensor, eps: float, gate_TX: Tensor, *, silu: bool
    ) -> Tensor:
        return _gated(read_TVD, norm_D, eps, gate_TX, read_TVD.shape[1], first=False, silu=silu)

    def norm_gated(
        self, normed: Normed, read_TVD: Tensor, norm_X: Tensor, eps: float, gate_TX: Tensor, groups: int
    ) -> Tensor:
        return _gated(read_TVD, norm_X, eps, gate_TX, groups, first=True, silu=True)


def _gated(
    read_TVD: Tensor, norm: Tensor, eps: float, gate_TX: Tensor, parts: int, *, first: bool, silu: bool
) -> Tensor:
    tokens, numbers = gate_TX.shape
    out_TX = gate_TX.new_empty(tokens, numbers)
    if tokens:
        sizes = tokens * parts, numbers // parts, parts
        _gating(sizes, gate_TX.stride(0), eps, first, silu)(read_TVD, gate_TX, norm, out_TX)
    return out_TX


@planned
def _opening(shape: tuple[int, int, int], gates: int, stride: int, softplus: bool) -> PreparedLaunch:
    tokens, heads, size = shape
    width = heads * size
    columns = min(_COLUMNS, power_of_two(width))
    return PreparedLaunch(
        _open_rows, (tokens, cdiv(width, columns)), (width, width // gates, stride),
        COLUMNS=columns, SOFTPLUS=softplus, **FUSED,
    )  # fmt: skip


@planned
def _forgetting(
    tokens: int, decays: int, heads: int, strides: tuple[int, int], floor: float | None
) -> PreparedLaunch:
    columns = min(_COLUMNS, power_of_two(decays))
    return PreparedLaunch(
        _forget_rows, (tokens, cdiv(decays, columns)), (decays, heads, *strides, floor or 0.0),
        COLUMNS=columns, FLOOR=floor is not None, **FUSED,
    )  # fmt: skip


@planned
def _gating(sizes: tuple[int, int, int], stride: int, eps: float, first: bool, silu: bool) -> PreparedLaunch:
    rows, width, parts = sizes
    columns = power_of_two(width)
    block = max(1, _ROWS // columns)
    return PreparedLaunch(
        _gate_heads, (cdiv(rows, block),), (rows, width, parts, stride, eps), ROWS=block, COLUMNS=columns,
        FIRST=first, SILU=silu, num_warps=8 if columns > 4096 else 4, **FUSED,
    )  # fmt: skip
