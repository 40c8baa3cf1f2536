"""Triton grouped products for routed experts in int4 groups, or in int8 with one scale per output.

Codes are exact in the rows' dtype: a group's product is summed in float32, multiplied by its scales and added, as the
CPU library does. Scales of four-bit floats are powers of two and kept as their exponents (OCP MX, E8M0): codes times
them are exact in bfloat16 and float32 too, so there a step is four groups and its bytes are read 16 at a time. An int4
byte holds inputs i (low half) and i + 16 of a block of 32, so two products of 16 inputs make a block and nothing is
interleaved. Codes go by float32 to bfloat16, which the interpreter can do. It knows no routing rule. Shapes as in
`experts.py`; G groups.
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
from afserve.kernels.triton.launch import cdiv, launched
from afserve.kernels.triton.permute import RowPlan, combine_rows, plan_rows

HALF = STEP // 2


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """gate_up (E, J, W) and down (E, H, W) with float32 scales (E, J, G) and (E, H, G). bits 4: uint8, W = 16 for each
    32 inputs, `group` inputs to a scale; bits 8: int8, W inputs, and one scale. e2m1: a half is a sign and the three
    bits of a four-bit float, a scale a byte unless `Groups` are wide."""

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
            scale_OG = 2 * given.scale_OG if self.e2m1 else given.scale_OG  # codes are twice the numbers
            scale[slot].copy_(exponents(scale_OG) if self.byte_scales else scale_OG)
        self.joint.set(slot, biases)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        biases = self.joint.gate_up_bias_EJ, self.joint.down_bias_EH
        plain = self.gate_up, self.down, self.gate_up_scale, self.down_scale
        return (*plain, *(bias for bias in biases if bias is not None))

    @property
    def byte_scales(self) -> bool:
        return self.gate_up_scale.dtype is torch.uint8


def empty(shape: ExpertShape, bits: int, groups: Groups, device: torch.device) -> CodedWeights:
    """With bits 8 a group is at least as many as both products have inputs."""
    slots, hidden, inner, group = shape.slots, shape.hidden, shape.inner, groups.size

    def codes(outputs: int, inputs: int) -> Tensor:
        width = groups_of(inputs, STEP) * HALF if bits == 4 else inputs
        dtype = torch.uint8 if bits == 4 else torch.int8
        return torch.zeros((slots, outputs, width), dtype=dtype, device=device)

    def scales(outputs: int, inputs: int) -> Tensor:
        dtype = torch.uint8 if groups.e2m1 and not groups.wide else torch.float32
        return torch.zeros((slots, outputs, groups_of(inputs, group)), dtype=dtype, device=device)

    return CodedWeights(
        codes(2 * inner, hidden), codes(hidden, inner), scales(2 * inner, hidden), scales(hidden, inner), bits, group,
        groups.e2m1, Joint.empty(shape, device),
    )  # fmt: skip


def float_codes(code_OI: Tensor) -> Tensor:
    """Twice the numbers of four-bit floats -> a sign and the place among 0, 1, 2, 3, 4, 6, 8, 12, int8."""
    magnitudes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8, device=code_OI.device)
    place = torch.bucketize(code_OI.abs(), magnitudes)
    return (place | (code_OI < 0).int() << 3).to(torch.int8)


def exponents(scale_OG: Tensor) -> Tensor:
    """Powers of two -> uint8 e, where 2^(e - 127) is the scale: 255 where one is not finite, 0 (no weight at all) for
    nought and what is below 2^-126. Raises ValueError for a scale that is no power of two."""
    mantissa, exponent = torch.frexp(scale_OG)
    finite, nought = scale_OG.isfinite(), scale_OG == 0
    if not bool(((mantissa == 0.5) | nought | ~finite).all()):
        raise ValueError("experts: scales of four-bit floats are powers of two, and one of these is not")
    held = torch.where(nought, 0, (exponent + 126).clamp(0, 254))
    return torch.where(finite, held, 255).to(torch.uint8)


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
    """What the four low bits stand for, float32. Of a four-bit float, exponent and mantissa lie in a float32 as they
    are, 2^126 too small."""
    if E2M1:
        bits = ((half & 8) << 28) | ((half & 7) << 22)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (((half & 15) ^ 8) - 8).to(tl.float32)


@triton.jit
def _scale(scale):
    BYTES: tl.constexpr = scale.dtype == tl.uint8
    if BYTES:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _product(
    x_at, used, w_at, scale_at, inputs, groups, total,
    GROUP: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total += rows at x_at times the weights of the outputs whose codes begin at w_at. A step that is deeper than a
    group multiplies scales into the codes."""
    SEVERAL: tl.constexpr = DEPTH // GROUP
    for first in range(0, inputs, DEPTH):
        if BITS == 4:
            byte_at = tl.arange(0, DEPTH // 2)
            low_k = first + byte_at // 16 * 32 + byte_at % 16
            at = first // 2 + byte_at
            byte = tl.load(w_at[None, :] + at[:, None], mask=(low_k < inputs)[:, None], other=0).to(tl.int32)
            x_low, x_high = _rows_at(x_at, used, low_k, inputs), _rows_at(x_at, used, low_k + 16, inputs)
            low, high = _number(byte, E2M1), _number(byte >> 4, E2M1)
            if SEVERAL > 1:
                group = first // GROUP + tl.arange(0, SEVERAL)
                held = tl.load(scale_at[None, :] + group[:, None], mask=(group < groups)[:, None], other=0)
                wide = tl.broadcast_to(_scale(held)[:, None, :], SEVERAL, GROUP // 2, held.shape[1])
                scale = tl.reshape(wide, (DEPTH // 2, held.shape[1]))
                low, high = low * scale, high * scale
                total = tl.dot(x_low, low.to(x_low.dtype), total, input_precision=PRECISION)
                total = tl.dot(x_high, high.to(x_low.dtype), total, input_precision=PRECISION)
            else:
                part = tl.dot(x_low, low.to(x_low.dtype), input_precision=PRECISION)
                part = tl.dot(x_high, high.to(x_low.dtype), part, input_precision=PRECISION)
                total += part * _scale(tl.load(scale_at + first // GROUP))[None, :]
        else:
            k = first + tl.arange(0, DEPTH)
            code = tl.load(w_at[None, :] + k[:, None], mask=(k < inputs)[:, None], other=0)
            x = _rows_at(x_at, used, k, inputs)
            part = tl.dot(x, code.to(tl.float32).to(x.dtype), input_precision=PRECISION)
            total += part * tl.load(scale_at + first // GROUP)[None, :]
    return total


@launched(do_not_specialize=["row_tiles"])
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
        groups,
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
        groups,
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


@launched(do_not_specialize=["row_tiles"])
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
        h_PI_ptr + place * inner, used, w_ptr + row * width, scale_ptr + row * groups, inner, groups, zero, GROUP, BITS,
        E2M1, DEPTH, PRECISION,
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
    _down_coded[(plan.tiles, cdiv(hidden, _columns(tiles.down, weights)))](
        h_PI, weights.down, weights.down_scale, part_PH, plan.pair_P, plan.tile_slot_M, weight_RK,
        weights.joint.down_bias_EH,
        plan.tiles, hidden, h_PI.shape[1], weights.down.shape[2], weights.down_scale.shape[2],
        BIAS=weights.joint.down_bias_EH is not None, **_constants(weights, tiles.down, x_RH.dtype),
    )  # fmt: skip
    combine_rows(part_PH, plan.place_RK, out_RH, add)


def _gate_up(x_RH: Tensor, weights: CodedWeights, plan: RowPlan, choices: int, tile: Tile) -> Tensor:
    inner, hidden = weights.gate_up.shape[1] // 2, x_RH.shape[1]
    h_PI = torch.empty((plan.pair_P.shape[0], inner), dtype=x_RH.dtype, device=x_RH.device)
    _gate_up_coded[(plan.tiles, cdiv(inner, _columns(tile, weights)))](
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
        "ROWS": tile.rows, "COLUMNS": _columns(tile, weights), "DEPTH": _depth(weights, dtype),
        "num_warps": tile.warps, "num_stages": tile.stages, **FUSED,
    }  # fmt: skip


def _depth(weights: CodedWeights, dtype: torch.dtype) -> int:
    """Inputs of a step: of one group, or of four where scales are exact in the rows' dtype. So many that a thread reads
    16 bytes of codes at once."""
    if weights.byte_scales and weights.group == STEP and dtype is not torch.float16:
        return 4 * STEP
    return next((depth for depth in (128, 64) if weights.group % depth == 0), STEP)


def _columns(tile: Tile, weights: CodedWeights) -> int:
    """Codes are widened in registers, of which gate and up with twice as many columns would take too many, but where
    there are few rows and a step of one short group: its bytes are few for the threads."""
    few = weights.bits == 4 and not weights.e2m1 and weights.group < 64 and tile.rows <= 32
    return 128 if few else min(tile.columns, 64)
