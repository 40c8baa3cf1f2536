"""What a layer has behind its attention half besides routed experts: a dense FFN or a shared expert, and the sums.

It knows its weights and the kernels, no residual stream but what it is given. Shapes: T tokens, H hidden, I inner.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.families.pattern.naming import bias_of
from afserve.kernels.ops import Ops
from afserve.kernels.packed import Gating, PackedLinear
from afserve.kernels.pointwise import sigmoid
from afserve.models.experts import gating_of
from afserve.models.halves import LayerTensors
from afserve.spec import ModelSpec
from afserve.spec_parts import BOUNDED_SWIGLU, DenseSpec, MoeSpec

Maps = tuple[PackedLinear, PackedLinear]


@dataclass(frozen=True, slots=True)
class NormsApart:
    """Of shared and routed experts that have their own."""

    before_shared_H: Tensor
    after_shared_H: Tensor
    after_routed_H: Tensor


class LocalFfn:
    """`maps` are gate over up, and down; None without a shared expert."""

    def __init__(self, spec: ModelSpec, tensors: LayerTensors, ops: Ops) -> None:
        naming, layer, h = tensors.naming, tensors.layer, spec.hidden
        ffn = spec.layer(layer).ffn
        self._ops, self._eps, self._spec = ops, spec.eps, ffn
        if isinstance(ffn, DenseSpec):
            self.maps: Maps | None = _maps(naming.dense(layer), (ffn.inner, h), ffn.bias, tensors)
        else:
            names, shape = naming.shared_expert(layer), (ffn.shared_inner, h)
            self.maps = _maps(names, shape, ffn.shared_bias, tensors) if ffn.shared_inner else None
        self._gate = self._apart = None
        if isinstance(ffn, MoeSpec) and self.maps is not None and ffn.shared_gate:
            self._gate = ops.pack_linear(tensors(f"{naming.moe}.{naming.shared_gate}", 1, h))
        if isinstance(ffn, MoeSpec) and ffn.apart:
            names = naming.before_shared, naming.after_shared, naming.after_routed
            self._apart = NormsApart(*(tensors.norm(name, h) for name in names))
        self._after_H = tensors.norm(naming.after_ffn, h) if ffn.normed else None
        self._gating = _gating_of_shared(ffn) if isinstance(ffn, MoeSpec) else None
        self._scale = ffn.shared_scale if isinstance(ffn, MoeSpec) else 1.0

    @property
    def is_plain(self) -> bool:
        """Whether `maps` and a sum are all of it."""
        odd = (self._gate, self._apart, self._after_H, self._gating if self.maps else None)
        return all(one is None for one in odd) and self._scale == 1.0

    @property
    def adds_at_once(self) -> bool:
        return self._after_H is not None or self._apart is not None

    def __call__(self, normed_TH: Tensor, x_TH: Tensor) -> Tensor | None:
        if self.maps is None:
            return None
        if self._apart is not None:
            normed_TH = self._ops.rms_norm(x_TH, self._apart.before_shared_H, self._eps)
        out_TH = self._joined(normed_TH, *self.maps)
        if isinstance(self._spec, DenseSpec):
            return self._settled(out_TH)
        if self._scale != 1.0:
            out_TH = out_TH * self._scale
        if self._gate is None:
            return out_TH
        return out_TH * sigmoid(self._ops.linear(normed_TH, self._gate)).to(out_TH.dtype)

    def _joined(self, normed_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        if self._gating is None:
            return self._ops.mlp(normed_TH, gate_up, down)
        gate_TI, up_TI = self._ops.linear(normed_TH, gate_up).chunk(2, 1)
        return self._ops.linear(self._gating.join(gate_TI, up_TI), down)

    def whole_sum(self, routed_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        norms = self._apart
        if norms is not None:
            routed_TH = self._normed(routed_TH, norms.after_routed_H)
            shared_TH = None if shared_TH is None else self._normed(shared_TH, norms.after_shared_H)
        return self._settled(routed_TH if shared_TH is None else routed_TH + shared_TH)

    def _settled(self, sum_TH: Tensor) -> Tensor:
        return sum_TH if self._after_H is None else self._normed(sum_TH, self._after_H)

    def _normed(self, x_TH: Tensor, weight_H: Tensor) -> Tensor:
        return self._ops.rms_norm(x_TH.to(weight_H.dtype), weight_H, self._eps)


def _gating_of_shared(moe: MoeSpec) -> Gating | None:
    """None for a plain SwiGLU."""
    if moe.shared_limit is not None:
        return Gating(moe.shared_limit, bounded=True)
    return None if moe.activation in ("silu", BOUNDED_SWIGLU) else gating_of(moe)


def _maps(names: tuple[str, str, str], shape: tuple[int, int], bias: bool, tensors: LayerTensors) -> Maps:
    gate, up, down = names
    (inner, hidden), read, dtype = shape, tensors.source.tensor, tensors.dtype
    dense, source = tensors.dense, tensors.source
    both_bias = down_bias = None
    if bias:
        both_bias = torch.cat([read(bias_of(name), (inner,), dtype) for name in (gate, up)])
        down_bias = read(bias_of(down), (hidden,), dtype)
    if gate == up:
        gate_up = [dense.read(source, gate, (2 * inner, hidden))]
    else:
        gate_up = [dense.read(source, name, shape) for name in (gate, up)]
    down_weight = dense.read(source, down, (hidden, inner))
    return dense.linear(*gate_up, bias_O=both_bias), dense.linear(down_weight, bias_O=down_bias)
