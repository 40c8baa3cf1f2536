"""Weights in FP8 e4m3 with one float32 scale per 128x128 block, in plain PyTorch.

value = quantised * scale, DeepSeek-V3's format (arXiv 2412.19437, 3.3): `weight_scale_inv` in its checkpoints. It knows
no kernel and no file. Shapes: O x I weight, T x H rows.
"""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of such a weight with each one's scales: q_OI e4m3, scale_OG float32, one for 128 inputs. Some of them, or
    those of some numbers in this order, are `rows[...]`."""

    q_OI: Tensor
    scale_OG: Tensor

    @classmethod
    def of(cls, blocks: BlockScaled) -> "ScaledRows":
        return cls(blocks.q_OI, blocks.scale.repeat_interleave(GROUP, 0)[: len(blocks.q_OI)])

    @property
    def device(self) -> torch.device:
        return self.q_OI.device

    def __len__(self) -> int:
        return len(self.q_OI)

    def __getitem__(self, rows: slice | Tensor) -> "ScaledRows":
        return ScaledRows(self.q_OI[rows], self.scale_OG[rows])

    def columns(self, first: int, end: int) -> "ScaledRows":
        """Of inputs from `first` on, which are whole groups."""
        groups = slice(first // GROUP, -(-end // GROUP))
        return ScaledRows(self.q_OI[:, first:end].contiguous(), self.scale_OG[:, groups])

    def dequantised(self) -> Tensor:
        """float32, O x I."""
        scale_OI = self.scale_OG.repeat_interleave(GROUP, 1)[:, : self.q_OI.shape[1]]
        return self.q_OI.float() * scale_OI


def joined_blocks(parts: Sequence[ScaledRows]) -> BlockScaled | None:
    """All parts' rows one after the other; None where 128 of them have scales of more than one block."""
    q_OI, scale_OG = (torch.cat(x) for x in ([p.q_OI for p in parts], [p.scale_OG for p in parts]))
    blocks = BlockScaled(q_OI, scale_OG[::GROUP].contiguous())
    return blocks if torch.equal(ScaledRows.of(blocks).scale_OG, scale_OG) else None


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


def spread(scale: Tensor, shape: tuple[int, int], block: tuple[int, int] = (GROUP, GROUP)) -> Tensor:
    """One scale per block -> one per element."""
    (rows, columns), (down, across) = shape, block
    return scale.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
