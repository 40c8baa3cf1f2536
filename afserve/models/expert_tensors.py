"""The tensors of one routed expert, out of whichever layout a checkpoint has: its own, or those of all experts.

It reads and turns; it keeps nothing. Shapes: E experts, H hidden or the width of their latent, I inner, J = 2 I,
or I without gates.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.families.pattern.naming import Naming, StackedNames, bias_of
from afserve.kernels.formats.ggml import GgmlRows, joined
from afserve.kernels.grouped import Grouped
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec
from afserve.spec_parts import projections_of

ExpertPlace = tuple[ModelSpec, TensorSource, Naming, int, int]
"""Whose tensors, their source, what they are called, the decoder layer, the expert."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Gate over up, or up alone, and down; both biases or none."""

    gate_up_JH: Tensor
    down_HI: Tensor
    gate_up_bias_J: Tensor | None = None
    down_bias_H: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertCodes:
    """The same in 4 bits, as they are stored."""

    gate_up: Grouped
    down: Grouped
    gate_up_bias_J: Tensor | None = None
    down_bias_H: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The same in ggml's types, as they are stored."""

    gate_up: GgmlRows
    down: GgmlRows
    biases: tuple[Tensor, Tensor] | None = None


def parts_of(
    spec: ModelSpec, source: TensorSource, naming: Naming, layer: int, expert: int
) -> tuple[tuple[str, ...], int | None]:
    """Names of an expert's matrices, and the row of each that is this expert's where they are of all experts."""
    stacked = _stacked(source, naming, layer, expert)
    if stacked is None:
        return _names(spec, naming, layer, expert), None
    names = (stacked.gate_up, stacked.up, stacked.down) if not stacked.flat else ()
    return tuple(naming.in_moe(layer, name) for name in names if name), expert


def read_halves(
    spec: ModelSpec, source: TensorSource, naming: Naming, layer: int, expert: int, dtype: torch.dtype
) -> Iterator[list[Tensor]]:
    """`read_expert` of one with tensors of its own and without biases: gate and up, or up alone, and then down."""
    hidden, inner = spec.expert_width, spec.moe.inner
    *first, down = _names(spec, naming, layer, expert)
    yield [source.tensor(name, (inner, hidden), dtype) for name in first]
    yield [source.tensor(down, (hidden, inner), dtype)]


def read_expert(
    spec: ModelSpec, source: TensorSource, naming: Naming, layer: int, expert: int, dtype: torch.dtype
) -> ExpertTensors:
    """Of decoder layer `layer`. Raises CheckpointError."""
    stacked = _stacked(source, naming, layer, expert)
    if stacked is not None:
        return _Reader(spec, source, naming, stacked, layer, expert, dtype).read()
    hidden, inner = spec.expert_width, spec.moe.inner
    *first, down = _names(spec, naming, layer, expert)
    both = torch.cat([source.tensor(name, (inner, hidden), dtype) for name in first])
    down_HI = source.tensor(down, (hidden, inner), dtype)
    return ExpertTensors(both, down_HI, *_biases(spec, source, naming, layer, expert, dtype))


def read_rows(
    spec: ModelSpec, source: TensorSource, naming: Naming, layer: int, expert: int, dtype: torch.dtype
) -> ExpertRows:
    """`read_expert` where `source` has ggml's types. Raises CheckpointError where this expert is stored otherwise than
    the layer's first one."""
    hidden, inner = spec.expert_width, spec.moe.inner
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    named = zip(naming.expert(layer, expert), shapes, strict=True)
    gate, up, down = (source.ggml(*one) for one in named)
    if gate is None or up is None or down is None or gate.kind != up.kind:
        raise CheckpointError(
            f"expert {expert} of layer {layer} is stored otherwise than the layer's first one"
        )
    both = joined((gate, up))[0]
    return ExpertRows(both, down, _biases(spec, source, naming, layer, expert, dtype) or None)


