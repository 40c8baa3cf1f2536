"""Sigmoid, SiLU, GELU, softplus and caps of float32, with the same bits for a number wherever it stands in a tensor.

torch computes the last few numbers of a run by another formula than the others, so that with its own functions a
token's bits depend on how many tokens stand beside it, and on the threads. Its exp and log1p have one formula for all.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_GELU = (8.0 / math.pi) ** 0.5
_LINEAR = 20.0  # softplus(x) is x in float32 from here on


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) in float32, of any shape and floating dtype."""
    return x.float().neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x) in float32, of any shape and floating dtype."""
    wide = x.float()
    return wide / wide.neg().exp_().add_(1)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh, in float32: x sigmoid(sqrt(8 / pi) (x + 0.044715 x^3))."""
    wide = x.float()
    return wide * sigmoid((wide * wide * wide * 0.044715 + wide) * _GELU)


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap) in float32, of any shape and floating dtype."""
    return sigmoid(x.float() * (2.0 / cap)).mul_(2.0).sub_(1.0).mul_(cap)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) in float32, of any shape and floating dtype."""
    wide = x.float()
    return torch.where(wide > _LINEAR, wide, wide.exp().log1p_())


@dataclass(frozen=True, slots=True)
class LogScale:
    """Of the queries of each head, at position p: scale ln(1 + p) + bias (scalable softmax, arXiv 2501.19399)."""

    scale_A: Tensor
    bias_A: Tensor

    def at(self, position_T: Tensor) -> Tensor:
        """(T, A, 1) float32."""
        log_T1 = position_T.float().log1p()[:, None]
        return (self.scale_A.float() * log_T1 + self.bias_A.float())[:, :, None]
