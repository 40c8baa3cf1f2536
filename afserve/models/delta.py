"""The mixers whose states are matrices: gated delta nets that forget by head, or as Kimi's by channel, and Mamba-2.

They know their weights and the kernels, no requests and no network; where states lie is in kernels/delta.py. Sources:
Gated Delta Networks (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692), Mamba-2 (arXiv 2405.21060), transformers'
`modeling_qwen3_next`, `modeling_kimi_linear` and `modeling_granitemoehybrid`. Shapes: T tokens, H hidden, C channels of
the convolution, V value heads, D value size, E decays.
"""

import torch
from torch import Tensor

from afserve.kernels.cache import StateShape
from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.layer import MixerParts
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.dense import Weight
from afserve.models.halves import LayerTensors
from afserve.models.states import moved_states
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec


class DeltaMixer:
    def __init__(self, spec: ModelSpec, tensors: LayerTensors, ops: Ops) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        self._shape = shape = _shape_of(a)
        self._ops, self._eps, self.state = ops, spec.eps, StateShape(shape.numbers)
        self._values = a.heads * a.value_dim
        self._down = tensors.dense.linear(*_projections(shape, h, tensors))
        conv_C1W = tensors.linear("conv1d.weight", shape.channels, 1, a.taps)
        self._layer = DeltaLayer(shape, _taps_of(conv_C1W))
        wide = _in_float32(tensors)
        self._rate_V = -wide.linear("A_log", a.heads).exp()
        self._step_V = wide.linear("dt_bias", a.heads)
        self._norm_D = tensors.linear("norm.weight", a.value_dim)
        self._out = tensors.dense.linear(tensors.linear("out_proj.weight", h, self._values))

    @property
    def parts(self) -> MixerParts:
        decays = self._layer, self._rate_V, self._step_V
        return MixerParts("head", self._down, self._out, (), *decays, None, self._norm_D)

    def __call__(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        ops, heads = self._ops, self._shape.value_heads
        widths = (self._shape.channels, self._values, heads, heads)
        mixed_TC, gate, beta_TV, decay_TV = ops.linear(x_TH, self._down).split(widths, 1)
        kept = ops.steps.forget_rows(decay_TV, beta_TV, self._step_V, self._rate_V, None)
        read_TVD = moved_states(ops, DeltaRows(mixed_TC, *kept), self._layer, cache_NBE, batch)
        out = ops.steps.gate_heads(ops.rms_norm, read_TVD, self._norm_D, self._eps, gate, silu=True)
        return ops.linear(out, self._out)


class ChannelDeltaMixer:
    """Kimi Delta Attention: decays and the output's gate are made by two maps each, one behind the other, or by one
    that is `direct`. With a `floor` a decay's logarithm is floor sigmoid(exp(A) (f + b)), else -exp(A) softplus(f + b)
    (transformers' `modeling_kimi_linear`, `modeling_bailing_hybrid`)."""

    def __init__(self, spec: ModelSpec, tensors: LayerTensors, ops: Ops) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        self._shape = shape = _shape_of(a)
        self._ops, self._eps, self.state = ops, spec.eps, StateShape(shape.numbers)
        stem, linear, dense = tensors.naming.linear, tensors.linear, tensors.dense
        sizes = dict(zip("qkv", shape.widths, strict=True))
        made = {"f": shape.decays, "g": a.heads * a.value_dim}
        first = made if a.direct else dict.fromkeys(("f_a", "g_a"), a.head_dim)
        self._widths = (shape.channels, a.heads, *first.values())
        self._down = dense.linear(
            *(
                tensors.weight(f"{stem}.{part}_proj.weight", n, h)
                for part, n in {**sizes, "b": a.heads, **first}.items()
            )
        )
        self._second = [
            dense.linear(tensors.weight(f"{stem}.{part}_b_proj.weight", n, a.head_dim))
            for part, n in made.items()
            if not a.direct
        ]
        taps = [linear(f"{part}_conv1d.weight", n, 1, a.taps) for part, n in sizes.items()]
        self._layer = DeltaLayer(shape, _taps_of(torch.cat(taps)))
        wide = _in_float32(tensors)
        rate_V = wide.linear("A_log", *((a.heads,) if a.direct else (1, 1, a.heads, 1))).exp().flatten()
        self._rate_E, self._floor = rate_V.repeat_interleave(a.head_dim), a.floor
        self._forget_E = self._rate_E if a.floor is not None else -self._rate_E
        self._step_E = wide.linear("dt_bias", shape.decays)
        self._norm_D = linear("o_norm.weight", a.value_dim)
        self._out = dense.linear(
            tensors.weight(f"{stem}.{tensors.naming.out}.weight", h, a.heads * a.value_dim)
        )

    @property
    def parts(self) -> MixerParts:
        decays = self._layer, self._rate_E, self._step_E
        return MixerParts(
            "channel", self._down, self._out, tuple(self._second), *decays, self._floor, self._norm_D
        )

    def __call__(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        ops = self._ops
        mixed_TC, beta_TV, forget, gate = ops.linear(x_TH, self._down).split(self._widths, 1)
        if self._second:
            both = zip((forget, gate), self._second, strict=True)
            forget, gate = (ops.linear(part.contiguous(), second) for part, second in both)
        kept = ops.steps.forget_rows(forget, beta_TV, self._step_E, self._forget_E, self._floor)
        read_TVD = moved_states(ops, DeltaRows(mixed_TC, *kept), self._layer, cache_NBE, batch)
        out = ops.steps.gate_heads(ops.rms_norm, read_TVD, self._norm_D, self._eps, gate, silu=False)
        return ops.linear(out, self._out)


class MambaMixer:
    """Keys are what Mamba-2 calls B, queries C, values x."""

    def __init__(self, spec: ModelSpec, tensors: LayerTensors, ops: Ops) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        shape, stem = _shape_of(a), tensors.naming.linear
        self._ops, self._eps, self.state = ops, spec.eps, StateShape(shape.numbers)
        keys, _, values = shape.widths
        self._widths, self._groups = (shape.channels, values, a.heads), a.kv_heads
        first = torch.arange(shape.channels, device=ops.device)
        # checkpoints have values, keys, queries
        order_C = torch.cat((first[-keys:], first[values:-keys], first[:values]))
        whole = tensors.weight(f"{stem}.in_proj.weight", values + shape.channels + a.heads, h)
        gate, steps = whole[:values], whole[values + shape.channels :]
        self._down = tensors.dense.linear(whole[values + order_C], gate, steps)
        wide = _in_float32(tensors)
        conv_C1W = wide.linear("conv1d.weight", shape.channels, 1, a.taps)[order_C]
        bias_C = wide.linear("conv1d.bias", shape.channels)[order_C] if a.qkv_bias else None
        self._layer = DeltaLayer(shape, _taps_of(conv_C1W), bias_C, wide.linear("D", a.heads))
        self._rate_V = -wide.linear("A_log", a.heads).exp()
        self._step_V = wide.linear("dt_bias", a.heads)
        self._norm = tensors.linear("norm.weight", values)
        out = tensors.weight(f"{stem}.out_proj.weight", h, values)
        if a.out_scale != 1.0:
            out = tensors.linear("out_proj.weight", h, values) * a.out_scale
        self._out = tensors.dense.linear(out)

    @property
    def parts(self) -> MixerParts:
        decays = self._layer, self._rate_V, self._step_V
        return MixerParts("sum", self._down, self._out, (), *decays, None, self._norm, self._groups)

    def __call__(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        ops = self._ops
        mixed_TC, gate, step_TV = ops.linear(x_TH, self._down).split(self._widths, 1)
        kept = ops.steps.forget_rows(step_TV, None, self._step_V, self._rate_V, None)
        read_TVD = moved_states(ops, DeltaRows(mixed_TC, *kept), self._layer, cache_NBE, batch)
        out = ops.steps.norm_gated(ops.rms_norm, read_TVD, self._norm, self._eps, gate, self._groups)
        return ops.linear(out, self._out)


def _shape_of(a: AttentionSpec) -> DeltaShape:
    return DeltaShape(a.kv_heads, a.heads, a.head_dim, a.value_dim, a.taps, a.rule)


def _taps_of(conv_C1W: Tensor) -> Tensor:
    """(W, C) as the kernels have them."""
    return conv_C1W[:, 0].T.float().contiguous()


def _in_float32(tensors: LayerTensors) -> LayerTensors:
    """Rates and steps are never rounded."""
    return LayerTensors(tensors.source, tensors.naming, tensors.layer, torch.float32, tensors.dense)


def _projections(shape: DeltaShape, h: int, tensors: LayerTensors) -> list[Weight]:
    """Parts of one weight for q, k, v, the output's gate, beta and decay; checkpoints hold them by key heads, or
    apart."""
    keys, heads = shape.key_heads, shape.value_heads
    if tensors.naming.linear_parts:
        sizes = {"qkv": shape.channels, "z": heads * shape.value, "b": heads, "a": heads}
        stem = tensors.naming.linear
        return [tensors.weight(f"{stem}.in_proj_{part}.weight", n, h) for part, n in sizes.items()]
    values = heads // keys * shape.value
    widths = (shape.key, shape.key, values, values)
    four = tensors.linear("in_proj_qkvz.weight", keys * sum(widths), h).view(keys, -1, h).split(widths, 1)
    two = tensors.linear("in_proj_ba.weight", 2 * heads, h).view(keys, 2, -1, h).unbind(1)
    return [part.reshape(-1, h) for part in (*four, *two)]
