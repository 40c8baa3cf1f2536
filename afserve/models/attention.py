"""The attention half of one layer: from the residual stream to what the FFN half needs, over a paged cache.

Grouped-query attention, or multi-head latent attention in its absorbed form. It knows its weights and the kernels,
no requests and no network. Shapes: T tokens, H hidden, A query heads, G key/value heads, N nope, C latent rank +
rope size, V value size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afserve.families.naming import Naming
from afserve.kernels.cache import LayerCache, LayerShape
from afserve.kernels.layer import BoundGqa, GqaLayer, Half
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.models.rope import Rotary, mla_scale
from afserve.models.router import Router
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec

LATENT_EPS = 1e-6  # DeepSeek's two latent norms keep RMSNorm's default, whatever config.json says


class BoundHalf(Protocol):
    """An attention half with the layer's part of one cache."""

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        """x_TH becomes, in place, the residual stream after attention; keys and values are written."""
        ...


class AttentionHalf(Protocol):
    @property
    def keeps(self) -> LayerShape:
        """What it writes to a cache for each token."""
        ...

    def bind(self, cache: LayerCache) -> BoundHalf:
        """The same weights may be bound to several caches."""
        ...


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's tensors by their short names."""

    source: TensorSource
    naming: Naming
    layer: int
    dtype: torch.dtype

    def __call__(self, part: str, *shape: int) -> Tensor:
        return self.source.tensor(self.naming.layer(self.layer, part), shape, self.dtype)

    def attention(self, part: str, *shape: int) -> Tensor:
        return self(f"{self.naming.attention}.{part}", *shape)

    def norms(self, hidden: int) -> tuple[Tensor, Tensor]:
        """The one before attention and the one before the FFN."""
        return self(self.naming.input_norm, hidden), self(self.naming.post_norm, hidden)


def load_attention(
    spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
) -> AttentionHalf:
    """The half of layer `tensors.layer`; `families/limits.py` has refused what neither of the two computes."""
    kind = LatentHalf if spec.layer(tensors.layer).attention.kind == "mla" else GroupedQueryHalf
    return kind(spec, tensors, ops, rope, router)


class GroupedQueryHalf:
    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        self._ops = ops
        self.keeps = LayerShape(a.kv_heads, a.head_dim, a.value_dim)
        input_norm, post_norm = tensors.norms(h)
        self._prepared = ops.prepare_gqa(
            GqaLayer(
                input_norm_H=input_norm,
                qkv=self._qkv(a, h, tensors),
                q_norm_D=tensors.attention("q_norm.weight", a.head_dim) if a.qk_norm else None,
                k_norm_D=tensors.attention("k_norm.weight", a.head_dim) if a.qk_norm else None,
                cos_PD=rope.cos_PD,
                sin_PD=rope.sin_PD,
                out=self._out(a, h, tensors),
                post_norm_H=post_norm,
                gate_EH=router.gate_EH if router else None,
                bias_E=router.bias_E if router else None,
                rule=router.rule if router else None,
                heads=a.heads,
                groups=a.kv_heads,
                head_dim=a.head_dim,
                eps=spec.eps,
                scale=a.head_dim**-0.5,
                window=a.window,
                sink_A=tensors.attention("sinks", a.heads) if a.sinks else None,
            )
        )

    def _qkv(self, a: AttentionSpec, h: int, tensors: LayerTensors) -> PackedLinear:
        widths = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
        weight = torch.cat([tensors.attention(f"{p}_proj.weight", n, h) for p, n in widths.items()])
        bias = [tensors.attention(f"{p}_proj.bias", n) for p, n in widths.items()] if a.qkv_bias else []
        return self._ops.pack_linear(weight, torch.cat(bias) if bias else None)

    def _out(self, a: AttentionSpec, h: int, tensors: LayerTensors) -> PackedLinear:
        bias = tensors.attention("o_proj.bias", h) if a.out_bias else None
        return self._ops.pack_linear(tensors.attention("o_proj.weight", h, a.heads * a.head_dim), bias)

    def bind(self, cache: LayerCache) -> BoundHalf:
        k_NGBD, v_NGBD = cache
        return _BoundGroupedQuery(self._ops, self._ops.bind_gqa(self._prepared, k_NGBD, v_NGBD))


@dataclass(frozen=True, slots=True)
class _BoundGroupedQuery:
    ops: Ops
    bound: BoundGqa

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self.ops.gqa_half(x_TH, self.bound, batch)


