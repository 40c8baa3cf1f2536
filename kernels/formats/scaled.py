"""Weights in FP8 e4m3 with one float32 scale per 128x128 block, in plain PyTorch.

value = quantised * scale, DeepSeek-V3's format (arXiv 2412.19437, 3.3): `weight_scale_inv` in its checkpoints. It knows
no kernel and no file. Shapes: O x I weight, T x H rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
GROUP = 128
LARGEST = 448.0  # the largest finite e4m3 value
TINY = 1e-10  # an all-zero group still gets a scale it can be divided by


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """q_OI e4m3 and scale float32, ceil(O / 128) x ceil(I / 128)."""

    q_OI: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q_OI.shape[0], self.q_OI.shape[1])

    def dequantised(self) -> Tensor:
        """float32, O x I."""
        return self.q_OI.float() * spread(self.scale, self.shape)


def dequantised(
    gate: BlockScaled, up: BlockScaled, down: BlockScaled, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(gate over up, down) of an expert whose three weights are blocks."""
    gate_up = torch.cat((gate.dequantised(), up.dequantised()))
    return gate_up.to(dtype), down.dequantised().to(dtype)


def quantised_blocks(weight_OI: Tensor) -> BlockScaled:
    """The blocks that come nearest: each block's largest number becomes the largest code."""
    rows, columns = weight_OI.shape
    down, across = blocks_of(rows, columns)
    wide = weight_OI.new_zeros((down * GROUP, across * GROUP), dtype=torch.float32)
    wide[:rows, :columns] = weight_OI
    largest = wide.abs().view(down, GROUP, across, GROUP).amax((1, 3))
    scale = largest.clamp(min=TINY) / LARGEST
    return BlockScaled(to_fp8(weight_OI.float() / spread(scale, (rows, columns))), scale)


def to_fp8(x: Tensor) -> Tensor:
    """Beyond the largest code it is that one."""
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def blocks_of(rows: int, columns: int) -> tuple[int, int]:
    """How many scales a weight of this shape has."""
    return -(-rows // GROUP), -(-columns // GROUP)


def spread(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """One scale per block -> one per element."""
    rows, columns = shape
    return scale.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
