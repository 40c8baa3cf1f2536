"""Triton grouped products for routed experts in int4 groups, or in int8 with one scale per output.

Codes are exact in the rows' dtype: a group's product is summed in float32, multiplied by its scales and added, as the
CPU library does. Scales of four-bit floats are powers of two (OCP MX, E8M0), so codes times them are exact in bfloat16
and float32 too. A block's bytes hold its first 32 inputs and its last 32 (`formats/four_bits.py`): two products make a
block and nothing is interleaved. Numbers go by float32 to bfloat16, which the interpreter can do. It knows no routing
rule. Shapes as in `experts.py`; G groups.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.formats.four_bits import BLOCK, HALF, exponents, float_codes, packed_halves
from afserve.kernels.grouped import STEP, Grouped, Groups, groups_of
from afserve.kernels.packed import Biases, ExpertShape
from afserve.kernels.triton.config import FUSED, ExpertTiles, Tile
from afserve.kernels.triton.joining import PLAIN, Joint, join
from afserve.kernels.triton.launch import cdiv, launched
from afserve.kernels.triton.permute import RowPlan, combine_rows, plan_rows


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """gate_up (E, J, W) and down (E, H, W) with float32 scales (E, J, G) and (E, H, G). bits 4: uint8, W = 32 for each
    64 inputs, `group` inputs to a scale, G a multiple of 4; bits 8: int8, W inputs, and one scale. e2m1: a half is a
    sign and the three bits of a four-bit float, a scale a byte unless `Groups` are wide."""

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
            scale[slot, :, : scale_OG.shape[1]].copy_(exponents(scale_OG) if self.byte_scales else scale_OG)
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
        width = groups_of(inputs, BLOCK) * HALF if bits == 4 else inputs
        dtype = torch.uint8 if bits == 4 else torch.int8
        return torch.zeros((slots, outputs, width), dtype=dtype, device=device)

    def scales(outputs: int, inputs: int) -> Tensor:
        dtype = torch.uint8 if groups.e2m1 and not groups.wide else torch.float32
        several = groups_of(inputs, group)
        held = groups_of(several, 4) * 4 if bits == 4 else several  # so that four are read at once
        return torch.zeros((slots, outputs, held), dtype=dtype, device=device)

    return CodedWeights(
        codes(2 * inner, hidden), codes(hidden, inner), scales(2 * inner, hidden), scales(hidden, inner), bits, group,
        groups.e2m1, Joint.empty(shape, device),
    )  # fmt: skip


@triton.jit
def _rows_at(x_at, used, k, inputs):
    return tl.load(x_at[:, None] + k[None, :], mask=used[:, None] & (k < inputs)[None, :], other=0.0)


@triton.jit
def _number(byte, HIGH: tl.constexpr, E2M1: tl.constexpr):
    """What half of a byte, which was widened with its sign, stands for, float32. Of a four-bit float, exponent and
    mantissa lie in a float32 as they are, 2^126 too small; a whole number plus 8 lies in the mantissa of 2^23."""
    if E2M1:
        wide = byte << 18 if HIGH else (byte << 28) >> 6
        return (wide & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37
    if HIGH:
        return ((byte & 0xF0) ^ 0x4B000080).to(tl.float32, bitcast=True) * 0.0625 - 524296.0
    return ((byte & 15) ^ 0x4B000008).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _scale(scale):
    BYTES: tl.constexpr = scale.dtype == tl.uint8
    if BYTES:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _scales_at(scale_at, step, groups, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Of each group of a step and each output; of each half of a block where groups do not divide the step."""
    if 64 * BLOCKS % GROUP == 0:
        group = step * (64 * BLOCKS // GROUP) + tl.arange(0, 64 * BLOCKS // GROUP)
    else:
        group = (step * (2 * BLOCKS) + tl.arange(0, 2 * BLOCKS)) * 32 // GROUP
    return tl.load(scale_at[None, :] + group[:, None], mask=(group < groups)[:, None], other=0)


@triton.jit
def _halves(held, BLOCKS: tl.constexpr):
    """Scales of the low and the high halves of each block, float32."""
    SEVERAL: tl.constexpr = held.shape[0]
    COLUMNS: tl.constexpr = held.shape[1]
    wide = tl.broadcast_to(_scale(held)[:, None, :], SEVERAL, 2 * BLOCKS // SEVERAL, COLUMNS)
    return tl.split(tl.permute(tl.reshape(wide, (BLOCKS, 2, COLUMNS)), (0, 2, 1)))


@triton.jit
def _by_byte(scale):
    """Scales of blocks, one for each of their bytes."""
    BLOCKS: tl.constexpr = scale.shape[0]
    COLUMNS: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.broadcast_to(scale[:, None, :], BLOCKS, 32, COLUMNS), (32 * BLOCKS, COLUMNS))


@triton.jit
def _product(
    x_at, used, w_at, scale_at, inputs, groups,
    GROUP: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows at x_at times the weights of the outputs whose codes begin at w_at. A step of several blocks that are not of
    one group multiplies scales into the codes."""
    if BLOCKS:
        return _product_by_blocks(
            x_at, used, w_at, scale_at, inputs, groups, GROUP, E2M1, BLOCKS, ROWS, COLUMNS, PRECISION
        )
    SEVERAL: tl.constexpr = DEPTH // 64
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if BITS == 4 and GROUP % DEPTH != 0:
        coming = _scales_at(scale_at, 0, groups, GROUP, SEVERAL)
    for first in range(0, inputs, DEPTH):
        if BITS == 4:
            byte_at = tl.arange(0, DEPTH // 2)
            low_k = first + byte_at // 32 * 64 + byte_at % 32
            at = first // 2 + byte_at
            byte = tl.load(w_at[None, :] + at[:, None], mask=(low_k < inputs)[:, None], other=0)
            byte = byte.to(tl.int8, bitcast=True).to(tl.int32)
            x_low, x_high = _rows_at(x_at, used, low_k, inputs), _rows_at(x_at, used, low_k + 32, inputs)
            low, high = _number(byte, False, E2M1), _number(byte, True, E2M1)
            if GROUP % DEPTH == 0:
                part = tl.dot(x_low, low.to(x_low.dtype), input_precision=PRECISION)
                part = tl.dot(x_high, high.to(x_low.dtype), part, input_precision=PRECISION)
                total += part * _scale(tl.load(scale_at + first // GROUP))[None, :]
            else:
                scale_low, scale_high = _halves(coming, SEVERAL)
                coming = _scales_at(scale_at, first // DEPTH + 1, groups, GROUP, SEVERAL)
                if SEVERAL == 1:
                    total += tl.dot(x_low, low.to(x_low.dtype), input_precision=PRECISION) * scale_low
                    total += tl.dot(x_high, high.to(x_low.dtype), input_precision=PRECISION) * scale_high
                else:
                    low *= _by_byte(scale_low)
                    high *= _by_byte(scale_high)
                    total = tl.dot(x_low, low.to(x_low.dtype), total, input_precision=PRECISION)
                    total = tl.dot(x_high, high.to(x_low.dtype), total, input_precision=PRECISION)
        else:
            k = first + tl.arange(0, DEPTH)
            code = tl.load(w_at[None, :] + k[:, None], mask=(k < inputs)[:, None], other=0)
            x = _rows_at(x_at, used, k, inputs)
            part = tl.dot(x, code.to(tl.float32).to(x.dtype), input_precision=PRECISION)
            total += part * tl.load(scale_at + first // GROUP)[None, :]
    return total


@triton.jit
def _product_by_blocks(
    x_at, used, w_at, scale_at, inputs, groups, GROUP: tl.constexpr, E2M1: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_product`, for few rows: each block of a step has a warp that multiplies it for all rows and
    outputs and keeps sums of its own, so that scales multiply sums and 16 bytes are read at once."""
    total = tl.zeros((BLOCKS, ROWS, COLUMNS), dtype=tl.float32)
    block, i = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 32)[None, :]
    steps = tl.cdiv(inputs, 64 * BLOCKS)
    coming = _scales_at(scale_at, 0, groups, GROUP, BLOCKS)
    for step in range(steps):
        held = coming
        coming = _scales_at(scale_at, step + 1, groups, GROUP, BLOCKS)
        low_k = step * (64 * BLOCKS) + block * 64 + i
        at = step * (32 * BLOCKS) + block * 32 + i
        inside = low_k < inputs
        byte = tl.load(w_at[None, None, :] + at[:, :, None], mask=inside[:, :, None], other=0)
        byte = byte.to(tl.int8, bitcast=True).to(tl.int32)
        row = x_at[None, :, None] + low_k[:, None, :]
        x_low = tl.load(row, mask=used[None, :, None] & inside[:, None, :], other=0.0)
        x_high = tl.load(row + 32, mask=used[None, :, None] & (low_k + 32 < inputs)[:, None, :], other=0.0)
        low, high = _halves(held, BLOCKS)
        sums = tl.dot(x_low, _number(byte, False, E2M1).to(x_low.dtype), input_precision=PRECISION)
        if GROUP % 64 == 0:
            sums = tl.dot(x_high, _number(byte, True, E2M1).to(x_low.dtype), sums, input_precision=PRECISION)
        else:
            total += sums * low[:, None, :]
            sums = tl.dot(x_high, _number(byte, True, E2M1).to(x_low.dtype), input_precision=PRECISION)
        total += sums * high[:, None, :]
    return tl.sum(total, axis=0)


@launched(do_not_specialize=["row_tiles"])
def _gate_up_coded(
    x_ptr, w_ptr, scale_ptr, h_PI_ptr, pair_P_ptr, tile_slot_ptr, bias_ptr,
    row_tiles, hidden, inner, x_stride, width, groups,
    CHOICES: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr,
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
    if BITS == 4:
        groups = groups // 4 * 4  # so the compiler knows it
    gate = _product(
        x_at, used, w_ptr + gate_row * width, scale_ptr + gate_row * groups, hidden, groups, GROUP, BITS, E2M1, DEPTH,
        BLOCKS, ROWS, COLUMNS, PRECISION,
    )  # fmt: skip
    up_row = gate_row + inner
    up = _product(
        x_at, used, w_ptr + up_row * width, scale_ptr + up_row * groups, hidden, groups, GROUP, BITS, E2M1, DEPTH,
        BLOCKS, ROWS, COLUMNS, PRECISION,
    )  # fmt: skip
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
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
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
    if BITS == 4:
        groups = groups // 4 * 4  # so the compiler knows it
    y = _product(
        h_PI_ptr + place * inner, used, w_ptr + row * width, scale_ptr + row * groups, inner, groups, GROUP, BITS, E2M1,
        DEPTH, BLOCKS, ROWS, COLUMNS, PRECISION,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + row)[None, :]
    weight = tl.load(weight_ptr + pair, mask=used, other=0.0).to(tl.float32)
    part = (y * weight[:, None]).to(part_PH_ptr.dtype.element_ty)
    inside = used[:, None] & (column < hidden)[None, :]
    tl.store(part_PH_ptr + place[:, None] * hidden + column[None, :], part, mask=inside)


def expert_ffn(
    x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, weights: CodedWeights, tiles: ExpertTiles, out_RH: Tensor,
    add: bool = False,
) -> None:  # fmt: skip
    """As `experts.expert_ffn`. Of the tiles, rows and columns count, and `_depth` is a step's inputs."""
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
    by_blocks = weights.bits == 4 and tile.rows == 16 and dtype is not torch.float32
    return {
        "GROUP": weights.group, "BITS": weights.bits, "E2M1": weights.e2m1,
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "ROWS": tile.rows, "COLUMNS": _columns(tile, weights), "DEPTH": _depth(weights, dtype),
        "BLOCKS": tile.warps if by_blocks else 0, "num_warps": tile.warps,
        "num_stages": min(tile.stages, 3) if by_blocks else tile.stages, **FUSED,
    }  # fmt: skip


def _depth(weights: CodedWeights, dtype: torch.dtype) -> int:
    """Inputs of a step: of one group, of a block's two halves, or of two blocks where scales are exact in the rows'
    dtype."""
    if weights.bits == 8:
        return next((depth for depth in (128, 64) if weights.group % depth == 0), STEP)
    if weights.byte_scales and weights.group == STEP and dtype is not torch.float16:
        return 2 * BLOCK
    return 128 if weights.group % 128 == 0 else BLOCK


def _columns(tile: Tile, weights: CodedWeights) -> int:
    """Codes are widened in registers, of which gate and up with twice as many columns would take too many. Where steps
    are of short groups, 32 rows have few bytes for the threads, and 16 rows many scales."""
    if weights.bits == 4 and not weights.e2m1 and weights.group < BLOCK and tile.rows <= 32:
        return 128 if tile.rows == 32 else 32
    return min(tile.columns, 64)