def read_codes(
    spec: ModelSpec,
    source: TensorSource,
    naming: Naming,
    layer: int,
    expert: int,
    dtype: torch.dtype,
    size: int,
) -> ExpertCodes:
    """`read_expert` in groups of `size` inputs, where `source` has these."""
    stacked = _stacked(source, naming, layer, expert)
    if stacked is not None and not stacked.flat:
        return _Reader(spec, source, naming, stacked, layer, expert, dtype).read_codes(size)
    hidden, inner = spec.expert_width, spec.moe.inner
    *first, last = _names(spec, naming, layer, expert)
    named = [*((name, (inner, hidden)) for name in first), (last, (hidden, inner))]
    *parts, down = (source.int4(name, shape, size) for name, shape in named)
    both = _over(parts)
    return ExpertCodes(both, down, *_biases(spec, source, naming, layer, expert, dtype))


def _stacked(source: TensorSource, naming: Naming, layer: int, expert: int) -> StackedNames | None:
    """The layout of tensors of all experts, if this expert lies in such."""
    found = naming.stacked
    if found is None or not found.sometimes:
        return found
    whole = naming.in_moe(layer, found.gate_up)
    apart = any(map(source.has_tensor, naming.expert(layer, expert))) or not source.has_tensor(whole)
    return None if apart else found  # codes of an expert have other names than its weights


def _names(spec: ModelSpec, naming: Naming, layer: int, expert: int) -> tuple[str, ...]:
    """Without the gate's, where there is none."""
    return naming.expert(layer, expert)[-projections_of(spec.moe.activation) :]


def _biases(
    spec: ModelSpec, source: TensorSource, naming: Naming, layer: int, expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[()]:
    """Of an expert with tensors of its own."""
    if not spec.moe.expert_bias:
        return ()
    *first, down = map(bias_of, _names(spec, naming, layer, expert))
    both = torch.cat([source.tensor(name, (spec.moe.inner,), dtype) for name in first])
    return both, source.tensor(down, (spec.expert_width,), dtype)


def _over(parts: list[Grouped]) -> Grouped:
    code, scale = torch.cat([part.code_OI for part in parts]), torch.cat([part.scale_OG for part in parts])
    return Grouped(code, scale, parts[0].size)


@dataclass(frozen=True, slots=True)
class _Reader:
    """One expert out of tensors of all experts."""

    spec: ModelSpec
    source: TensorSource
    naming: Naming
    layout: StackedNames
    layer: int
    expert: int
    dtype: torch.dtype

    def read(self) -> ExpertTensors:
        hidden, inner = self.spec.expert_width, self.spec.moe.inner
        if self.layout.flat:
            gate, up, down = (
                self._rows(name, inner, hidden)
                for name in (self.layout.gate_up, self.layout.up, self.layout.down)
            )
            return ExpertTensors(torch.cat((gate, up)), down.t().contiguous())
        if self.layout.up:
            parts = (self.layout.gate_up, self.layout.up)
            both = torch.cat([self._matrix(name, inner, hidden) for name in parts])
        else:
            both = self._gate_first(self._matrix(self.layout.gate_up, 2 * inner, hidden))
        return ExpertTensors(both, self._matrix(self.layout.down, hidden, inner), *self._biases())

    def read_codes(self, size: int) -> ExpertCodes:
        hidden, inner, experts = self.spec.expert_width, self.spec.moe.inner, self.spec.experts
        both, down = (
            self.source.int4_of(self._name(name), (experts, *shape), self.expert, size)
            for name, shape in (
                (self.layout.gate_up, (2 * inner, hidden)),
                (self.layout.down, (hidden, inner)),
            )
        )
        ordered = Grouped(self._gate_first(both.code_OI), self._gate_first(both.scale_OG), size)
        return ExpertCodes(ordered, down, *self._biases())

    def _biases(self) -> tuple[Tensor, Tensor] | tuple[()]:
        if not self.spec.moe.expert_bias:
            return ()
        both = self._one(f"{self.layout.gate_up}_bias", (2 * self.spec.moe.inner,))
        return self._gate_first(both), self._one(f"{self.layout.down}_bias", (self.spec.expert_width,))

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
