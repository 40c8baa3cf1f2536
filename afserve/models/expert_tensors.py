"""The tensors of one routed expert, out of whichever layout a checkpoint has: its own, or those of all experts.

It reads and turns; it keeps nothing. Shapes: E experts, H hidden, I inner, J = 2 I.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.families.naming import Naming, Stacked, bias_of
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Gate over up, and down; both biases or none."""

    gate_up_JH: Tensor
    down_HI: Tensor
    gate_up_bias_J: Tensor | None = None
    down_bias_H: Tensor | None = None


def read_expert(
    spec: ModelSpec, source: TensorSource, naming: Naming, layer: int, expert: int, dtype: torch.dtype
) -> ExpertTensors:
    """Of decoder layer `layer`. Raises CheckpointError."""
    stacked = naming.stacked
    if stacked is not None and stacked.sometimes and any(map(source.has, naming.expert(layer, expert))):
        stacked = None
    if stacked is not None:
        return _Reader(spec, source, naming, stacked, layer, expert, dtype).read()
    hidden, inner = spec.hidden, spec.moe.inner
    gate, up, down = naming.expert(layer, expert)
    both = torch.cat([source.tensor(name, (inner, hidden), dtype) for name in (gate, up)])
    down_HI = source.tensor(down, (hidden, inner), dtype)
    if not spec.moe.expert_bias:
        return ExpertTensors(both, down_HI)
    both_bias = torch.cat([source.tensor(bias_of(name), (inner,), dtype) for name in (gate, up)])
    return ExpertTensors(both, down_HI, both_bias, source.tensor(bias_of(down), (hidden,), dtype))


@dataclass(frozen=True, slots=True)
class _Reader:
    """One expert out of tensors of all experts."""

    spec: ModelSpec
    source: TensorSource
    naming: Naming
    layout: Stacked
    layer: int
    expert: int
    dtype: torch.dtype

    def read(self) -> ExpertTensors:
        hidden, inner = self.spec.hidden, self.spec.moe.inner
        if self.layout.flat:
            gate, up, down = (
                self._rows(name, inner, hidden)
                for name in (self.layout.gate_up, self.layout.up, self.layout.down)
            )
            return ExpertTensors(torch.cat((gate, up)), down.t().contiguous())
        both = self._matrix(self.layout.gate_up, 2 * inner, hidden)
        down = self._matrix(self.layout.down, hidden, inner)
        if not self.spec.moe.expert_bias:
            return ExpertTensors(self._gate_first(both), down)
        both_bias = self._one(f"{self.layout.gate_up}_bias", (2 * inner,))
        down_bias = self._one(f"{self.layout.down}_bias", (hidden,))
        return ExpertTensors(self._gate_first(both), down, self._gate_first(both_bias), down_bias)

    def _matrix(self, name: str, outputs: int, inputs: int) -> Tensor:
        if self.layout.transposed:
            return self._one(name, (inputs, outputs)).t().contiguous()
        return self._one(name, (outputs, inputs))

    def _gate_first(self, both: Tensor) -> Tensor:
        return torch.cat((both[0::2], both[1::2])) if self.layout.interleaved else both

    def _one(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Without the dimension of experts."""
        whole = (self.spec.experts, *shape)
        return self.source.rows(self._name(name), whole, self.expert, 1, self.dtype).squeeze(0)

    def _rows(self, name: str, inner: int, hidden: int) -> Tensor:
        whole = (self.spec.experts * inner, hidden)
        return self.source.rows(self._name(name), whole, self.expert * inner, inner, self.dtype)

    def _name(self, rest: str) -> str:
        return self.naming.in_moe(self.layer, rest)
