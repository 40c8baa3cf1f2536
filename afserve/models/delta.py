"""The attention half of a gated delta net's layer: a state of fixed size in the place of keys and values.

It knows its weights and the kernels, no requests and no network; where states lie is in kernels/delta.py. Sources:
Gated Delta Networks (arXiv 2412.06464), transformers' `modeling_qwen3_next`. Shapes: T tokens, H hidden, C channels of
the convolution, V value heads, D value size.
"""

import torch
from torch import Tensor

from afserve.kernels.cache import LayerCache, StateShape
from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.layer import Half
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.pointwise import sigmoid, silu, softplus
from afserve.models.dense import Weight
from afserve.models.halves import BoundHalf, LayerTensors
from afserve.models.rope import Rotary
from afserve.models.router import Router
from afserve.models.states import BoundStates, joined_half, over_states
from afserve.spec import ModelSpec


class DeltaHalf:
    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        self._shape = DeltaShape(a.kv_heads, a.heads, a.head_dim, a.value_dim, a.taps)
        self._ops, self._router, self._eps = ops, router, spec.eps
        self.keeps = StateShape(self._shape.numbers)
        self._input_norm, self._post_norm = tensors.norms(h)
        self._values = a.heads * a.value_dim
        self._down = tensors.dense.linear(*_projections(self._shape, h, tensors))
        conv_C1W = tensors.linear("conv1d.weight", self._shape.channels, 1, a.taps)
        self._layer = DeltaLayer(self._shape, conv_C1W[:, 0].T.float().contiguous())
        wide = LayerTensors(tensors.source, tensors.naming, tensors.layer, torch.float32, tensors.dense)
        self._rate_V = -wide.linear("A_log", a.heads).exp()
        self._step_V = wide.linear("dt_bias", a.heads)
        self._norm_D = tensors.linear("norm.weight", a.value_dim)
        self._out = tensors.dense.linear(tensors.linear("out_proj.weight", h, self._values))

    def bind(self, cache: LayerCache) -> BoundHalf:
        (cache_NBE,) = cache
        return BoundStates(self, cache_NBE)

    def run(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Half:
        ops, router = self._ops, self._router
        mixed = self._mix(ops.rms_norm(x_TH, self._input_norm, self._eps), cache_NBE, batch)
        return joined_half(ops, ops.add_rms_norm(x_TH, mixed, self._post_norm, self._eps), router)

    def _mix(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        """What the layer adds to the residual stream."""
        ops, heads = self._ops, self._shape.value_heads
        widths = (self._shape.channels, self._values, heads, heads)
        mixed_TC, gate, beta_TV, decay_TV = ops.linear(x_TH, self._down).split(widths, 1)
        rows = DeltaRows(mixed_TC, self._rate_V * softplus(decay_TV.float() + self._step_V), sigmoid(beta_TV))

        def computed(row_R: Tensor | None, states_NBE: Tensor, part: PagedBatch) -> Tensor:
            return ops.delta(rows if row_R is None else rows.of(row_R), self._layer, states_NBE, part)

        read_TVD = over_states(computed, self.keeps, cache_NBE, batch).to(x_TH.dtype)
        normed = ops.rms_norm(read_TVD.flatten(0, 1), self._norm_D, self._eps).view(gate.shape)
        return ops.linear((normed * silu(gate)).to(x_TH.dtype), self._out)


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
