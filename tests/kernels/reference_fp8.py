"""The reference with expert slots in e4m3 blocks: the oracle of FP8 experts, not a fast path.

It multiplies what the FP8 kernels multiply: weights times their block scales, rows and activations rounded through
e4m3 in groups of 128 columns, all sums in float32. Everything else is `reference.py`. Shapes as there.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.formats.scaled import FP8, GROUP, LARGEST, TINY, BlockScaled, blocks_of, spread
from afserve.kernels.packed import Biases, ExpertShape, PackedExperts
from afserve.kernels.reference import Reference


@dataclass(slots=True)
class _Slots:
    """gate, up and down of every filled slot."""

    held: dict[int, tuple[BlockScaled, BlockScaled, BlockScaled]] = field(default_factory=dict)


class BlockReference(Reference):
    name = "torch-fp8"
    holds_fp8 = True

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


def quantised_blocks(weight_OI: Tensor) -> BlockScaled:
    """The oracle of `triton_quant.quantise_blocks`."""
    rows, columns = weight_OI.shape
    down, across = blocks_of(rows, columns)
    wide = weight_OI.new_zeros((down * GROUP, across * GROUP), dtype=torch.float32)
    wide[:rows, :columns] = weight_OI
    largest = wide.abs().view(down, GROUP, across, GROUP).amax((1, 3))
    scale = largest.clamp(min=TINY) / LARGEST
    return BlockScaled(_to_fp8(weight_OI.float() / spread(scale, (rows, columns))), scale)


def rounded_rows(x_TH: Tensor) -> Tensor:
    """What rows become through e4m3 with one scale per 128 columns: float32, the oracle of `quantise_groups`."""
    tokens, columns = x_TH.shape
    groups = -(-columns // GROUP)
    wide = x_TH.new_zeros((tokens, groups * GROUP), dtype=torch.float32)
    wide[:, :columns] = x_TH
    by_group = wide.view(tokens, groups, GROUP)
    scale = by_group.abs().amax(2, keepdim=True).clamp(min=TINY) / LARGEST
    return (_to_fp8(by_group / scale).float() * scale).view(tokens, -1)[:, :columns]


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(FP8)
