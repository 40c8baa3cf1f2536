"""Steps of rows that few families have between products and norms: what a gate opens, how an odd FFN joins its
projections, caps of logits. Here in PyTorch; a backend has its own where its fused halves and stacks do the same.

Shapes: T tokens, A heads, D numbers of each, J joined, I inner, V vocabulary, or value heads of a state, E its decays,
X numbers of all heads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels import pointwise
from afserve.kernels.packed import Gating

Normed = Callable[[Tensor, Tensor, float], Tensor]
"""`Ops.rms_norm`."""


class RowSteps:
    def open_rows(self, x_TAD: Tensor, gate: Tensor, *, softplus: bool = False) -> Tensor:
        """x_TAD times the sigmoid of `gate`, or its softplus, rounded before and after. `gate` is (T, A) or (T, A D).
        x_TAD may be changed, and is not read again."""
        opened = (pointwise.softplus if softplus else pointwise.sigmoid)(gate).to(x_TAD.dtype)
        return x_TAD * opened.view(*x_TAD.shape[:2], -1)

    def join_rows(self, gating: Gating, both_TJ: Tensor) -> Tensor:
        """(T, I): what stands between an FFN's products, rounded step by step."""
        return gating.join(both_TJ)

    def forget_rows(
        self,
        forget_TE: Tensor,
        replace_TV: Tensor | None,
        step_E: Tensor,
        rate_E: Tensor,
        floor: float | None,
    ) -> tuple[Tensor, Tensor]:
        """`decay_TE` and `beta_TV` of `DeltaRows`, both float32: of steps softplus(forget + step) the decay is a rate
        of each, or with a `floor` that times sigmoid(rate (forget + step)). Shares are sigmoids of `replace_TV`;
        without it the steps themselves."""
        step_TE = forget_TE.float() + step_E
        if floor is not None:
            decay_TE = floor * pointwise.sigmoid(rate_E * step_TE)
        else:
            step_TE = pointwise.softplus(step_TE)
            decay_TE = rate_E * step_TE
        return decay_TE, step_TE if replace_TV is None else pointwise.sigmoid(replace_TV)

    def gate_heads(
        self, normed: Normed, read_TVD: Tensor, norm_D: Tensor, eps: float, gate_TX: Tensor, *, silu: bool
    ) -> Tensor:
        """(T, X) like the gate: float32 heads rounded, normalised each, times the gate's SiLU or sigmoid."""
        heads = normed(read_TVD.to(gate_TX.dtype).flatten(0, 1), norm_D, eps).view(gate_TX.shape)
        return (heads * (pointwise.silu if silu else pointwise.sigmoid)(gate_TX)).to(gate_TX.dtype)

    def norm_gated(
        self, normed: Normed, read_TVD: Tensor, norm_X: Tensor, eps: float, gate_TX: Tensor, groups: int
    ) -> Tensor:
        """(T, X) like the gate: float32 heads times the gate's SiLU, normalised in `groups` of all their numbers."""
        gated_TX = read_TVD.flatten(1) * pointwise.silu(gate_TX)
        parts = gated_TX.view(len(gated_TX) * groups, -1)
        ones = torch.ones(parts.shape[1], device=parts.device)
        return normed(parts, ones, eps).view(gated_TX.shape).to(gate_TX.dtype) * norm_X

    def centre_rows(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """`Ops.layer_norm`."""
        wide_bias = None if bias_H is None else bias_H.float()
        return F.layer_norm(x_TH.float(), weight_H.shape, weight_H.float(), wide_bias, eps).to(x_TH.dtype)

    def cap_rows(self, x_TV: Tensor, cap: float) -> Tensor:
        """cap tanh(x / cap) of float32 logits, which may be changed."""
        return pointwise.capped(x_TV, cap)
