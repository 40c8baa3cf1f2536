"""The attention half of one layer: from the residual stream to what the FFN half needs, over a paged cache.

Grouped-query attention, or multi-head latent attention in its absorbed form. It knows its weights and the kernels,
no requests and no network. Shapes: T tokens, H hidden, A query heads, G key/value heads, N nope, C latent rank +
rope size, V value size.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from afserve.families.pattern.naming import bias_of
from afserve.kernels.cache import (
    BlockIndexedShape,
    IndexedShape,
    KeptShape,
    LayerCache,
    LayerShape,
    StateShape,
)
from afserve.kernels.indexer import NearRows
from afserve.kernels.latent import BoundMla, MlaLayer
from afserve.kernels.layer import BoundGqa, GqaLayer, Half, Steps
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.models.dense import Rows, Weight
from afserve.models.halves import AttentionHalf, FfnAlone, HeadShare, LayerTensors
from afserve.models.indexers import block_indexer, latent_indexer, share_scale
from afserve.models.mixers import load_states
from afserve.models.rope import Rotary, head_order, mla_scale, query_scale
from afserve.models.router import Router
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec


def load_attention(
    spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
) -> AttentionHalf:
    """The half of layer `tensors.layer`; `families/limits.py` has refused what none of them computes."""
    a = spec.layer(tensors.layer).attention
    if a.kind == "none":
        return FfnAlone(spec, tensors, ops, router)
    if a.recurrent:
        return load_states(spec, tensors, ops, router)
    half = LatentHalf if a.kind == "mla" else GroupedQueryHalf
    return half(spec, tensors, ops, rope, router)


class GroupedQueryHalf:
    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> None:
        a, h, share = spec.layer(tensors.layer).attention, spec.hidden, tensors.share
        self._ops, self._order = ops, head_order(a)
        groups, size = share.heads_of(a.kv_heads), a.head_dim
        self.keeps: KeptShape = LayerShape(groups, size, size)
        if a.indexer is not None:
            self.keeps = BlockIndexedShape(groups, size, a.indexer.dim)
        input_norm, post_norm = tensors.norms(spec)
        naming = tensors.naming
        self._prepared = ops.prepare_gqa(
            GqaLayer(
                input_norm_H=input_norm,
                qkv=self._qkv(a, h, tensors),
                q_norm_D=self._head_norm(a, naming.q_norm, a.heads, tensors),
                k_norm_D=self._head_norm(a, naming.k_norm, a.kv_heads, tensors),
                cos_PD=rope.cos_PD,
                sin_PD=rope.sin_PD,
                out=self._out(a, h, tensors),
                post_norm_H=post_norm,
                gate_EH=router.gate_EH if router else None,
                bias_E=router.bias_E if router else None,
                gate_bias_E=router.gate_bias_E if router else None,
                rule=router.rule if router else None,
                heads=share.heads_of(a.heads),
                groups=share.heads_of(a.kv_heads),
                head_dim=a.head_dim,
                eps=spec.eps,
                scale=a.head_dim**-0.5 if a.scale is None else a.scale,
                window=a.window,
                sink_A=share.cut_rows(tensors.attention(naming.sinks, a.heads), a.heads) if a.sinks else None,
                steps=self._steps(spec, a, tensors, len(rope.cos_PD), router),
            )
        )

    def _steps(
        self, spec: ModelSpec, a: AttentionSpec, tensors: LayerTensors, positions: int, router: Router | None
    ) -> Steps:
        """A chunk that no context leaves is left out, since then the fused half does the layer."""
        biases = tensors.norm_biases(spec.hidden) if spec.around.norm_bias else (None, None)
        scale_P = query_scale(a, positions)
        return Steps(
            centred=spec.around.centred,
            parallel=spec.around.parallel,
            v_norm_D=self._unit_norm(a, tensors) if a.value_norm else None,
            router_norm_H=None if router is None else router.norm_H,
            expert_scale_E=None if router is None else router.expert_scale_E,
            input_bias_H=biases[0],
            post_bias_H=biases[1],
            clip=a.clip,
            late=a.qk_norm == "late",
            chunk=a.chunk if a.chunk is not None and a.chunk < positions else None,
            q_scale_P=None if scale_P is None else scale_P.to(self._ops.device),
            gate=_gate(a, spec.hidden, tensors),
            softplus=a.gate is not None and a.gate.softplus,
            after_norm_H=tensors.after_attention(a, spec.hidden),
            blocks=None if a.indexer is None else block_indexer(a, spec.hidden, tensors),
        )

    def _qkv(self, a: AttentionSpec, h: int, tensors: LayerTensors) -> PackedLinear:
        d, naming = a.head_dim, tensors.naming
        widths = (a.heads * d, a.kv_heads * d, a.kv_heads * a.value_dim)
        if naming.qkv:
            parts = tensors.attention(f"{naming.qkv}.weight", sum(widths), h).split(widths)
        else:
            k = tensors.attention_weight("k_proj.weight", widths[1], h)
            read = tensors.attention_weight if a.value_dim == a.head_dim else tensors.attention
            v = k if a.value_of_key else read("v_proj.weight", widths[2], h)
            parts = _query_weight(a, tensors, h)[0], k, v
        weights = self._stacked(a, tensors.share, *parts)
        if not a.qkv_bias:
            return tensors.dense.linear(*weights)
        names = "kk" if a.value_of_key else "kv"
        k, v = (tensors.attention(f"{p}_proj.bias", n) for p, n in zip(names, widths[1:], strict=True))
        biases = self._stacked(a, tensors.share, _query_bias(a, tensors)[0], k, v)
        return tensors.dense.linear(*weights, bias_O=torch.cat(biases))

    def _stacked(
        self, a: AttentionSpec, share: HeadShare, q: Rows, k: Rows, v: Rows
    ) -> tuple[Rows, Rows, Rows]:
        """Rows, or numbers, of the share's heads in the kernels' order."""
        if isinstance(v, Tensor):
            v = _widened(v, a)
        q, k, v = share.cut_rows(q, a.heads), share.cut_rows(k, a.kv_heads), share.cut_rows(v, a.kv_heads)
        return self._ordered(q, a.head_dim), self._ordered(k, a.head_dim), v

    def _head_norm(self, a: AttentionSpec, name: str, heads: int, tensors: LayerTensors) -> Tensor | None:
        """Of each head, or of all heads together (`width`)."""
        if not a.qk_norm:
            return None
        if a.qk_norm == "unit":
            return self._unit_norm(a, tensors)
        size = a.head_dim * (heads if a.qk_norm == "width" else 1)
        return self._ordered(tensors.norm(f"{tensors.naming.attention}.{name}", size), a.head_dim)

    def _unit_norm(self, a: AttentionSpec, tensors: LayerTensors) -> Tensor:
        return torch.ones(a.head_dim, dtype=tensors.dtype, device=self._ops.device)

    def _ordered(self, x_R: Rows, head_dim: int) -> Rows:
        """Rows, or numbers, of one head after the other in the kernels' order."""
        if self._order is None:
            return x_R
        row_R = torch.arange(len(x_R), device=x_R.device).view(-1, head_dim)
        return x_R[row_R[:, self._order.to(x_R.device)].flatten()]

    def _out(self, a: AttentionSpec, h: int, tensors: LayerTensors) -> PackedLinear:
        naming, share = tensors.naming, tensors.share
        name, inputs = f"{naming.out}.weight", a.heads * a.value_dim
        bias = tensors.attention(f"{naming.out}.bias", h) if a.out_bias and share.index == 0 else None
        if a.out_scale == 1.0 and a.value_dim == a.head_dim:
            return tensors.dense.linear(tensors.attention_columns(name, h, inputs, a.heads), bias_O=bias)
        weight = share.cut_columns(_widened(tensors.attention(name, h, inputs).T, a).T, a.heads)
        if a.out_scale != 1.0:
            weight, bias = weight * a.out_scale, None if bias is None else bias * a.out_scale
        return tensors.dense.linear(weight, bias_O=bias)

    def bind(self, cache: LayerCache) -> "BoundGroupedQuery":
        k_NGBD, v_NGBD, *index = cache
        bound = self._ops.bind_gqa(self._prepared, k_NGBD, v_NGBD)
        return BoundGroupedQuery(self._ops, replace(bound, index_NBI=index[0]) if index else bound)


