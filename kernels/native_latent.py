"""The fused attention half of an MLA layer in the native library: what it takes and how it is built.

It knows addresses, and no fallback: `native.py` runs single ops for what is named here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.kernels import _native
from afserve.kernels.latent import MlaLayer
from afserve.kernels.native_products import CODES, address, plain

MOST_LATENT = 4096  # elements of a row of the cache


@dataclass(frozen=True, slots=True)
class FusedMla:
    """A layer as the library runs it, and tensors that it reads and nobody else holds."""

    layer: _native.MlaLayer
    held: tuple[Tensor | None, ...]


def why_not_fused(layer: MlaLayer, gate: _native.Linear | None, scorings: tuple[object, ...]) -> str:
    """What the library can't take of a layer; empty where it runs it in one call."""
    dtype = layer.input_norm_H.dtype
    optional = () if layer.q_norm_R is None else (layer.q_norm_R,)
    norms = (layer.input_norm_H, layer.latent_norm_C, layer.post_norm_H, *optional)
    maps = [layer.down, layer.out, *([layer.q_up] if layer.q_up is not None else [])]
    heads = [layer.up_k, layer.up_v]
    if {x.dtype for x in norms} | {x.dtype for x in maps} | {x.dtype for x in heads} != {dtype}:
        return "norms and projections of several dtypes"
    if not all(isinstance(x.handle, _native.Linear) for x in maps):
        return f"{dtype} weights"
    if not all(isinstance(x.handle, _native.HeadLinear) for x in heads):
        return f"{dtype} weights"
    if not all(norm.is_contiguous() for norm in norms):
        return "norms with gaps"
    if layer.rank + layer.rope > MOST_LATENT:
        return f"latents of {layer.rank + layer.rope} elements"
    if layer.rule and layer.rule.scoring not in scorings:
        return f"scoring {layer.rule.scoring.value}"
    return f"a gate that {dtype} can't hold" if layer.rule and not gate else ""


def fused(layer: MlaLayer, gate: _native.Linear | None, rule: _native.Rule) -> FusedMla:
    cos_PD, sin_PD = plain(layer.cos_PD, torch.float32), plain(layer.sin_PD, torch.float32)
    bias_E = None if layer.bias_E is None else plain(layer.bias_E, torch.float32)
    shape = _native.MlaShape(
        layer.input_norm_H.shape[0],
        layer.heads,
        layer.nope,
        layer.rope,
        layer.value_size,
        layer.rank,
        layer.eps,
        layer.latent_eps,
        layer.scale,
    )
    made = _native.MlaLayer(
        CODES[layer.input_norm_H.dtype],
        shape,
        _weights(layer, gate, bias_E, rule),
        cos_PD.data_ptr(),
        sin_PD.data_ptr(),
        cos_PD.shape[0],
        layer.interleaved,
    )
    return FusedMla(made, (cos_PD, sin_PD, bias_E))


def _weights(
    layer: MlaLayer, gate: _native.Linear | None, bias_E: Tensor | None, rule: _native.Rule
) -> _native.MlaWeights:
    down, out, up_k, up_v = layer.down.handle, layer.out.handle, layer.up_k.handle, layer.up_v.handle
    q_up = None if layer.q_up is None else layer.q_up.handle
    assert isinstance(down, _native.Linear) and isinstance(out, _native.Linear)
    assert isinstance(up_k, _native.HeadLinear) and isinstance(up_v, _native.HeadLinear)
    assert q_up is None or isinstance(q_up, _native.Linear)
    norms = _native.MlaNorms(
        layer.input_norm_H.data_ptr(),
        address(layer.q_norm_R),
        layer.latent_norm_C.data_ptr(),
        layer.post_norm_H.data_ptr(),
    )
    return _native.MlaWeights(norms, down, q_up, up_k, up_v, out, gate, address(bias_E), rule)
