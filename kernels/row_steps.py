"""Steps of rows that few families have between products and norms: what a gate opens, how an odd FFN joins its
projections, caps of logits. Here in PyTorch; a backend has its own where its fused halves and stacks do the same.

Shapes: T tokens, A heads, D numbers of each, J joined, I inner, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

from afserve.kernels import pointwise
from afserve.kernels.packed import Gating


class RowSteps:
    def open_rows(self, x_TAD: Tensor, gate: Tensor, *, softplus: bool = False) -> Tensor:
        """x_TAD times the sigmoid of `gate`, or its softplus, rounded before and after. `gate` is (T, A) or (T, A D).
        x_TAD may be changed, and is not read again."""
        opened = (pointwise.softplus if softplus else pointwise.sigmoid)(gate).to(x_TAD.dtype)
        return x_TAD * opened.view(*x_TAD.shape[:2], -1)

    def join_rows(self, gating: Gating, both_TJ: Tensor) -> Tensor:
        """(T, I): what stands between an FFN's products, rounded step by step."""
        return gating.join(both_TJ)

    def centre_rows(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """`Ops.layer_norm`."""
        wide_bias = None if bias_H is None else bias_H.float()
        return F.layer_norm(x_TH.float(), weight_H.shape, weight_H.float(), wide_bias, eps).to(x_TH.dtype)

    def cap_rows(self, x_TV: Tensor, cap: float) -> Tensor:
        """cap tanh(x / cap) of float32 logits, which may be changed."""
        return pointwise.capped(x_TV, cap)
