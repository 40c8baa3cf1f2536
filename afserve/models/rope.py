"""Rotary tables: cos and sin of every position, in the half-split order the kernels use.

Sources: transformers' `modeling_rope_utils` (default, linear, yarn), YaRN (arXiv 2309.00071).
Shapes: P positions, D rotary size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.spec_parts import RopeSpec


@dataclass(frozen=True, slots=True)
class Rotary:
    """D / 2 columns each, float32."""

    cos_PD: Tensor
    sin_PD: Tensor


def tables(rope: RopeSpec, positions: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """cos and sin in float32, but rounded to `dtype` first, as the models do."""
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)[None, :]
    factor = attention_factor(rope)
    cos, sin = ((f * factor).to(dtype).float().to(device) for f in (angle.cos(), angle.sin()))
    return Rotary(cos, sin)


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """D / 2 values in float32."""
    power = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "default":
        return 1.0 / power
    if rope.kind == "linear":
        return 1.0 / power / rope.factor
    low, high = _correction_range(rope)
    ramp = torch.clamp((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * power)) * (1 - keep) + (1.0 / power) * keep


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def mla_scale(rope: RopeSpec, head_dim: int) -> float:
    """Softmax scale of MLA: 1 / sqrt(d), times mscale^2 where yarn asks for it (DeepSeek-V2's modelling code)."""
    scale: float = head_dim**-0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _correction_range(rope: RopeSpec) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        return (rope.dim * math.log(rope.original_max / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high + 0.001 if low == high else high
