"""The attention side of a model: embeddings, attention halves, routers, shared and dense FFNs, LM head.

It knows no network: `route` returns rows, expert ids and weights, and whoever calls it brings back the sum of
the routed experts. Shapes: T tokens, H hidden, K top-k, V vocabulary, R selected rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.models.attention import Attention, GroupedQueryAttention, LatentAttention, LayerCache
from afserve.models.naming import Naming
from afserve.models.rope import Rotary, tables
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class Routed:
    """What leaves for the expert nodes: normalised rows, their experts (int32) and weights (float32)."""

    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor


def router_rule(moe: MoeSpec) -> RouterRule:
    return RouterRule(
        top_k=moe.top_k,
        scoring=Scoring(moe.scoring),
        selection=Selection(moe.selection),
        groups=moe.groups,
        top_groups=moe.top_groups,
        renormalise=moe.renormalise,
        epsilon=moe.epsilon,
        scale=moe.scale,
        closed_value=0.0 if moe.closed_to_zero else float("-inf"),
    )


class DecoderLayer:
    """One layer without its routed experts."""

    def __init__(
        self, spec: ModelSpec, layer: int, source: TensorSource, naming: Naming, ops: Ops, rope: Rotary,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._spec, self._ops = spec, ops
        self.moe_number = spec.moe_index.get(layer)
        self._input_norm = source.tensor(naming.layer(layer, "input_layernorm.weight"), (spec.hidden,), dtype)
        self._post_norm = source.tensor(
            naming.layer(layer, "post_attention_layernorm.weight"), (spec.hidden,), dtype
        )
        kind = LatentAttention if spec.attention.kind == "mla" else GroupedQueryAttention
        self._attention: Attention = kind(spec, layer, source, naming, ops, rope, dtype)
        self._rule = router_rule(spec.moe)
        self._gate_EH: Tensor | None = None
        self._bias_E: Tensor | None = None
        self._ffn: tuple[PackedLinear, PackedLinear] | None = None
        self._load_ffn(layer, source, naming, dtype)

    def _load_ffn(self, layer: int, source: TensorSource, naming: Naming, dtype: torch.dtype) -> None:
        spec = self._spec
        if self.moe_number is None:
            self._ffn = self._pack_ffn(naming.dense(layer), spec.dense_inner, source, dtype)
            return
        moe = spec.moe
        self._gate_EH = source.tensor(naming.router(layer), (moe.experts, spec.hidden), dtype).float()
        if moe.correction_bias:
            self._bias_E = source.tensor(naming.router_bias(layer), (moe.experts,), torch.float32)
        if moe.shared_inner:
            self._ffn = self._pack_ffn(naming.shared_expert(layer), moe.shared_inner, source, dtype)

    def _pack_ffn(
        self, names: tuple[str, str, str], inner: int, source: TensorSource, dtype: torch.dtype
    ) -> tuple[PackedLinear, PackedLinear]:
        gate_name, up_name, down_name = names
        hidden = self._spec.hidden
        gate_up = torch.cat(
            (source.tensor(gate_name, (inner, hidden), dtype), source.tensor(up_name, (inner, hidden), dtype))
        )
        down = source.tensor(down_name, (hidden, inner), dtype)
        return self._ops.pack_linear(gate_up), self._ops.pack_linear(down)

    def attend(self, x_TH: Tensor, cache: LayerCache, batch: PagedBatch) -> Tensor:
        """The residual stream after attention."""
        return x_TH + self._attention(
            self._ops.rms_norm(x_TH, self._input_norm, self._spec.eps), cache, batch
        )

    def normed(self, x_TH: Tensor) -> Tensor:
        return self._ops.rms_norm(x_TH, self._post_norm, self._spec.eps)

    def route(self, x_TH: Tensor) -> Routed:
        """Where each row of the normalised input goes; only for MoE layers."""
        assert self._gate_EH is not None, "a dense layer has no router"
        expert_TK, weight_TK = self._ops.route(x_TH, self._gate_EH, self._bias_E, self._rule)
        return Routed(x_TH, expert_TK, weight_TK)

    def local_ffn(self, x_TH: Tensor) -> Tensor | None:
        """The shared expert of an MoE layer, or a dense layer's FFN; None when there is neither."""
        return None if self._ffn is None else self._ops.mlp(x_TH, *self._ffn)


class AttentionModel:
    """All layers of the attention side, and both ends: embedding and LM head."""

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        naming: Naming,
        ops: Ops,
        dtype: torch.dtype,
        max_positions: int,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        self.spec, self.ops, self.dtype = spec, ops, dtype
        shape = (spec.vocab_size, spec.hidden)
        self._embed_VH = source.tensor("model.embed_tokens.weight", shape, dtype)
        head = self._embed_VH if spec.tied else source.tensor("lm_head.weight", shape, dtype)
        self._head = ops.pack_linear(head)
        self._norm = source.tensor("model.norm.weight", (spec.hidden,), dtype)
        rope = tables(spec.rope, max_positions, dtype, ops.device)
        self.layers: list[DecoderLayer] = []
        for layer in range(spec.layers):
            self.layers.append(DecoderLayer(spec, layer, source, naming, ops, rope, dtype))
            progress((layer + 1) / spec.layers)

    def embed(self, token_T: Tensor) -> Tensor:
        return self._embed_VH[token_T]

    def logits(self, x_RH: Tensor) -> Tensor:
        """Float32 logits of the rows given, (R, V)."""
        normed = self.ops.rms_norm(x_RH, self._norm, self.spec.eps)
        return self.ops.linear(normed, self._head).float()
