"""Rotary tables: cos and sin of every position, in the half-split order the kernels use.

The kernels turn whole heads, number i with number i + D / 2. Where a model turns only a part of a head, or pairs that
lie side by side, the rows of its query and key projections are put into that order at load (`head_order`), and what is
not turned has an angle of 0: scores are the same.

Sources: transformers' `modeling_rope_utils` (the kinds below), YaRN (arXiv 2309.00071).
Shapes: P positions, D rotary size, or head size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.spec_parts import AttentionSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Rotary:
    """D / 2 columns each, float32."""

    cos_PD: Tensor
    sin_PD: Tensor


def tables(
    rope: RopeSpec,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    alpha_D: Tensor | None = None,
) -> Rotary:
    """cos and sin in float32, but rounded to `dtype` first, as the models do. Frequencies are multiplied by e^alpha."""
    turns_D = inverse_frequencies(rope, positions)
    if alpha_D is not None:
        turns_D = turns_D * alpha_D.float().cpu().exp()
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * turns_D[None, :]
    factor = attention_factor(rope, positions)
    cos, sin = ((f * factor).to(dtype).float().to(device) for f in (angle.cos(), angle.sin()))
    return Rotary(cos, sin)


def latent_tables(
    a: AttentionSpec,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    alpha_D: Tensor | None = None,
) -> Rotary:
    """For the rotary part of a head of latent attention, which may have no number."""
    if a.rope is not None:
        return tables(a.rope, positions, dtype, device, alpha_D)
    none_PD = torch.empty((positions, 0), device=device)
    return Rotary(none_PD, none_PD)


def head_tables(
    a: AttentionSpec,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    alpha_D: Tensor | None = None,
) -> Rotary:
    """For whole heads of grouped-query attention: zero angles for what `a.rope` does not turn."""
    half = a.head_dim // 2
    cos_PD = torch.ones((positions, half), device=device)
    sin_PD = torch.zeros((positions, half), device=device)
    if a.rope is not None:
        turned = tables(a.rope, positions, dtype, device, alpha_D)
        cos_PD[:, : a.rope.dim // 2] = turned.cos_PD
        sin_PD[:, : a.rope.dim // 2] = turned.sin_PD
    return Rotary(cos_PD, sin_PD)


def head_order(a: AttentionSpec) -> Tensor | None:
    """Which number of a head comes where in the kernels' order, (D,) int64; None: all stay where they are."""
    rope = a.rope
    if rope is None or (rope.dim == a.head_dim and not rope.interleaved):
        return None
    turned, still = torch.arange(rope.dim), torch.arange(rope.dim, a.head_dim)
    first, second = (turned[0::2], turned[1::2]) if rope.interleaved else turned.chunk(2)
    return torch.cat((first, still[: len(still) // 2], second, still[len(still) // 2 :]))


def query_scale(a: AttentionSpec, positions: int) -> Tensor | None:
    """What queries are multiplied by at each position, (P,) float32; None where that is 1 everywhere."""
    if a.temperature is None:
        return None
    floor, scale, ahead = a.temperature
    steps_P = ((torch.arange(positions, dtype=torch.float32) + ahead) / floor).floor()
    return 1.0 + scale * steps_P.log1p() if bool(steps_P.any()) else None


def inverse_frequencies(rope: RopeSpec, positions: int) -> Tensor:
    """D / 2 values in float32. `positions` are how many there will be at most."""
    power = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "default":
        return 1.0 / power
    if rope.kind == "proportional":
        turning = torch.arange(len(power)) < int(rope.partial * rope.dim // 2)
        return torch.where(turning, 1.0 / power / rope.factor, 0.0)
    if rope.kind == "linear":
        return 1.0 / power / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / power)
    if rope.kind == "longrope":
        divisor = rope.long_factor if positions > rope.original_max else rope.short_factor
        return 1.0 / (torch.tensor(divisor, dtype=torch.float32) * power)
    low, high = _correction_range(rope)
    ramp = torch.clamp((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * power)) * (1 - keep) + (1.0 / power) * keep


def _llama3(rope: RopeSpec, inverse_D: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones are kept, those between are mixed."""
    waves_D = rope.original_max * inverse_D / (2 * math.pi)  # of the original context
    span = rope.high_freq_factor - rope.low_freq_factor
    kept_D = (waves_D - rope.low_freq_factor) / span if span else (waves_D >= rope.low_freq_factor).float()
    kept_D = kept_D.clamp(0, 1)
    return (1 - kept_D) * inverse_D / rope.factor + kept_D * inverse_D


def attention_factor(rope: RopeSpec, positions: int) -> float:
    """What cos and sin are multiplied by."""
    if rope.kind == "longrope":
        return rope.long_mscale if positions > rope.original_max else rope.short_mscale
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def mla_scale(a: AttentionSpec) -> float:
    """Softmax scale of MLA: 1 / sqrt(d) where the layer has none of its own, times mscale^2 where yarn asks for it
    (DeepSeek-V2's modelling code)."""
    scale: float = a.head_dim**-0.5 if a.scale is None else a.scale
    rope = a.rope
    if rope is not None and rope.kind != "default" and rope.mscale_all_dim:
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
