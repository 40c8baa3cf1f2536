"""Attention of one layer over a paged cache: grouped-query, or multi-head latent in its absorbed form.

It knows its weights and the kernels, no requests and no network. Shapes: T tokens, H hidden, A query heads,
G key/value heads, D head size, C latent rank + rope size.
"""

from typing import Protocol

import torch
from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.naming import Naming
from afserve.models.rope import Rotary, mla_scale
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec

LayerCache = tuple[Tensor, ...]
LATENT_EPS = 1e-6  # DeepSeek's two latent norms keep RMSNorm's default, whatever config.json says


class Attention(Protocol):
    def __call__(self, x_TH: Tensor, cache: LayerCache, batch: PagedBatch) -> Tensor:
        """x_TH is already normalised; writes this step's keys and values, returns the output projection."""
        ...


class GroupedQueryAttention:
    def __init__(
        self, spec: ModelSpec, layer: int, source: TensorSource, naming: Naming, ops: Ops, rope: Rotary,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        a, h = spec.attention, spec.hidden
        self._a, self._ops, self._rope, self._eps = a, ops, rope, spec.eps

        def load(part: str, *shape: int) -> Tensor:
            return source.tensor(naming.layer(layer, f"self_attn.{part}"), shape, dtype)

        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        weight = torch.cat(
            (load("q_proj.weight", q, h), load("k_proj.weight", kv, h), load("v_proj.weight", kv, h))
        )
        bias = None
        if a.bias:
            bias = torch.cat((load("q_proj.bias", q), load("k_proj.bias", kv), load("v_proj.bias", kv)))
        self._qkv = ops.pack_linear(weight, bias)
        self._out = ops.pack_linear(load("o_proj.weight", h, q), load("o_proj.bias", h) if a.bias else None)
        self._q_norm = load("q_norm.weight", a.head_dim) if a.qk_norm else None
        self._k_norm = load("k_norm.weight", a.head_dim) if a.qk_norm else None
        self._scale = a.head_dim**-0.5

    def __call__(self, x_TH: Tensor, cache: LayerCache, batch: PagedBatch) -> Tensor:
        a, ops = self._a, self._ops
        tokens = x_TH.shape[0]
        heads = ops.linear(x_TH, self._qkv).view(tokens, a.heads + 2 * a.kv_heads, a.head_dim)
        q, k, v = heads.split((a.heads, a.kv_heads, a.kv_heads), dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q = ops.rms_norm(q, self._q_norm, self._eps)
            k = ops.rms_norm(k, self._k_norm, self._eps)
        q = ops.rope(q, self._rope.cos_PD, self._rope.sin_PD, batch.position_T, False)
        k = ops.rope(k, self._rope.cos_PD, self._rope.sin_PD, batch.position_T, False)
        k_NGBD, v_NGBD = cache
        ops.write_kv(k, v, k_NGBD, v_NGBD, batch.kv_slot_T)
        out = ops.attend_gqa(q, k_NGBD, v_NGBD, batch, self._scale, a.window)
        return ops.linear(out.reshape(tokens, -1), self._out)


class LatentAttention:
    """MLA with the up-projections absorbed: the cache holds one latent row per token, shared by all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434, 2.1.2). W_UK moves to the query side, W_UV behind the softmax.
    """

    def __init__(
        self, spec: ModelSpec, layer: int, source: TensorSource, naming: Naming, ops: Ops, rope: Rotary,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        a, h = spec.attention, spec.hidden
        self._a, self._ops, self._rope = a, ops, rope
        self._interleaved = spec.rope.interleaved

        def load(part: str, *shape: int) -> Tensor:
            return source.tensor(naming.layer(layer, f"self_attn.{part}"), shape, dtype)

        def bias(part: str, size: int) -> Tensor | None:
            return load(part, size) if a.bias else None

        q_width = a.heads * a.head_dim
        latent = a.kv_lora_rank + a.rope_dim
        kv_a = load("kv_a_proj_with_mqa.weight", latent, h)
        if a.q_lora_rank is None:
            self._q_lora, self._q_norm, self._q_up = 0, None, None
            down, down_bias = torch.cat((load("q_proj.weight", q_width, h), kv_a)), None
            if a.bias:
                down_bias = torch.cat(
                    (
                        torch.zeros(q_width, dtype=dtype, device=ops.device),
                        load("kv_a_proj_with_mqa.bias", latent),
                    )
                )
        else:
            self._q_lora = a.q_lora_rank
            down = torch.cat((load("q_a_proj.weight", a.q_lora_rank, h), kv_a))
            down_bias = None
            if a.bias:
                down_bias = torch.cat(
                    (load("q_a_proj.bias", a.q_lora_rank), load("kv_a_proj_with_mqa.bias", latent))
                )
            self._q_norm = load("q_a_layernorm.weight", a.q_lora_rank)
            self._q_up = ops.pack_linear(load("q_b_proj.weight", q_width, a.q_lora_rank))
        self._down = ops.pack_linear(down, down_bias)
        self._kv_norm = load("kv_a_layernorm.weight", a.kv_lora_rank)
        kv_b = load("kv_b_proj.weight", a.heads * (a.nope_dim + a.value_dim), a.kv_lora_rank)
        up_k, up_v = kv_b.view(a.heads, a.nope_dim + a.value_dim, a.kv_lora_rank).split(
            (a.nope_dim, a.value_dim), 1
        )
        self._up_k_ANC = up_k.contiguous()
        self._up_v_ACV = up_v.transpose(1, 2).contiguous()
        self._out = ops.pack_linear(load("o_proj.weight", h, a.heads * a.value_dim), bias("o_proj.bias", h))
        self._scale = mla_scale(spec.rope, a.head_dim)

    def __call__(self, x_TH: Tensor, cache: LayerCache, batch: PagedBatch) -> Tensor:
        a, ops = self._a, self._ops
        tokens = x_TH.shape[0]
        down = ops.linear(x_TH, self._down)
        query, latent, k_rope = down.split(
            (down.shape[1] - a.kv_lora_rank - a.rope_dim, a.kv_lora_rank, a.rope_dim), 1
        )
        if self._q_norm is not None and self._q_up is not None:
            query = ops.linear(ops.rms_norm(query, self._q_norm, LATENT_EPS), self._q_up)
        q_nope, q_rope = query.view(tokens, a.heads, a.head_dim).split((a.nope_dim, a.rope_dim), 2)
        q_rope = ops.rope(q_rope, self._rope.cos_PD, self._rope.sin_PD, batch.position_T, self._interleaved)
        k_rope = ops.rope(
            k_rope.unsqueeze(1), self._rope.cos_PD, self._rope.sin_PD, batch.position_T, self._interleaved
        ).squeeze(1)
        (cache_NBC,) = cache
        latent = ops.rms_norm(latent, self._kv_norm, LATENT_EPS)
        ops.write_latent(torch.cat((latent, k_rope), 1), cache_NBC, batch.kv_slot_T)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._up_k_ANC).transpose(0, 1)
        q_TAC = torch.cat((q_latent, q_rope), 2)
        o_TAC = ops.attend_mla(q_TAC, cache_NBC, a.kv_lora_rank, batch, self._scale)
        out = torch.bmm(o_TAC.transpose(0, 1), self._up_v_ACV).transpose(0, 1)
        return ops.linear(out.reshape(tokens, -1), self._out)
