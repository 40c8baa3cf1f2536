"""The mixer of a layer that is a gated short convolution: its state are the last inputs.

It knows its weights and the kernels, no requests and no network. Source: LFM2 (arXiv 2511.23404), transformers'
`modeling_lfm2`. Shapes: T tokens, H hidden, C channels, W taps.
"""

from torch import Tensor, float32

from afserve.kernels.cache import StateShape
from afserve.kernels.delta import convolve_rows
from afserve.kernels.layer import MixerParts
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.halves import LayerTensors
from afserve.models.states import over_states
from afserve.spec import ModelSpec


class ConvolutionMixer:
    def __init__(self, spec: ModelSpec, tensors: LayerTensors, ops: Ops) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        self._ops, self.state = ops, StateShape(a.state_numbers)
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

    @property
    def parts(self) -> MixerParts:
        return MixerParts("convolution", self._in, self._out, conv_WC=self._conv_WC, bias_C=self._bias_C)

    def __call__(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        """A gate before the convolution, and one behind it."""
        before_TC, behind_TC, value_TC = self._ops.linear(x_TH, self._in).chunk(3, 1)
        gated_TC = before_TC * value_TC

        def computed(row_R: Tensor | None, states_NBE: Tensor, part: PagedBatch) -> Tensor:
            rows = gated_TC if row_R is None else gated_TC[row_R]
            state_NF, size = self.state.of_blocks(states_NBE), states_NBE.shape[1]
            return convolve_rows(rows, self._conv_WC, state_NF, size, part)

        seen_TC = over_states(computed, self.state, cache_NBE, batch)
        if self._bias_C is not None:
            seen_TC = seen_TC + self._bias_C
        return self._ops.linear(behind_TC * seen_TC.to(x_TH.dtype), self._out)
