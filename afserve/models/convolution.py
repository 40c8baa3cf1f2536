"""The attention half of a layer that is a gated short convolution: its state are the last inputs.

It knows its weights and the kernels, no requests and no network. Source: LFM2 (arXiv 2511.23404), transformers'
`modeling_lfm2`. Shapes: T tokens, H hidden, C channels, W taps.
"""

from torch import Tensor, float32

from afserve.kernels.cache import LayerCache, StateShape
from afserve.kernels.delta import convolve_rows
from afserve.kernels.layer import Half
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.halves import BoundHalf, LayerTensors
from afserve.models.rope import Rotary
from afserve.models.router import Router
from afserve.models.states import BoundStates, joined_half, over_states
from afserve.spec import ModelSpec


class ConvolutionHalf:
    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        self._ops, self._router, self._eps = ops, router, spec.eps
        self.keeps = StateShape(a.state_numbers)
        self._input_norm, self._post_norm = tensors.norms(h)
        channels, linear, stem = a.heads, tensors.linear, tensors.naming.linear
        into, out = (
            linear(f"{name}_proj.bias", n) if there else None
            for name, n, there in (("in", 3 * channels, a.qkv_bias), ("out", h, a.out_bias))
        )
        weights = tensors.weight(f"{stem}.in_proj.weight", 3 * channels, h)
        self._in = tensors.dense.linear(weights, bias_O=into)
        self._out = tensors.dense.linear(tensors.weight(f"{stem}.out_proj.weight", h, channels), bias_O=out)
        self._conv_WC = linear("conv.weight", channels, 1, a.taps)[:, 0].T.float().contiguous()
        self._bias_C = linear("conv.bias", channels).to(float32) if a.qkv_bias else None

    def bind(self, cache: LayerCache) -> BoundHalf:
        (cache_NBE,) = cache
        return BoundStates(self, cache_NBE)

    def run(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Half:
        ops = self._ops
        mixed_TH = self._mix(ops.rms_norm(x_TH, self._input_norm, self._eps), cache_NBE, batch)
        return joined_half(ops, ops.add_rms_norm(x_TH, mixed_TH, self._post_norm, self._eps), self._router)

    def _mix(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        """What the layer adds to the residual stream: a gate before the convolution, and one behind it."""
        before_TC, behind_TC, value_TC = self._ops.linear(x_TH, self._in).chunk(3, 1)
        gated_TC = before_TC * value_TC

        def computed(row_R: Tensor | None, states_NBE: Tensor, part: PagedBatch) -> Tensor:
            rows = gated_TC if row_R is None else gated_TC[row_R]
            state_NF, size = self.keeps.of_blocks(states_NBE), states_NBE.shape[1]
            return convolve_rows(rows, self._conv_WC, state_NF, size, part)

        seen_TC = over_states(computed, self.keeps, cache_NBE, batch)
        if self._bias_C is not None:
            seen_TC = seen_TC + self._bias_C
        return self._ops.linear(behind_TC * seen_TC.to(x_TH.dtype), self._out)