def _gate(a: AttentionSpec, h: int, tensors: LayerTensors) -> PackedLinear | None:
    if a.gate is None:
        return None
    if a.gate.by != "query":
        own = tensors.attention_weight(f"{tensors.naming.output_gate}.weight", a.gate_width, h)
        return tensors.dense.linear(tensors.share.cut_rows(own, a.heads))
    bias = tensors.share.cut_rows(_query_bias(a, tensors)[1], a.heads) if a.qkv_bias else None
    weight = tensors.share.cut_rows(_query_weight(a, tensors, h)[1], a.heads)
    return tensors.dense.linear(weight, bias_O=bias)


def _widened(x_R: Tensor, a: AttentionSpec) -> Tensor:
    """Rows, or numbers, of one head's values after the other, with zeros up to the size of a key: kernels have one size
    of a head."""
    if a.value_dim == a.head_dim:
        return x_R
    x_GVR = x_R.unflatten(0, (-1, a.value_dim))
    wide: Tensor = x_GVR.new_zeros(len(x_GVR), a.head_dim, *x_GVR.shape[2:])
    wide[:, : a.value_dim] = x_GVR
    return wide.flatten(0, 1)


def _query_weight(a: AttentionSpec, tensors: LayerTensors, h: int) -> tuple[Weight, Weight]:
    return _apart(tensors.attention_weight("q_proj.weight", _of_query(a), h), a)


