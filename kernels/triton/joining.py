"""What lies between the products of an expert: biases, and how gate and up are joined (gating.py).

Shapes: E slots, H hidden, J = 2 I inner.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.packed import SWIGLU, Biases, ExpertShape, Gating


@dataclass(frozen=True, slots=True)
class Joint:
    """gate_up_bias_EJ and down_bias_EH in float32, or neither."""

    gating: Gating = SWIGLU
    gate_up_bias_EJ: Tensor | None = None
    down_bias_EH: Tensor | None = None

    @staticmethod
    def empty(shape: ExpertShape, device: torch.device) -> "Joint":
        """Biases of zeros, where slots have biases."""
        if not shape.bias:
            return Joint(shape.gating)
        sizes = (shape.slots, 2 * shape.inner), (shape.slots, shape.hidden)
        return Joint(shape.gating, *(torch.zeros(size, device=device) for size in sizes))

    def set(self, slot: int, biases: Biases | None) -> None:
        if biases is None or self.gate_up_bias_EJ is None or self.down_bias_EH is None:
            return
        self.gate_up_bias_EJ[slot].copy_(biases[0])
        self.down_bias_EH[slot].copy_(biases[1])

    def constants(self) -> dict[str, object]:
        """Of the kernel that joins gate and up."""
        limit = self.gating.limit
        return {
            "CLAMPED": limit is not None, "LIMIT": limit or 0.0, "ALPHA": self.gating.alpha,
            "BIAS": self.gate_up_bias_EJ is not None,
        }  # fmt: skip


PLAIN = Joint()


@triton.jit
def join(gate, up, CLAMPED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """NaN stays NaN."""
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * up
