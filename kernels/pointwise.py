"""Sigmoid, SiLU and softplus of float32, with the same bits for a number wherever it stands in a tensor.

torch computes the last few numbers of a run by another formula than the others, so that with its own functions a
token's bits depend on how many tokens stand beside it, and on the threads. Its exp and log1p have one formula for all.
"""

import torch
from torch import Tensor

_LINEAR = 20.0  # softplus(x) is x in float32 from here on


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) in float32, of any shape and floating dtype."""
    return x.float().neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x) in float32, of any shape and floating dtype."""
    wide = x.float()
    return wide / wide.neg().exp_().add_(1)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) in float32, of any shape and floating dtype."""
    wide = x.float()
    return torch.where(wide > _LINEAR, wide, wide.exp().log1p_())
