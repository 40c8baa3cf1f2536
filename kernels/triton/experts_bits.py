"""Triton grouped products for routed experts in int4 groups, or in int8 with one scale per output.

Codes are exact in the rows' dtype: a group's product is summed in float32, multiplied by its scales and added, as the
CPU library does. An int4 byte holds inputs i (low half) and i + 16 of a block of 32, so two products of 16 inputs make
a block and nothing is interleaved. Codes go by float32 to bfloat16, which the interpreter can do. It knows no routing
rule. Shapes as in `experts.py`; G groups.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.grouped import STEP, Grouped, Groups, groups_of
from afserve.kernels.packed import Biases, ExpertShape
from afserve.kernels.triton.config import FUSED, ExpertTiles, Tile
from afserve.kernels.triton.joining import PLAIN, Joint, join
from afserve.kernels.triton.permute import RowPlan, combine_rows, plan_rows

HALF = STEP // 2


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """gate_up (E, J, W) and down (E, H, W) with float32 scales (E, J, G) and (E, H, G). bits 4: uint8, W = 16 for each
    32 inputs, `group` inputs to a scale; bits 8: int8, W inputs, and one
    scale. e2m1: as of `Groups`; a half is a sign and three bits."""

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor
    down_scale: Tensor
    bits: int
    group: int
    e2m1: bool = False
    joint: Joint = PLAIN

    def set(self, slot: int, gate_up: Grouped, down: Grouped, biases: Biases | None = None) -> None:
        for weight, scale, given in (
            (self.gate_up, self.gate_up_scale, gate_up),
            (self.down, self.down_scale, down),
        ):
            code_OI = float_codes(given.code_OI) if self.e2m1 else given.code_OI
            weight[slot].copy_(packed_halves(code_OI) if self.bits == 4 else code_OI)
            scale[slot].copy_(given.scale_OG)
        self.joint.set(slot, biases)


def empty(shape: ExpertShape, bits: int, groups: Groups, device: torch.device) -> CodedWeights:
    """With bits 8 a group is at least as many as both products have inputs."""
    slots, hidden, inner, group = shape.slots, shape.hidden, shape.inner, groups.size

    def codes(outputs: int, inputs: int) -> Tensor:
        width = groups_of(inputs, STEP) * HALF if bits == 4 else inputs
        dtype = torch.uint8 if bits == 4 else torch.int8
        return torch.zeros((slots, outputs, width), dtype=dtype, device=device)

    def scales(outputs: int, inputs: int) -> Tensor:
        return torch.zeros((slots, outputs, groups_of(inputs, group)), device=device)

    return CodedWeights(
        codes(2 * inner, hidden), codes(hidden, inner), scales(2 * inner, hidden), scales(hidden, inner), bits, group,
        groups.e2m1, Joint.empty(shape, device),
    )  # fmt: skip


def float_codes(code_OI: Tensor) -> Tensor:
    """Twice the numbers of four-bit floats -> a sign and the place among 0, 1, 2, 3, 4, 6, 8, 12, int8."""
    magnitudes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8, device=code_OI.device)
    place = torch.bucketize(code_OI.abs(), magnitudes)
    return (place | (code_OI < 0).int() << 3).to(torch.int8)


def packed_halves(code_OI: Tensor) -> Tensor:
    """int8 codes -8 .. 7 -> bytes, in two's complement."""
    outputs, inputs = code_OI.shape
    wide = torch.nn.functional.pad(code_OI, (0, -inputs % STEP)).view(torch.uint8).view(outputs, -1, 2, HALF)
    return ((wide[:, :, 0] & 15) | (wide[:, :, 1] << 4)).flatten(1)


@triton.jit
def _rows_at(x_at, used, k, inputs):
    return tl.load(x_at[:, None] + k[None, :], mask=used[:, None] & (k < inputs)[None, :], other=0.0)


@triton.jit
def _number(half, E2M1: tl.constexpr):
    """What four bits stand for, int32."""
    if E2M1:
        size, double = half & 7, tl.maximum((half & 7) >> 1, 1) - 1
        size = tl.where(size < 2, size, ((size & 1) + 2) << double)
        return tl.where(half > 7, -size, size)
    return (half ^ 8) - 8