class LatentHalf:
    """MLA with the up-projections absorbed: the cache holds one latent row per token, shared by all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434, 2.1.2). W_UK moves to the query side, W_UV behind the softmax.
    """

    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> None:
        a, h = spec.layer(tensors.layer).attention, spec.hidden
        assert a.rope is not None, "refused by families/limits.py"
        self._a, self._ops, self._rope, self._router, self._eps = a, ops, rope, router, spec.eps
        self._interleaved = a.rope.interleaved
        self.keeps = LayerShape(1, a.kv_lora_rank + a.rope_dim)
        self._input_norm, self._post_norm = tensors.norms(h)
        self._load_down(h, tensors)
        self._load_up(tensors)
        bias = tensors.attention("o_proj.bias", h) if a.out_bias else None
        self._out = ops.pack_linear(tensors.attention("o_proj.weight", h, a.heads * a.value_dim), bias)
        self._scale = mla_scale(a.rope, a.head_dim)

    def _load_down(self, h: int, tensors: LayerTensors) -> None:
        """One product for the query's first projection and the latent."""
        a = self._a
        latent, q_width = a.kv_lora_rank + a.rope_dim, a.heads * a.head_dim
        first = "q_proj" if a.q_lora_rank is None else "q_a_proj"
        self._q_in = q_width if a.q_lora_rank is None else a.q_lora_rank
        weight = torch.cat(
            (
                tensors.attention(f"{first}.weight", self._q_in, h),
                tensors.attention("kv_a_proj_with_mqa.weight", latent, h),
            )
        )
        bias = None
        if a.qkv_bias:
            # q_proj never has a bias in DeepSeek's modelling code, q_a_proj does.
            q_bias = (
                torch.zeros(q_width, dtype=weight.dtype, device=weight.device)
                if a.q_lora_rank is None
                else tensors.attention("q_a_proj.bias", self._q_in)
            )
            bias = torch.cat((q_bias, tensors.attention("kv_a_proj_with_mqa.bias", latent)))
        self._down = self._ops.pack_linear(weight, bias)
        self._q_up: PackedLinear | None = None
        if a.q_lora_rank is not None:
            self._q_norm = tensors.attention("q_a_layernorm.weight", a.q_lora_rank)
            self._q_up = self._ops.pack_linear(tensors.attention("q_b_proj.weight", q_width, a.q_lora_rank))

    def _load_up(self, tensors: LayerTensors) -> None:
        a = self._a
        self._kv_norm = tensors.attention("kv_a_layernorm.weight", a.kv_lora_rank)
        both = a.nope_dim + a.value_dim
        kv_b = tensors.attention("kv_b_proj.weight", a.heads * both, a.kv_lora_rank)
        up_k, up_v = kv_b.view(a.heads, both, a.kv_lora_rank).split((a.nope_dim, a.value_dim), 1)
        self._up_k = self._ops.pack_heads(up_k.transpose(1, 2).contiguous())
        self._up_v = self._ops.pack_heads(up_v.contiguous())

    def bind(self, cache: LayerCache) -> BoundHalf:
        (cache_NBC,) = cache
        return _BoundLatent(self, cache_NBC)

    def run(self, x_TH: Tensor, cache_NBC: Tensor, batch: PagedBatch) -> Half:
        ops, router = self._ops, self._router
        attended = self._attend(ops.rms_norm(x_TH, self._input_norm, self._eps), cache_NBC, batch)
        normed_TH = ops.add_rms_norm(x_TH, attended, self._post_norm, self._eps)
        if router is None:
            return Half(normed_TH, None, None)
        return Half(normed_TH, *ops.route(normed_TH, router.gate_EH, router.bias_E, router.rule))

    def _attend(self, x_TH: Tensor, cache_NBC: Tensor, batch: PagedBatch) -> Tensor:
        a, ops, tokens = self._a, self._ops, x_TH.shape[0]
        query, latent, k_rope = ops.linear(x_TH, self._down).split(
            (self._q_in, a.kv_lora_rank, a.rope_dim), 1
        )
        if self._q_up is not None:
            query = ops.linear(ops.rms_norm(query, self._q_norm, LATENT_EPS), self._q_up)
        q_nope, q_rope = query.view(tokens, a.heads, a.head_dim).split((a.nope_dim, a.rope_dim), 2)
        q_rope, k_rope = self._turn(q_rope, batch), self._turn(k_rope.unsqueeze(1), batch).squeeze(1)
        latent = ops.rms_norm(latent, self._kv_norm, LATENT_EPS)
        ops.write_latent(torch.cat((latent, k_rope), 1), cache_NBC, batch.kv_slot_T)
        q_latent = ops.linear_heads(q_nope, self._up_k)
        o_TAC = ops.attend_mla(
            torch.cat((q_latent, q_rope), 2), cache_NBC, a.kv_lora_rank, batch, self._scale
        )
        return ops.linear(ops.linear_heads(o_TAC, self._up_v).reshape(tokens, -1), self._out)

    def _turn(self, x_TAD: Tensor, batch: PagedBatch) -> Tensor:
        return self._ops.rope(
            x_TAD, self._rope.cos_PD, self._rope.sin_PD, batch.position_T, self._interleaved
        )


@dataclass(frozen=True, slots=True)
class _BoundLatent:
    half: LatentHalf
    cache_NBC: Tensor

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self.half.run(x_TH, self.cache_NBC, batch)
