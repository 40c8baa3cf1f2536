"""The reference with expert slots and linear maps in e4m3 blocks: the oracle of FP8 weights, not a fast path.

It multiplies what the FP8 kernels multiply: weights times their block scales, rows and activations rounded through
e4m3 in groups of 128 columns, all sums in float32. Everything else is `reference.py`. Shapes as there.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.formats.scaled import GROUP, LARGEST, TINY, BlockScaled, quantised_blocks, to_fp8
from afserve.kernels.packed import Biases, ExpertShape, PackedExperts, PackedLinear
from afserve.kernels.reference import Reference


@dataclass(slots=True)
class _Slots:
    """gate, up and down of every filled slot."""

    held: dict[int, tuple[BlockScaled, BlockScaled, BlockScaled]] = field(default_factory=dict)


class BlockReference(Reference):
    name = "torch-fp8"
    fp8_maps = True

    def holds_fp8(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 2

    def pack_linear_fp8(self, weight: BlockScaled, bias_O: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        return PackedLinear(*weight.shape, None, bias_O, weight, dtype)

    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        if not isinstance(packed.handle, BlockScaled):
            return super().linear(x_TI, packed)
        bias_O = None if packed.bias_O is None else packed.bias_O.float()
        return F.linear(rounded_rows(x_TI), packed.handle.dequantised(), bias_O).to(x_TI.dtype)

    def empty_experts_fp8(self, shape: ExpertShape) -> PackedExperts:
        return PackedExperts(shape.slots, shape.hidden, shape.inner, None, None, _Slots(), dtype=shape.dtype)

    def set_expert(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up_JH: Tensor,
        down_HI: Tensor,
        biases: Biases | None = None,
    ) -> None:
        if not isinstance(experts.handle, _Slots):
            super().set_expert(experts, slot, gate_up_JH, down_HI, biases)
            return
        self.set_expert_fp8(experts, slot, *(quantised_blocks(w) for w in (*gate_up_JH.chunk(2), down_HI)))

    def set_expert_fp8(
        self, experts: PackedExperts, slot: int, gate: BlockScaled, up: BlockScaled, down: BlockScaled
    ) -> None:
        if not isinstance(experts.handle, _Slots):
            super().set_expert_fp8(experts, slot, gate, up, down)
            return
        experts.handle.held[slot] = (gate, up, down)

    def expert_ffn(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool,
    ) -> None:
        if not isinstance(experts.handle, _Slots):
            super().expert_ffn(x_RH, slot_RK, weight_RK, experts, out_RH, add)
            return
        total = out_RH.float() if add else torch.zeros(x_RH.shape, dtype=torch.float32)
        rows_RH = rounded_rows(x_RH)
        for slot in torch.unique(slot_RK[slot_RK >= 0]).tolist():
            gate, up, down = (block.dequantised() for block in experts.handle.held[slot])
            row, choice = torch.where(slot_RK == slot)
            activation = F.silu(F.linear(rows_RH[row], gate)) * F.linear(rows_RH[row], up)
            y = F.linear(rounded_rows(activation), down) * weight_RK[row, choice].float()[:, None]
            total.index_add_(0, row, y.to(experts.dtype).float())
        out_RH.copy_(total)


def rounded_rows(x_TH: Tensor) -> Tensor:
    """What rows become through e4m3 with one scale per 128 columns: float32, the oracle of `quantise_groups`."""
    tokens, columns = x_TH.shape
    groups = -(-columns // GROUP)
    wide = x_TH.new_zeros((tokens, groups * GROUP), dtype=torch.float32)
    wide[:, :columns] = x_TH
    by_group = wide.view(tokens, groups, GROUP)
    scale = by_group.abs().amax(2, keepdim=True).clamp(min=TINY) / LARGEST
    return (to_fp8(by_group / scale).float() * scale).flatten(1)[:, :columns]
