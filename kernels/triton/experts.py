"""Triton grouped matrix products for the routed experts: gate and up, joined, in one kernel, then down.

16-bit (and float32) weights, or FP8 e4m3 with 128x128 weight scales, 1x128 activation scales and the activation
re-quantised in the epilogue. Grids are upper bounds; programs of unused tiles leave at once. It knows no routing
rule and no checkpoint. Shapes: R rows, K choices, E slots, H hidden, I inner, J = 2 I, P padded places (RowPlan).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.formats.scaled import GROUP
from afserve.kernels.libraries.products import GroupedProducts
from afserve.kernels.triton.config import FUSED, ExpertTiles, Tile
from afserve.kernels.triton.joining import PLAIN, Joint, join
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned
from afserve.kernels.triton.permute import RowPlan, combine_rows, plan_rows
from afserve.kernels.triton.quant import fp8_scale, quantise_groups, to_fp8


class _Sizes(NamedTuple):
    """What launches of a layer depend on; `joint` are constants of the kernel that joins gate and up."""

    slots: int
    hidden: int
    inner: int
    group: int
    scaled: bool
    precision: str
    joint: tuple[tuple[str, Any], ...]
    down_bias: bool

    def constants(self, tile: Tile) -> dict[str, Any]:
        return {
            "SCALED": self.scaled, "GROUP": self.group, "PRECISION": self.precision,
            "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "BAND": tile.band,
            "num_warps": tile.warps, "num_stages": tile.stages, **FUSED,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """gate_up_EJH (gate over up) and down_EHI. With e4m3 weights, one float32 scale per `group` x `group` block:
    gate_up_scale is (E, 2 ceil(I / group), ceil(H / group)), gate's blocks over up's, down_scale likewise. `products`:
    who multiplies them, if not this file."""

    gate_up_EJH: Tensor
    down_EHI: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    group: int = GROUP
    joint: Joint = PLAIN
    products: GroupedProducts | None = None
    kind: str = field(init=False)
    sizes: _Sizes = field(init=False)

    def __post_init__(self) -> None:
        held = (self.gate_up_EJH, self.down_EHI, self.gate_up_scale, self.down_scale)
        assert all(x is None or x.is_contiguous() for x in held), (
            "expert weights and scales must be contiguous"
        )
        kind = "fp32" if self.gate_up_EJH.dtype is torch.float32 else "16-bit"
        slots, hidden, inner = self.down_EHI.shape
        sizes = _Sizes(
            slots, hidden, inner, self.group, self.scaled, "ieee" if kind == "fp32" else "tf32",
            tuple(self.joint.constants().items()), self.joint.down_bias_EH is not None,
        )  # fmt: skip
        object.__setattr__(self, "kind", "fp8" if self.scaled else kind)
        object.__setattr__(self, "sizes", sizes)

    @property
    def scaled(self) -> bool:
        return self.gate_up_scale is not None


@triton.jit
def tile_of(program, row_tiles, column_tiles, BAND: tl.constexpr):
    """Visit BAND row tiles column by column before the next band, so that their weights and rows stay in L2."""
    band_programs = BAND * column_tiles
    first = (program // band_programs) * BAND
    height = tl.minimum(row_tiles - first, BAND)
    within = program % band_programs
    return first + within % height, within // height


@launched(do_not_specialize=["row_tiles", "x_scale_step"])
def _gate_up(
    x_ptr, w_ptr, h_PI_ptr, pair_P_ptr, tile_slot_ptr, x_scale_ptr, w_scale_ptr, h_scale_ptr, bias_ptr,
    row_tiles, hidden, inner, x_stride, x_scale_step, h_scale_step, groups_h, groups_i,
    CHOICES: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
    CLAMPED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    tile, column_tile = tile_of(tl.program_id(0), row_tiles, tl.cdiv(inner, COLUMNS), BAND)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    place = tile * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pair_P_ptr + place)
    used = pair >= 0
    row = (pair // CHOICES).to(tl.int64)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.where(column < inner, column, 0)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    gate_at = w_ptr + slot * 2 * inner * hidden + safe[None, :] * hidden + k[:, None]
    up_at = gate_at + inner * hidden
    if SCALED:
        gate_scale_at = w_scale_ptr + (slot * 2 * groups_i + column_tile * COLUMNS // GROUP) * groups_h
        up_scale_at = gate_scale_at + groups_i * groups_h
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(tl.cdiv(hidden, DEPTH)):
        if EVEN:
            x = tl.load(x_at, mask=used[:, None], other=0.0)
            w_gate = tl.load(gate_at)
            w_up = tl.load(up_at)
        else:
            left = hidden - step * DEPTH
            x = tl.load(x_at, mask=used[:, None] & (k[None, :] < left), other=0.0)
            w_gate = tl.load(gate_at, mask=k[:, None] < left, other=0.0)
            w_up = tl.load(up_at, mask=k[:, None] < left, other=0.0)
        if SCALED:
            x_scale = tl.load(x_scale_ptr + step * x_scale_step + row, mask=used, other=0.0)[:, None]
            gate += tl.dot(x, w_gate) * (x_scale * tl.load(gate_scale_at + step))
            up += tl.dot(x, w_up) * (x_scale * tl.load(up_scale_at + step))
        else:
            gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
            up = tl.dot(x, w_up, up, input_precision=PRECISION)
        x_at += DEPTH
        gate_at += DEPTH
        up_at += DEPTH
    if BIAS:
        gate += tl.load(bias_ptr + slot * 2 * inner + safe)[None, :]
        up += tl.load(bias_ptr + (slot * 2 + 1) * inner + safe)[None, :]
    h = join(gate, up, CLAMPED, LIMIT, ALPHA)
    inside = used[:, None] & (column < inner)[None, :]
    h_at = h_PI_ptr + place.to(tl.int64)[:, None] * inner + column[None, :]
    if SCALED:
        h = tl.where(inside, h, 0.0)
        h_scale = fp8_scale(tl.max(tl.abs(h), axis=1))
        tl.store(h_scale_ptr + column_tile * h_scale_step + place, h_scale, mask=used)
        tl.store(h_at, to_fp8(h * (1.0 / h_scale)[:, None]), mask=inside)
    else:
        tl.store(h_at, h.to(h_PI_ptr.dtype.element_ty), mask=inside)


@launched(do_not_specialize=["row_tiles"])
def _down(
    h_PI_ptr, w_ptr, part_PH_ptr, pair_P_ptr, tile_slot_ptr, weight_ptr, h_scale_ptr, w_scale_ptr, bias_ptr,
    row_tiles, hidden, inner, h_scale_step, groups_h, groups_i,
    SCALED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    tile, column_tile = tile_of(tl.program_id(0), row_tiles, tl.cdiv(hidden, COLUMNS), BAND)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    place = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    pair = tl.load(pair_P_ptr + place)
    used = pair >= 0
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.where(column < hidden, column, 0)
    k = tl.arange(0, DEPTH)
    h_at = h_PI_ptr + place[:, None] * inner + k[None, :]
    w_at = w_ptr + slot * hidden * inner + safe[None, :] * inner + k[:, None]
    if SCALED:
        w_scale_at = w_scale_ptr + (slot * groups_h + column_tile * COLUMNS // GROUP) * groups_i
    y = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(tl.cdiv(inner, DEPTH)):
        if EVEN:
            h = tl.load(h_at, mask=used[:, None], other=0.0)
            w = tl.load(w_at)
        else:
            left = inner - step * DEPTH
            h = tl.load(h_at, mask=used[:, None] & (k[None, :] < left), other=0.0)
            w = tl.load(w_at, mask=k[:, None] < left, other=0.0)
        if SCALED:
            h_scale = tl.load(h_scale_ptr + step * h_scale_step + place, mask=used, other=0.0)[:, None]
            y += tl.dot(h, w) * (h_scale * tl.load(w_scale_at + step))
        else:
            y = tl.dot(h, w, y, input_precision=PRECISION)
        h_at += DEPTH
        w_at += DEPTH
    if BIAS:
        y += tl.load(bias_ptr + slot * hidden + safe)[None, :]
    weight = tl.load(weight_ptr + pair, mask=used, other=0.0).to(tl.float32)
    part = (y * weight[:, None]).to(part_PH_ptr.dtype.element_ty)
    inside = used[:, None] & (column < hidden)[None, :]
    tl.store(part_PH_ptr + place[:, None] * hidden + column[None, :], part, mask=inside)


def grouped_gate_up(
    x_RH: Tensor, x_scale: Tensor | None, weights: ExpertWeights, plan: RowPlan, choices: int, tile: Tile
) -> tuple[Tensor, Tensor | None]:
    """h_PI = gate and up, joined, of the rows the plan gathers; in FP8 also its scales, group by group over the places.

    x_scale as `quantise_groups` lays it: the rows of one group side by side.
    """
    sizes, places = weights.sizes, plan.pair_P.shape[0]
    h_PI = x_RH.new_empty(places, sizes.inner)
    h_scale = None
    if weights.scaled:
        assert tile.depth == tile.columns == weights.group, (
            f"an FP8 tile {tile} must be one {weights.group} block"
        )
        groups = -(-sizes.inner // weights.group)
        h_scale = x_RH.new_empty(groups, places, dtype=torch.float32)
    _joining(sizes, places, x_RH.stride(0), _step(x_scale), choices, tile)(
        x_RH, weights.gate_up_EJH, h_PI, plan.pair_P, plan.tile_slot_M, x_scale, weights.gate_up_scale, h_scale,
        weights.joint.gate_up_bias_EJ,
    )  # fmt: skip
    return h_PI, h_scale


@planned
def _joining(
    sizes: _Sizes, places: int, x_stride: int, scale_step: int, choices: int, tile: Tile
) -> PreparedLaunch:
    hidden, inner, tiles = sizes.hidden, sizes.inner, places // tile.rows
    groups_h, groups_i = -(-hidden // sizes.group), -(-inner // sizes.group)
    return PreparedLaunch(
        _gate_up, (tiles * cdiv(inner, tile.columns),),
        (tiles, hidden, inner, x_stride, scale_step, places, groups_h, groups_i),
        CHOICES=choices, EVEN=hidden % tile.depth == 0, **dict(sizes.joint), **sizes.constants(tile),
    )  # fmt: skip


def grouped_down(
    h_PI: Tensor,
    h_scale: Tensor | None,
    weights: ExpertWeights,
    plan: RowPlan,
    weight_RK: Tensor,
    tile: Tile,
    dtype: torch.dtype,
) -> Tensor:
    """part_PH = weight * (h_PI @ down^T) of each place's pair and slot, rounded once, to `dtype`: float32 sums of
    such parts do not depend on which of them are added on which node. Padding is left unwritten."""
    sizes, places = weights.sizes, h_PI.shape[0]
    if weights.scaled:
        assert tile.depth == weights.group and weights.group % tile.columns == 0, (
            f"tile {tile} crosses scale blocks"
        )
    part_PH = torch.empty(places, sizes.hidden, dtype=dtype, device=h_PI.device)
    _lowering(sizes, places, tile)(
        h_PI, weights.down_EHI, part_PH, plan.pair_P, plan.tile_slot_M, weight_RK, h_scale, weights.down_scale,
        weights.joint.down_bias_EH,
    )  # fmt: skip
    return part_PH


@planned
def _lowering(sizes: _Sizes, places: int, tile: Tile) -> PreparedLaunch:
    hidden, inner, tiles = sizes.hidden, sizes.inner, places // tile.rows
    groups_h, groups_i = -(-hidden // sizes.group), -(-inner // sizes.group)
    return PreparedLaunch(
        _down, (tiles * cdiv(hidden, tile.columns),), (tiles, hidden, inner, places, groups_h, groups_i),
        EVEN=inner % tile.depth == 0, BIAS=sizes.down_bias, **sizes.constants(tile),
    )  # fmt: skip


def expert_ffn(
    x_RH: Tensor,
    slot_RK: Tensor,
    weight_RK: Tensor,
    weights: ExpertWeights,
    tiles: ExpertTiles,
    out_RH: Tensor,
    add: bool = False,
) -> None:
    """out_RH (+)= sum over k of weight_RK * FFN_slot(x_RH); slots below 0 are skipped. Never waits for the device.

    Parts are rounded to x_RH's dtype and added in float32, as the CPU library does. slot_RK and weight_RK contiguous.
    """
    assert slot_RK.is_contiguous() and weight_RK.is_contiguous(), "slot_RK and weight_RK must be contiguous"
    if not slot_RK.numel():
        if not add:
            out_RH.zero_()
        return
    plan = plan_rows(slot_RK, weights.sizes.slots, tiles.rows)
    rows, scale = quantise_groups(x_RH, weights.group) if weights.scaled else (x_RH, None)
    h_PI, h_scale = grouped_gate_up(rows, scale, weights, plan, slot_RK.shape[1], tiles.gate_up)
    part_PH = grouped_down(h_PI, h_scale, weights, plan, weight_RK, tiles.down, x_RH.dtype)
    combine_rows(part_PH, plan.place_RK, out_RH, add)


def _step(x_scale: Tensor | None) -> int:
    """How far one group's scales lie from the next one's."""
    if x_scale is None:
        return 0
    assert x_scale.stride(0) == 1 or x_scale.shape[0] == 1, "the scales of one group must lie side by side"
    return x_scale.stride(1)