def _query_bias(a: AttentionSpec, tensors: LayerTensors) -> tuple[Tensor, Tensor]:
    return _apart(tensors.attention("q_proj.bias", _of_query(a)), a)


def _of_query(a: AttentionSpec) -> int:
    return a.heads * a.head_dim * (2 if _makes_gate(a) else 1)


def _makes_gate(a: AttentionSpec) -> bool:
    """Whether the query's projection makes the output's gate too."""
    return a.gate is not None and a.gate.by == "query"


def _apart(both: Rows, a: AttentionSpec) -> tuple[Rows, Rows]:
    """Rows of the query's projection, and those of a gate that it makes too, which follow the query's head by head."""
    if not _makes_gate(a):
        return both, both[:0]
    row = torch.arange(len(both), device=both.device).view(a.heads, 2, a.head_dim)
    return both[row[:, 0].flatten()], both[row[:, 1].flatten()]


@dataclass(frozen=True, slots=True)
class BoundGroupedQuery:
    ops: Ops
    bound: BoundGqa

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self.ops.gqa_half(x_TH, self.bound, batch)

    def add_heads(self, x_TH: Tensor, batch: PagedBatch) -> Tensor:
        """A share's part of what attention adds to x_TH, which stays as it is."""
        return self.ops.gqa_part(x_TH, self.bound, batch)