@triton.jit
def _product(
    x_at, used, w_at, scale_at, inputs, total,
    GROUP: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total += rows at x_at times the weights of the outputs whose codes begin at w_at."""
    for first in range(0, inputs, DEPTH):
        if BITS == 4:
            byte_at = tl.arange(0, DEPTH // 2)
            low_k = first + byte_at // 16 * 32 + byte_at % 16
            at = first // 2 + byte_at
            byte = tl.load(w_at[None, :] + at[:, None], mask=(low_k < inputs)[:, None], other=0).to(tl.int32)
            x_low, x_high = _rows_at(x_at, used, low_k, inputs), _rows_at(x_at, used, low_k + 16, inputs)
            low, high = _number(byte & 15, E2M1), _number((byte >> 4) & 15, E2M1)
            part = tl.dot(x_low, low.to(tl.float32).to(x_low.dtype), input_precision=PRECISION)
            part = tl.dot(x_high, high.to(tl.float32).to(x_low.dtype), part, input_precision=PRECISION)
        else:
            k = first + tl.arange(0, DEPTH)
            code = tl.load(w_at[None, :] + k[:, None], mask=(k < inputs)[:, None], other=0)
            x = _rows_at(x_at, used, k, inputs)
            part = tl.dot(x, code.to(tl.float32).to(x.dtype), input_precision=PRECISION)
        total += part * tl.load(scale_at + first // GROUP)[None, :]
    return total


@triton.jit(do_not_specialize=["row_tiles"])
def _gate_up_coded(
    x_ptr, w_ptr, scale_ptr, h_PI_ptr, pair_P_ptr, tile_slot_ptr, bias_ptr,
    row_tiles, hidden, inner, x_stride, width, groups,
    CHOICES: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    CLAMPED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    tile, column_tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    place = tile * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pair_P_ptr + place)
    used = pair >= 0
    x_at = x_ptr + (pair // CHOICES).to(tl.int64) * x_stride
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    gate_row = slot * 2 * inner + tl.where(column < inner, column, 0)
    zero = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    gate = _product(
        x_at,
        used,
        w_ptr + gate_row * width,
        scale_ptr + gate_row * groups,
        hidden,
        zero,
        GROUP,
        BITS,
        E2M1,
        DEPTH,
        PRECISION,
    )
    up_row = gate_row + inner
    up = _product(
        x_at,
        used,
        w_ptr + up_row * width,
        scale_ptr + up_row * groups,
        hidden,
        zero,
        GROUP,
        BITS,
        E2M1,
        DEPTH,
        PRECISION,
    )
    if BIAS:
        gate += tl.load(bias_ptr + gate_row)[None, :]
        up += tl.load(bias_ptr + up_row)[None, :]
    h = join(gate, up, CLAMPED, LIMIT, ALPHA)
    h_at = h_PI_ptr + place.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(h_at, h.to(h_PI_ptr.dtype.element_ty), mask=used[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize=["row_tiles"])
def _down_coded(
    h_PI_ptr, w_ptr, scale_ptr, part_PH_ptr, pair_P_ptr, tile_slot_ptr, weight_ptr, bias_ptr,
    row_tiles, hidden, inner, width, groups,
    GROUP: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    tile, column_tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    place = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    pair = tl.load(pair_P_ptr + place)
    used = pair >= 0
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row = slot * hidden + tl.where(column < hidden, column, 0)
    zero = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    y = _product(
        h_PI_ptr + place * inner, used, w_ptr + row * width, scale_ptr + row * groups, inner, zero, GROUP, BITS, E2M1,
        DEPTH, PRECISION,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + row)[None, :]
    weight = tl.load(weight_ptr + pair, mask=used, other=0.0).to(tl.float32)
    part = (y * weight[:, None]).to(part_PH_ptr.dtype.element_ty)
    inside = used[:, None] & (column < hidden)[None, :]
    tl.store(part_PH_ptr + place[:, None] * hidden + column[None, :], part, mask=inside)


def expert_ffn(
    x_RH: Tensor,
    slot_RK: Tensor,
    weight_RK: Tensor,
    weights: CodedWeights,
    tiles: ExpertTiles,
    out_RH: Tensor,
    add: bool = False,
) -> None:
    """As `experts.expert_ffn`. Of the tiles, rows and columns count; a step is 32 or 64 inputs of one group."""
    assert slot_RK.is_contiguous() and weight_RK.is_contiguous(), "slot_RK and weight_RK must be contiguous"
    if not slot_RK.numel():
        if not add:
            out_RH.zero_()
        return
    slots, hidden, _ = weights.down.shape
    plan = plan_rows(slot_RK, slots, tiles.rows)
    h_PI = _gate_up(x_RH, weights, plan, slot_RK.shape[1], tiles.gate_up)
    part_PH = torch.empty((h_PI.shape[0], hidden), dtype=x_RH.dtype, device=x_RH.device)
    _down_coded[(plan.tiles, triton.cdiv(hidden, _columns(tiles.down)))](
        h_PI, weights.down, weights.down_scale, part_PH, plan.pair_P, plan.tile_slot_M, weight_RK,
        weights.joint.down_bias_EH,
        plan.tiles, hidden, h_PI.shape[1], weights.down.shape[2], weights.down_scale.shape[2],
        BIAS=weights.joint.down_bias_EH is not None, **_constants(weights, tiles.down, x_RH.dtype),
    )  # fmt: skip
    combine_rows(part_PH, plan.place_RK, out_RH, add)


def _gate_up(x_RH: Tensor, weights: CodedWeights, plan: RowPlan, choices: int, tile: Tile) -> Tensor:
    inner, hidden = weights.gate_up.shape[1] // 2, x_RH.shape[1]
    h_PI = torch.empty((plan.pair_P.shape[0], inner), dtype=x_RH.dtype, device=x_RH.device)
    _gate_up_coded[(plan.tiles, triton.cdiv(inner, _columns(tile)))](
        x_RH, weights.gate_up, weights.gate_up_scale, h_PI, plan.pair_P, plan.tile_slot_M,
        weights.joint.gate_up_bias_EJ,
        plan.tiles, hidden, inner, x_RH.stride(0), weights.gate_up.shape[2], weights.gate_up_scale.shape[2],
        CHOICES=choices, **weights.joint.constants(), **_constants(weights, tile, x_RH.dtype),
    )  # fmt: skip
    return h_PI


def _constants(weights: CodedWeights, tile: Tile, dtype: torch.dtype) -> dict[str, object]:
    return {
        "GROUP": weights.group, "BITS": weights.bits, "E2M1": weights.e2m1,
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "ROWS": tile.rows, "COLUMNS": _columns(tile), "DEPTH": 64 if weights.group % 64 == 0 else 32,
        "num_warps": tile.warps, "num_stages": tile.stages, **FUSED,
    }  # fmt: skip


def _columns(tile: Tile) -> int:
    """Codes are widened in registers, of which gate and up with twice as many columns would take too many."""
    return min(tile.columns, 64)
