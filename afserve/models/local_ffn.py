"""What a layer has behind its attention half besides routed experts: a dense FFN or a shared expert, and the sums.

It knows its weights and the kernels, no residual stream but what it is given. Shapes: T tokens, H hidden, I inner.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from afserve.families.pattern.naming import bias_of
from afserve.kernels.ops import Ops
from afserve.kernels.packed import Gating, PackedLinear
from afserve.kernels.stack import FfnSteps
from afserve.models.experts import gating_of
from afserve.models.halves import LayerTensors, Part, SplitLoading
from afserve.spec import ModelSpec
from afserve.spec_parts import (
    BOUNDED_SWIGLU,
    CLAMPED_SWIGLU,
    SQUARED_RELU,
    DenseSpec,
    MoeSpec,
    projections_of,
)

Maps = tuple[PackedLinear, PackedLinear]


@dataclass(frozen=True, slots=True)
class NormsApart:
    """Of shared and routed experts that have their own."""

    before_shared_H: Tensor
    after_shared_H: Tensor
    after_routed_H: Tensor


class LocalFfn:
    """`maps` are gate over up, or up alone, and down; None without a shared expert or dense FFN."""

    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, split: SplitLoading | None = None
    ) -> None:
        naming, layer, h = tensors.naming, tensors.layer, spec.hidden
        ffn = spec.layer(layer).ffn
        self._ops, self._eps, self._spec = ops, spec.eps, ffn
        self._gating = _gating_of(ffn)
        if isinstance(ffn, DenseSpec):
            names, inner, bias = naming.dense(layer), ffn.inner, ffn.bias
        else:
            names, inner, bias = naming.shared_expert(layer), ffn.shared_inner, ffn.shared_bias
        used: tuple[str, ...] = names[-projections_of(ffn.activation) :]

        def part(own: LayerTensors, its: Ops) -> Part:
            maps, gating = _maps(used, (inner, h), bias, own), self._gating or Gating()
            return lambda normed_TH: its.mlp_part(normed_TH, *maps, gating)

        self._split = None if split is None else split.ffn(part, tensors, inner)
        whole = inner > 0 and self._split is None
        self.maps: Maps | None = _maps(used, (inner, h), bias, tensors) if whole else None
        self._gate = self._apart = None
        if isinstance(ffn, MoeSpec) and inner and ffn.shared_gate:
            self._gate = ops.pack_linear(tensors(f"{naming.moe}.{naming.shared_gate}", 1, h))
        if isinstance(ffn, MoeSpec) and ffn.apart:
            norms = naming.before_shared, naming.after_shared, naming.after_routed
            self._apart = NormsApart(*(tensors.norm(name, h) for name in norms))
        self._after_H = tensors.norm(naming.after_ffn, h) if ffn.normed else None
        self._scale = ffn.shared_scale if isinstance(ffn, MoeSpec) else 1.0

    @property
    def splits(self) -> bool:
        return self._split is not None

    def steps(self, row_scale: float) -> FfnSteps | None:
        """What there is of it besides `maps` and a sum, and a scale of the row behind; None for nothing."""
        gating, apart = self._gating if self.maps else None, self._apart
        there = self._gate, gating, apart, self._after_H
        if all(one is None for one in there) and self._scale == row_scale == 1.0:
            return None
        plain = FfnSteps(self._eps, self._gate, gating, self._scale, row_scale, after_H=self._after_H)
        if apart is None:
            return plain
        return replace(
            plain,
            before_shared_H=apart.before_shared_H,
            after_shared_H=apart.after_shared_H,
            after_routed_H=apart.after_routed_H,
        )

    @property
    def adds_at_once(self) -> bool:
        return self._after_H is not None or self._apart is not None

    def __call__(self, normed_TH: Tensor, x_TH: Tensor) -> Tensor | None:
        if self.maps is None and self._split is None:
            return None
        if self._apart is not None:
            normed_TH = self._ops.rms_norm(x_TH, self._apart.before_shared_H, self._eps)
        out_TH = self._made(normed_TH)
        if isinstance(self._spec, DenseSpec):
            return self._settled(out_TH)
        if self._scale != 1.0:
            out_TH = out_TH * self._scale
        if self._gate is None:
            return out_TH
        return self._ops.steps.open_rows(
            out_TH.unsqueeze(1), self._ops.linear(normed_TH, self._gate)
        ).squeeze(1)

    def _made(self, normed_TH: Tensor) -> Tensor:
        if self._split is not None:
            return self._split(normed_TH).to(normed_TH.dtype)
        assert self.maps is not None, "nothing is made without"
        gate_up, down = self.maps
        if self._gating is None:
            return self._ops.mlp(normed_TH, gate_up, down)
        return self._ops.linear(
            self._ops.steps.join_rows(self._gating, self._ops.linear(normed_TH, gate_up)), down
        )

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


def _gating_of(ffn: DenseSpec | MoeSpec) -> Gating | None:
    """Of a dense FFN or a shared expert; None for a plain SwiGLU."""
    if isinstance(ffn, DenseSpec):
        if ffn.activation == CLAMPED_SWIGLU:
            return Gating(ffn.limit, ffn.alpha)
        return Gating(squared=True) if ffn.activation == SQUARED_RELU else None
    if ffn.shared_limit is not None:
        return Gating(ffn.shared_limit, bounded=True)
    return None if ffn.activation in ("silu", BOUNDED_SWIGLU) else gating_of(ffn)


def _maps(names: tuple[str, ...], shape: tuple[int, int], bias: bool, tensors: LayerTensors) -> Maps:
    """Of gate, up and down, or of up and down; of a share its inner numbers."""
    *first, down = names
    (inner, hidden), read, dtype = shape, tensors.source.tensor, tensors.dtype
    dense, source, share = tensors.dense, tensors.source, tensors.share
    both_bias = down_bias = None
    if bias:
        parts = [read(bias_of(name), (inner,), dtype) for name in first]
        both_bias = torch.cat([share.cut_rows(part, share.count) for part in parts])
        down_bias = read(bias_of(down), (hidden,), dtype) if share.index == 0 else None
    if share.count > 1:
        return _share_of_maps(first, down, shape, (both_bias, down_bias), tensors)
    if len(first) > len(set(first)):
        gate_up = [dense.read(source, first[0], (2 * inner, hidden))]
    else:
        gate_up = [dense.read(source, name, shape) for name in first]
    down_weight = dense.read(source, down, (hidden, inner))
    return dense.linear(*gate_up, bias_O=both_bias), dense.linear(down_weight, bias_O=down_bias)


def _share_of_maps(
    first: list[str],
    down: str,
    shape: tuple[int, int],
    biases: tuple[Tensor | None, Tensor | None],
    tensors: LayerTensors,
) -> Maps:
    (inner, hidden), share, dense, source = shape, tensors.share, tensors.dense, tensors.source
    if len(first) > len(set(first)):
        both = dense.read(source, first[0], (2 * inner, hidden))
        gate_up = [both[:inner], both[inner:]]
    else:
        gate_up = [dense.read(source, name, shape) for name in first]
    own = [share.cut_rows(part, share.count) for part in gate_up]
    down_weight = tensors.columns(down, (hidden, inner), share.count)
    return dense.linear(*own, bias_O=biases[0]), dense.linear(down_weight, bias_O=biases[1])


class LatentRows:
    """The way of rows into the latent that routed experts work in, and of the sum back. Both are of the attention side,
    so what travels is as narrow as the latent. Source: NVIDIA Nemotron 3 (LatentMoE). Shape L: latent."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec, tensors: LayerTensors, ops: Ops) -> None:
        naming = tensors.naming
        self._ops, self._dtype = ops, tensors.dtype
        self._into = _latent_map(naming.into_latent, moe.latent, spec.hidden, moe, tensors)
        self._back = _latent_map(naming.from_latent, spec.hidden, moe.latent, moe, tensors)

    def lowered(self, normed_TH: Tensor) -> Tensor:
        """(T, L): what experts eat."""
        return self._ops.linear(normed_TH, self._into)

    def raised(self, sum_TL: Tensor) -> Tensor:
        """(T, H) of the experts' sums, which are rounded to the rows' dtype before."""
        return self._ops.linear(sum_TL.to(self._dtype), self._back)


def _latent_map(name: str, outputs: int, inputs: int, moe: MoeSpec, tensors: LayerTensors) -> PackedLinear:
    stem = f"{tensors.naming.moe}.{name}"
    bias = tensors(f"{stem}.bias", outputs) if moe.shared_bias else None
    return tensors.dense.linear(tensors.weight(f"{stem}.weight", outputs, inputs), bias_O=bias)