class LatentHalf:
    """MLA with the up-projections absorbed: the cache holds one latent row per token, shared by all heads (DeepSeek-V2,
    arXiv 2405.04434, 2.1.2)."""

    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        dense, share = tensors.dense, tensors.share
        self._ops, latent = ops, a.kv_lora_rank + a.rope_dim
        indexer = latent_indexer(a, h, tensors) if a.indexer and not a.indexer.reuses else None
        self.keeps: KeptShape = IndexedShape(latent, indexer.dim) if indexer else LayerShape(1, latent)
        if a.source is not None:
            self.keeps = LayerShape(1, indexer.dim) if indexer else StateShape(0)
        input_norm, post_norm = tensors.norms(spec)
        q_norm = q_up = None
        if a.q_lora_rank is not None:
            q_norm = tensors.attention("q_a_layernorm.weight", a.q_lora_rank)
            up = tensors.attention_weight("q_b_proj.weight", a.heads * a.head_dim, a.q_lora_rank)
            q_up = dense.linear(share.cut_rows(up, a.heads))
        up_k, up_v = (share.cut_rows(up, a.heads) for up in _up_projections(a, tensors))
        out = tensors.attention_columns(f"{tensors.naming.out}.weight", h, a.heads * a.value_dim, a.heads)
        bias = tensors.attention(f"{tensors.naming.out}.bias", h) if a.out_bias and share.index == 0 else None
        scale_P = query_scale(a, len(rope.cos_PD))
        self._prepared = ops.prepare_mla(
            MlaLayer(
                input_norm_H=input_norm,
                down=_down_projection(a, h, tensors),
                q_norm_R=q_norm,
                q_up=q_up,
                latent_norm_C=_latent_norm(a, tensors, input_norm),
                up_k=dense.heads(up_k),
                up_v=dense.heads(up_v),
                cos_PD=rope.cos_PD,
                sin_PD=rope.sin_PD,
                interleaved=a.rope is not None and a.rope.interleaved,
                out=dense.linear(out, bias_O=bias),
                post_norm_H=post_norm,
                gate_EH=router.gate_EH if router else None,
                bias_E=router.bias_E if router else None,
                gate_bias_E=router.gate_bias_E if router else None,
                rule=router.rule if router else None,
                heads=share.heads_of(a.heads),
                nope=a.nope_dim,
                rope=a.rope_dim,
                eps=spec.eps,
                latent_eps=a.latent_eps,
                scale=mla_scale(a),
                steps=Steps(
                    q_scale_P=None if scale_P is None else scale_P.to(ops.device),
                    after_norm_H=tensors.after_attention(a, h),
                    log_scale=share_scale(a, tensors),
                    gate=_gate(a, h, tensors),
                    softplus=a.gate is not None and a.gate.softplus,
                ),
                indexer=indexer,
                reuses=a.indexer is not None and a.indexer.reuses,
                borrows=a.source is not None,
            )
        )

    def bind(self, cache: LayerCache, near: NearRows | None = None) -> "BoundLatent":
        index = cache[1] if len(cache) > 1 else None
        return BoundLatent(self._ops, self._ops.bind_mla(self._prepared, cache[0], index, near))


def _latent_norm(a: AttentionSpec, tensors: LayerTensors, like: Tensor) -> Tensor:
    """With what multiplies the latent behind it; multiplied in float32, it is rounded once. None of another layer's."""
    if a.source is not None:
        return like.new_ones(a.kv_lora_rank)
    weight_C = tensors.attention(tensors.naming.latent.norm, a.kv_lora_rank)
    return weight_C if a.latent_scale == 1.0 else (weight_C.float() * a.latent_scale).to(weight_C.dtype)


def _down_projection(a: AttentionSpec, h: int, tensors: LayerTensors) -> PackedLinear:
    """One product for the query's first projection and the latent."""
    latent, names = a.kv_lora_rank + a.rope_dim, tensors.naming.latent
    if a.q_lora_rank is None:
        whole = tensors.attention_weight(names.query, a.heads * a.head_dim, h)
        query = tensors.share.cut_rows(whole, a.heads)
    else:
        query = tensors.attention_weight("q_a_proj.weight", a.q_lora_rank, h)
    if a.source is not None:
        return tensors.dense.linear(query)
    parts = query, tensors.attention_weight(names.down, latent, h)
    if not a.qkv_bias:
        return tensors.dense.linear(*parts)
    # q_proj never has a bias in DeepSeek's modelling code, q_a_proj does.
    bias = tensors.attention(bias_of(names.down), latent)
    rank = a.q_lora_rank
    q_bias = bias.new_zeros(len(query)) if rank is None else tensors.attention("q_a_proj.bias", rank)
    return tensors.dense.linear(*parts, bias_O=torch.cat((q_bias, bias)))


def _up_projections(a: AttentionSpec, tensors: LayerTensors) -> tuple[Tensor, Tensor]:
    """Of each head: from its query to the latent, and from the latent to its output."""
    both = a.nope_dim + a.value_dim
    kv_b = tensors.attention(tensors.naming.latent.up, a.heads * both, a.kv_lora_rank)
    up_k, up_v = kv_b.view(a.heads, both, a.kv_lora_rank).split((a.nope_dim, a.value_dim), 1)
    return up_k.transpose(1, 2).contiguous(), up_v.contiguous()


@dataclass(frozen=True, slots=True)
class BoundLatent:
    ops: Ops
    bound: BoundMla

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self.ops.mla_half(x_TH, self.bound, batch)

    def add_heads(self, x_TH: Tensor, batch: PagedBatch) -> Tensor:
        return self.ops.mla_part(x_TH, self.bound, batch)
