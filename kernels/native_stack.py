"""All layers of a model as one call of the native library.

A stack is made where every half is fused and every FFN is the library's; else there is none, and halves and FFNs are
called one by one, with the same bits. Shapes: T tokens, H hidden, K top-k, L MoE layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.kernels import _native, native_half
from afserve.kernels.native_products import address
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import Stack, Stacked, StackLayer, Stopped


@dataclass(frozen=True, slots=True)
class _Handle:
    stack: _native.Stack
    dtype: torch.dtype
    moe_layers: int
    top_k: int


def stack_of(layers: tuple[StackLayer, ...]) -> Stack | None:
    """None where a layer is not the library's from end to end, or layers are not alike."""
    found = [_native_layer(layer) for layer in layers]
    whole = [layer for layer in found if layer is not None]
    halves = [layer.half.handle for layer in layers]
    dtypes = {half.dtype for half in halves if isinstance(half, native_half.HalfOverCache)}
    chosen = {_top_k(layer) for layer in layers if layer.routes}
    if len(whole) < len(layers) or len(dtypes) != 1 or len(chosen) > 1:
        return None
    moe_layers = sum(layer.routes for layer in layers)
    return Stack(layers, _Handle(_native.Stack(whole), dtypes.pop(), moe_layers, max(chosen, default=0)))


def _top_k(layer: StackLayer) -> int:
    half = layer.half.handle
    return half.top_k if isinstance(half, native_half.HalfOverCache) else 0


def _native_layer(layer: StackLayer) -> _native.StackLayer | None:
    half = layer.half.handle
    if not isinstance(half, native_half.HalfOverCache):
        return None
    first = second = experts = None
    if layer.ffn is not None:
        first, second = _linear(layer.ffn[0], half.dtype), _linear(layer.ffn[1], half.dtype)
        if first is None or second is None:
            return None
    if layer.experts is not None:
        handle = layer.experts.handle
        if not isinstance(handle, _native.Experts) or layer.experts.dtype is not half.dtype:
            return None
        experts = handle
    return _native.StackLayer(half.half, first, second, experts, layer.away)


def _linear(packed: PackedLinear, dtype: torch.dtype) -> _native.Linear | None:
    """The library's map, if it is one for such rows."""
    handle = packed.handle
    return handle if isinstance(handle, _native.Linear) and packed.dtype is dtype else None


def run(
    engine: _native.Engine,
    stack: Stack,
    x_TH: Tensor,
    batch: PagedBatch,
    bad_T: Tensor | None,
    exchange: object | None,
) -> Stacked:
    handle = stack.handle
    assert isinstance(handle, _Handle), "a stack of another backend"
    if x_TH.dtype is not handle.dtype or not x_TH.is_contiguous():
        raise ValueError(
            f"x_TH: {x_TH.dtype} with strides {x_TH.stride()}, expected contiguous {handle.dtype}"
        )
    tokens, top_k = x_TH.shape[0], handle.top_k
    expert = torch.empty((handle.moe_layers, tokens, top_k), dtype=torch.int32)
    normed = weight = None
    if exchange is not None:
        normed, weight = torch.empty_like(x_TH), torch.empty(tokens, top_k, dtype=torch.float32)
    layers, seconds, waited = handle.stack.run(
        engine,
        native_half.batch_handle(batch),
        x_TH.data_ptr(),
        expert.data_ptr(),
        address(bad_T),
        exchange,
        address(normed),
        address(weight),
    )
    if layers == len(stack.layers):
        return Stacked(expert, seconds, waited)
    assert normed is not None and weight is not None, "a layer waits for sums of nobody"
    sent = sum(layer.routes for layer in stack.layers[: layers + 1])
    return Stacked(expert[:sent], seconds, waited, Stopped(layers, normed, weight))
