"""The attention side of a model: embeddings, attention halves with routers, shared and dense FFNs, LM head.

It knows no network: a layer's bound half returns rows, expert ids and weights, and whoever calls it brings back the
sum of the routed experts. Shapes: T tokens, H hidden, V vocabulary, R selected rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from afserve.families.naming import Naming
from afserve.kernels.cache import LayerCache, LayerShape
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedLinear
from afserve.models.attention import BoundHalf, LayerTensors, load_attention
from afserve.models.rope import Rotary, tables
from afserve.models.router import load_router
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec
from afserve.spec_parts import DenseSpec, RopeSpec


class DecoderLayer:
    """One layer without its routed experts. `moe_number` counts MoE layers; None for a dense layer."""

    def __init__(self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary) -> None:
        self._ops = ops
        naming, layer = tensors.naming, tensors.layer
        ffn = spec.layer(layer).ffn
        dense = isinstance(ffn, DenseSpec)
        self.moe_number = spec.moe_index.get(layer)
        router = None if dense else load_router(spec, layer, tensors.source, naming, tensors.dtype)
        self._half = load_attention(spec, tensors, ops, rope, router)
        inner = ffn.inner if isinstance(ffn, DenseSpec) else ffn.shared_inner
        names = naming.dense(layer) if dense else naming.shared_expert(layer)
        self._ffn = self._load_ffn(names, (inner, spec.hidden), tensors) if inner else None

    def _load_ffn(
        self, names: tuple[str, str, str], shape: tuple[int, int], tensors: LayerTensors
    ) -> tuple[PackedLinear, PackedLinear]:
        gate, up, down = names
        read, dtype = tensors.source.tensor, tensors.dtype
        gate_up = torch.cat((read(gate, shape, dtype), read(up, shape, dtype)))
        return self._ops.pack_linear(gate_up), self._ops.pack_linear(read(down, shape[::-1], dtype))

    @property
    def keeps(self) -> LayerShape:
        """What the attention half writes to a cache for each token."""
        return self._half.keeps

    def bind(self, cache: LayerCache) -> BoundHalf:
        """The attention half over this layer's part of a cache; what it returns is what FFNs and expert nodes eat."""
        return self._half.bind(cache)

    def local_ffn(self, normed_TH: Tensor) -> Tensor | None:
        """The shared expert of an MoE layer, or a dense layer's FFN; None when there is neither."""
        return None if self._ffn is None else self._ops.mlp(normed_TH, *self._ffn)


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
        self._embed_VH = source.tensor(naming.embedding, shape, dtype)
        head = self._embed_VH if spec.tied else source.tensor(naming.head, shape, dtype)
        self._head = ops.pack_linear(head)
        self._norm = source.tensor(naming.final_norm, (spec.hidden,), dtype)
        made: dict[RopeSpec, Rotary] = {}  # layers that turn alike share their tables
        self.layers: list[DecoderLayer] = []
        for layer in range(spec.layers):
            rope = spec.layer(layer).attention.rope
            assert rope is not None, "refused by families/limits.py"
            if rope not in made:
                made[rope] = tables(rope, max_positions, dtype, ops.device)
            tensors = LayerTensors(source, naming, layer, dtype)
            self.layers.append(DecoderLayer(spec, tensors, ops, made[rope]))
            progress((layer + 1) / spec.layers)

    def bind(self, layers: Sequence[LayerCache]) -> tuple[BoundHalf, ...]:
        """Every layer's attention half over one cache."""
        return tuple(layer.bind(cache) for layer, cache in zip(self.layers, layers, strict=True))

    def embed(self, token_T: Tensor) -> Tensor:
        """A fresh x_TH, which the layers change in place."""
        return torch.index_select(self._embed_VH, 0, token_T)

    def logits(self, x_RH: Tensor) -> Tensor:
        """Float32 logits of the rows given, (R, V)."""
        return self.ops.logits(self.ops.rms_norm(x_RH, self._norm, self.spec.eps), self._head)
