"""Which mixer a layer with a state has."""

from collections.abc import Callable

from afserve.kernels.ops import Ops
from afserve.models.convolution import ConvolutionMixer
from afserve.models.delta import ChannelDeltaMixer, DeltaMixer, MambaMixer
from afserve.models.halves import LayerTensors
from afserve.models.router import Router
from afserve.models.states import Mixer, StateHalf
from afserve.spec import ModelSpec

_BY_RULE: dict[str, Callable[[ModelSpec, LayerTensors, Ops], Mixer]] = {
    "head": DeltaMixer,
    "channel": ChannelDeltaMixer,
    "sum": MambaMixer,
}


def load_states(spec: ModelSpec, tensors: LayerTensors, ops: Ops, router: Router | None) -> StateHalf:
    a = spec.layer(tensors.layer).attention
    make = ConvolutionMixer if a.kind == "conv" else _BY_RULE[a.rule]
    return StateHalf(spec, tensors, ops, router, make(spec, tensors, ops))
