"""LayerNorm, which every backend leaves to PyTorch: it has one fused kernel for it on every device."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    """In float32, rounded once."""
    wide_bias = None if bias_H is None else bias_H.float()
    return F.layer_norm(x_TH.float(), weight_H.shape, weight_H.float(), wide_bias, eps).to(x_TH.dtype)
