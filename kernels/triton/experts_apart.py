"""An FP8 expert's FFN whose two grouped products somebody else computes (`libraries/products.py`): rows are gathered
and quantised, gate and up joined, weighted and quantised, and parts summed here.

An activation is multiplied by its row's weight before it is quantised, so a part is rounded to bfloat16 once, as in
`experts.py`. Shapes as there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.formats.scaled import FP8, GROUP
from afserve.kernels.libraries.products import GroupedProducts
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.experts import ExpertWeights
from afserve.kernels.triton.joining import PLAIN, join
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned
from afserve.kernels.triton.permute import RowPlan, combine_rows, plan_rows
from afserve.kernels.triton.quant import fp8_scale, to_fp8

_ROWS = 16  # of a program


@triton.jit
def _power_above(scale):
    """The power of two that is not below a positive number."""
    bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@launched(do_not_specialize=["places"])
def _quantise_places(
    x_ptr, q_ptr, scale_ptr, pair_P_ptr, weight_ptr, places, columns, x_stride,
    CHOICES: tl.constexpr, JOINED: tl.constexpr, POWERS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    CLAMPED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Rows that places want, or, JOINED, rows of gate beside up at their places."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pair_P_ptr + place, mask=place < places, other=-1)
    used = pair >= 0
    if tl.max(pair, axis=0) < 0:
        return
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    row = (place if JOINED else pair // CHOICES).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + column[None, :]
    x = tl.load(x_at, mask=used[:, None], other=0.0).to(tl.float32)
    if JOINED:
        up = tl.load(x_at + columns, mask=used[:, None], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + pair, mask=used, other=0.0).to(tl.float32)
        x = join(x, up, CLAMPED, LIMIT, ALPHA) * weight[:, None]
    scale = fp8_scale(tl.max(tl.abs(x), axis=1))
    if POWERS:
        scale = _power_above(scale)
    q_at = q_ptr + place.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(q_at, to_fp8(tl.div_rn(x, scale[:, None])), mask=used[:, None])
    tl.store(scale_ptr + group.to(tl.int64) * places + place, scale, mask=used)


def quantise_places(
    x_RC: Tensor, plan: RowPlan, choices: int, weight_RK: Tensor | None, powers: bool
) -> tuple[Tensor, Tensor]:
    """(q_PK e4m3, scale_PG float32, which lies by group) of the rows that places want; with weights, of SwiGLU of rows
    that lie at their places, gate beside up, times these. Places of nobody are left unwritten."""
    places, columns = plan.pair_P.shape[0], x_RC.shape[1] // (1 if weight_RK is None else 2)
    q_PK = x_RC.new_empty((places, columns), dtype=FP8)
    scale_PG = x_RC.new_empty((columns // GROUP, places), dtype=torch.float32).t()
    launch = _quantising(places, columns, x_RC.stride(0), choices, weight_RK is not None, powers)
    launch(x_RC, q_PK, scale_PG, plan.pair_P, weight_RK)
    return q_PK, scale_PG


@planned
def _quantising(
    places: int, columns: int, stride: int, choices: int, joined: bool, powers: bool
) -> PreparedLaunch:
    constants = {
        "CHOICES": choices, "JOINED": joined, "POWERS": powers, "ROWS": _ROWS, "GROUP": GROUP, **PLAIN.constants(),
    }  # fmt: skip
    grid = cdiv(places, _ROWS), columns // GROUP
    return PreparedLaunch(_quantise_places, grid, (places, columns, stride), None, **constants, **FUSED)


def expert_ffn(
    x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, weights: ExpertWeights, products: GroupedProducts,
    out_RH: Tensor, add: bool,
) -> bool:  # fmt: skip
    """As `experts.expert_ffn`, of FP8 weights and at least one pair; out_RH is written last. True."""
    assert weights.gate_up_scale is not None and weights.down_scale is not None, "FP8 weights"
    plan, multiply = plan_rows(slot_RK, weights.sizes.slots, products.rows), products.multiply
    slot_P = plan.tile_slot_M[:, None].expand(-1, products.rows).flatten()
    q_PH, scale = quantise_places(x_RH, plan, slot_RK.shape[1], None, products.powers)
    both_PJ = multiply(q_PH, scale, weights.gate_up_EJH, weights.gate_up_scale, slot_P)
    q_PI, scale = quantise_places(both_PJ, plan, slot_RK.shape[1], weight_RK, products.powers)
    part_PH = multiply(q_PI, scale, weights.down_EHI, weights.down_scale, slot_P)
    combine_rows(part_PH, plan.place_RK, out_RH, add)
    return True
