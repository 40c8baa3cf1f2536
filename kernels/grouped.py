"""Weights of 4 bits: whole numbers -8 .. 7 with one scale per output and group of inputs, in plain PyTorch; and of 8.

value = code * scale. Codes are rounded to the nearest; the weight of the largest magnitude in a group gets -8, so all
sixteen codes are used (llama.cpp's Q4_0 does so). Codes of a checkpoint may be those of four-bit floats, which nothing
is rounded to here. It knows no kernel and no file. Shapes: O x I weight, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST, MOST = -8, 7
STEP = 32  # groups are multiples of it


@dataclass(frozen=True, slots=True)
class Groups:
    """How int4 weights are kept: `size` inputs to a scale; scales are float32 if `wide`, else bfloat16 numbers. `e2m1`:
    codes are 0, 1, 2, 3, 4, 6, 8 and 12 of either sign, twice the numbers of MXFP4."""

    size: int = STEP
    wide: bool = False
    e2m1: bool = False

    @property
    def bits(self) -> float:
        """Of a weight, its share of the scale included."""
        return 4 + (32 if self.wide else 16) / self.size


@dataclass(frozen=True, slots=True)
class Grouped:
    """code_OI int8 and scale_OG float32, G = ceil(I / size)."""

    code_OI: Tensor
    scale_OG: Tensor
    size: int

    def dequantised(self) -> Tensor:
        """float32, O x I."""
        inputs = self.code_OI.shape[1]
        return self.code_OI.float() * self.scale_OG.repeat_interleave(self.size, 1)[:, :inputs]


def groups_of(inputs: int, size: int) -> int:
    return -(-inputs // size)


def quantised_groups(weight_OI: Tensor, size: int = STEP) -> Grouped:
    """Scales are rounded to bfloat16 first, so codes are the best ones for the scales that are kept. A group with a
    weight that is not finite has NaN for a scale, and so for all its weights."""
    outputs, inputs = weight_OI.shape
    groups = groups_of(inputs, size)
    wide = weight_OI.new_zeros((outputs, groups * size), dtype=torch.float32)
    wide[:, :inputs] = weight_OI
    by_group = wide.view(outputs, groups, size)
    low, high = by_group.aminmax(dim=2)
    scale = torch.where(high > -low, high, low) / LEAST
    scale = scale.to(torch.bfloat16).float()
    scale = torch.where((low + high).isfinite(), scale, torch.nan)
    inverse = torch.where(scale.isfinite() & (scale != 0), 1 / scale, 0.0)
    code = (by_group * inverse.unsqueeze(2)).nan_to_num_(0.0).round_().clamp_(LEAST, MOST).to(torch.int8)
    return Grouped(code.view(outputs, -1)[:, :inputs].contiguous(), scale, size)


def int4_rounded(weight_OI: Tensor, size: int = STEP) -> Tensor:
    """float32: the weight as int4 groups hold it."""
    return quantised_groups(weight_OI, size).dequantised()


def int8_rows(weight_OI: Tensor, size: int) -> Grouped:
    """Codes -127 .. 127 with one scale per output, as `int8_rounded` rounds; `size` is at least all inputs."""
    code_OI, scale_O1 = _int8_codes(weight_OI)
    return Grouped(code_OI.nan_to_num_(0.0).to(torch.int8), scale_O1, size)


def int8_rounded(weight_OI: Tensor) -> Tensor:
    """float32: the weight as int8 with one scale per output holds it: round(w / s) * s, s = max |w| / 127 over the
    inputs. An output with a weight that is not finite has NaN for a scale, and so for all its weights."""
    code_OI, scale_O1 = _int8_codes(weight_OI)
    return code_OI * scale_O1


def rounded_weight(weight_OI: Tensor, int8: bool, int4: Groups | None) -> Tensor:
    """The values that fewer bits hold, in the weight's own dtype."""
    if int4 is not None:
        return int4_rounded(weight_OI, int4.size).to(weight_OI.dtype)
    return int8_rounded(weight_OI).to(weight_OI.dtype) if int8 else weight_OI


def _int8_codes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in float32, and a scale per output."""
    w = weight_OI.float()
    scale = w.abs().amax(-1, keepdim=True) / 127.0
    scale = torch.where(scale == 0, torch.ones_like(scale), torch.where(scale.isfinite(), scale, torch.nan))
    return (w / scale).round(), scale


def whole_rows(*inputs: int) -> int:
    """A group that holds all of so many inputs: a multiple of STEP."""
    return groups_of(max(inputs), STEP) * STEP
