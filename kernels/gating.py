"""How an FFN joins its gate and its up projection, as a value that every backend understands."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gating:
    """silu(gate) * up; with a `limit` it is gate * sigmoid(alpha * gate) * (up + 1), where the gate is at most `limit`
    and up is within it on both sides (gpt-oss)."""

    limit: float | None = None
    alpha: float = 1.0

    def join(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (gate * self.alpha).sigmoid() * (up + 1)


SWIGLU = Gating()
