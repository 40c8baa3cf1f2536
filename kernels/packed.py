"""Weights in whatever order a backend likes best; made once at load, opaque to everyone else.

The torch tensors are what the reference reads; `handle` is what a fast backend keeps instead.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PackedLinear:
    """y_TO = x_TI @ weight_OI^T + bias_O."""

    outputs: int
    inputs: int
    weight_OI: Tensor | None
    bias_O: Tensor | None
    handle: object | None = None


@dataclass(slots=True)
class PackedExperts:
    """E slots of a SwiGLU FFN: gate_up_EJH stacks gate over up (J = 2 I)."""

    experts: int
    hidden: int
    inner: int
    gate_up_EJH: Tensor | None
    down_EHI: Tensor | None
    handle: object | None = None
