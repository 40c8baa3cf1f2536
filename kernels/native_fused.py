"""The fused attention halves of the native library, grouped-query and latent: what they take and how they are built.

They are called by `native_half.py`. This file knows addresses, and no fallback: single ops run for what is named here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, float32

from afserve.kernels import _native
from afserve.kernels.indexer import Indexer
from afserve.kernels.latent import MlaLayer
from afserve.kernels.layer import GqaLayer
from afserve.kernels.native_products import CODES, address, plain
from afserve.kernels.native_steps import half_steps, odd_steps
from afserve.kernels.routing import Scoring

MOST_HEAD = 1024  # elements of a head
MOST_LATENT = 4096  # elements of a row of the cache
SCORINGS = (Scoring.SIGMOID, Scoring.SOFTMAX, Scoring.TOPK_SOFTMAX)  # codes of native/router.h


@dataclass(frozen=True, slots=True)
class FusedGqa:
    """A layer as the library runs it, and tensors that it reads and nobody else holds."""

    layer: _native.GqaLayer
    held: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class FusedMla:
    """A layer as the library runs it, and tensors that it reads and nobody else holds."""

    layer: _native.MlaLayer
    held: tuple[Tensor | None, ...]


def why_not_gqa(layer: GqaLayer, gate: _native.Linear | None) -> str:
    """What the library can't take of a layer; empty where it runs it in one call."""
    dtype = layer.input_norm_H.dtype
    norms = [layer.input_norm_H, layer.q_norm_D, layer.k_norm_D, layer.post_norm_H]
    there = [norm for norm in norms if norm is not None]
    if not layer.qkv.dtype is dtype is layer.out.dtype or any(norm.dtype is not dtype for norm in there):
        return "norms and projections of several dtypes"
    if not isinstance(layer.qkv.handle, _native.Linear) or not isinstance(layer.out.handle, _native.Linear):
        return f"{dtype} weights"
    if not all(norm.is_contiguous() for norm in there):
        return "norms with gaps"
    if layer.head_dim > MOST_HEAD:
        return f"heads of {layer.head_dim} elements"
    if odd := odd_steps(layer.steps, dtype):
        return odd
    if layer.rule and layer.rule.scoring not in SCORINGS:
        return f"scoring {layer.rule.scoring.value}"
    return _odd_gate(layer, gate)


def _odd_gate(layer: GqaLayer | MlaLayer, gate: _native.Linear | None) -> str:
    """A gate that the rows' dtype can't hold is multiplied as it is, without a bias."""
    biased = layer.rule is not None and gate is None and layer.gate_bias_E is not None
    return f"a gate with a bias that {layer.input_norm_H.dtype} can't hold" if biased else ""


def _wide(layer: GqaLayer | MlaLayer, gate: _native.Linear | None) -> Tensor | None:
    return None if gate is not None or layer.rule is None else layer.gate_EH


def fused_gqa(layer: GqaLayer, gate: _native.Linear | None, rule: _native.Rule) -> FusedGqa:
    qkv, out = layer.qkv.handle, layer.out.handle
    assert isinstance(qkv, _native.Linear) and isinstance(out, _native.Linear)
    cos_PD, sin_PD = plain(layer.cos_PD, float32), plain(layer.sin_PD, float32)
    bias_E = None if layer.bias_E is None else plain(layer.bias_E, float32)
    sink_A = None if layer.sink_A is None else plain(layer.sink_A, float32)
    sizes = layer.input_norm_H.shape[0], layer.heads, layer.groups, layer.head_dim
    shape = _native.LayerShape(
        *sizes, layer.eps, layer.scale, layer.window or 0, layer.wide_norms, layer.steps.late
    )
    norms = [address(x) for x in (layer.input_norm_H, layer.q_norm_D, layer.k_norm_D, layer.post_norm_H)]
    first, of_q, of_k, last = norms
    steps, held = half_steps(layer.steps, _wide(layer, gate))
    weights = _native.LayerWeights(
        first, of_q, of_k, last, qkv, out, gate, address(bias_E), address(sink_A), rule, steps
    )
    code, tables = CODES[layer.input_norm_H.dtype], (address(cos_PD), address(sin_PD))
    return FusedGqa(
        _native.GqaLayer(code, shape, weights, *tables, cos_PD.shape[0]),
        (cos_PD, sin_PD, bias_E, sink_A, *held),
    )


def why_not_mla(layer: MlaLayer, gate: _native.Linear | None) -> str:
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
    if odd := odd_steps(layer.steps, dtype):
        return odd
    if layer.borrows or not layer.rope:
        return "latents of another layer" if layer.borrows else "latents without a rotary key"
    if layer.rule and layer.rule.scoring not in SCORINGS:
        return f"scoring {layer.rule.scoring.value}"
    if layer.indexer is not None and (odd := _odd_indexer(layer.indexer, dtype)):
        return odd
    return _odd_gate(layer, gate)


def fused_mla(layer: MlaLayer, gate: _native.Linear | None, rule: _native.Rule) -> FusedMla:
    cos_PD, sin_PD = plain(layer.cos_PD, float32), plain(layer.sin_PD, float32)
    bias_E = None if layer.bias_E is None else plain(layer.bias_E, float32)
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
        0 if layer.indexer is None else layer.indexer.top,
        layer.indexer is not None and layer.indexer.interleaved,
        layer.reuses,
    )
    steps, held = half_steps(layer.steps, _wide(layer, gate))
    made = _native.MlaLayer(
        CODES[layer.input_norm_H.dtype],
        shape,
        _latent_weights(layer, gate, bias_E, rule, steps),
        cos_PD.data_ptr(),
        sin_PD.data_ptr(),
        cos_PD.shape[0],
        layer.interleaved,
    )
    return FusedMla(made, (cos_PD, sin_PD, bias_E, *held))


def _latent_weights(
    layer: MlaLayer,
    gate: _native.Linear | None,
    bias_E: Tensor | None,
    rule: _native.Rule,
    steps: _native.HalfSteps | None,
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
    index = None if layer.indexer is None else _index_weights(layer.indexer)
    return _native.MlaWeights(norms, down, q_up, up_k, up_v, out, gate, address(bias_E), rule, index, steps)


def _odd_indexer(indexer: Indexer, dtype: torch.dtype) -> str:
    """What the library can't take of it; empty where it takes it whole."""
    if indexer.own is not None:
        return "an indexer with queries of its own"
    maps, norms = (indexer.queries, indexer.keys, indexer.weights), (indexer.norm_I, indexer.bias_I)
    if {x.dtype for x in (*maps, *norms)} != {dtype} or not all(norm.is_contiguous() for norm in norms):
        return "an indexer of several dtypes"
    if not all(isinstance(x.handle, _native.Linear) for x in maps):
        return f"an indexer with {dtype} weights"
    return f"index keys of {indexer.dim} elements" if indexer.dim > MOST_LATENT else ""


def _index_weights(indexer: Indexer) -> _native.IndexerWeights:
    queries, keys, weights = indexer.queries.handle, indexer.keys.handle, indexer.weights.handle
    assert isinstance(queries, _native.Linear) and isinstance(keys, _native.Linear)
    assert isinstance(weights, _native.Linear)
    norms = indexer.norm_I.data_ptr(), indexer.bias_I.data_ptr()
    return _native.IndexerWeights(queries, keys, weights, *norms)
