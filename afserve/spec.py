"""A model's shape and the sizes that follow from it: plain numbers, no torch, no weights.

Everything that sizes memory, batches or messages starts here. `families/` reads it from a `config.json` and knows the
names of tensors; this file opens nothing.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from afserve.coverage import QuantCoverage
from afserve.errors import ConfigError
from afserve.quantization import Quantization
from afserve.spec_parts import (
    PLAIN_AROUND,
    Around,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    MoeSpec,
    TableSpec,
    projections_of,
)
from afserve.tiles import EncoderSpec

FP8_BLOCK = 128  # outputs and inputs that share a scale, where kernels multiply FP8 weights
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class ModelSpec:
    """One model. Layer i is `kinds[pattern[i]]`, so a model of 61 layers that are of two kinds holds two LayerSpecs.

    Layers may differ in everything but the routed experts' number, top-k and size, which `moe` gives for all of them.
    The last `predictors` of `pattern` are no layers of the model: they predict a further token, for drafts, and have
    experts and KV as the others do.
    """

    family: str
    hidden: int
    vocab_size: int
    max_position: int
    eps: float
    tied: bool
    dtype: str
    fp8_block: tuple[int, int] | None
    kinds: tuple[LayerSpec, ...]
    pattern: tuple[int, ...]
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    around: Around = PLAIN_AROUND
    quantization: Quantization | None = None
    coverage: QuantCoverage | None = None
    predictors: int = 0
    table: TableSpec | None = None
    encoder: EncoderSpec | None = None

    def layer(self, number: int) -> LayerSpec:
        """Attention and FFN of a decoder layer. For loading; a step reads what was loaded."""
        return self.kinds[self.pattern[number]]

    @property
    def in_fp8_blocks(self) -> bool:
        """Whether the checkpoint has the FP8 blocks that kernels multiply as they are."""
        return self.fp8_block == (FP8_BLOCK, FP8_BLOCK)

    @property
    def layers(self) -> int:
        return len(self.pattern) - self.predictors

    @cached_property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """The layers whose FFN is routed, predictors included; the others are dense."""
        routed = [kind.moe is not None for kind in self.kinds]
        return tuple(layer for layer, kind in enumerate(self.pattern) if routed[kind])

    @cached_property
    def moe_index(self) -> dict[int, int]:
        """Decoder layer -> its number among the MoE layers."""
        return {layer: number for number, layer in enumerate(self.moe_layer_ids)}

    @cached_property
    def moe(self) -> MoeSpec:
        """The first MoE layer's experts; their number, top-k and size are those of every MoE layer."""
        return next(kind.moe for kind in map(self.layer, self.moe_layer_ids) if kind.moe is not None)

    @property
    def experts(self) -> int:
        return self.moe.experts

    @property
    def choices(self) -> int:
        """Experts, and those that compute nothing, which a router chooses among."""
        return self.moe.choices

    @property
    def top_k(self) -> int:
        return self.moe.top_k

    @property
    def expert_width(self) -> int:
        """Numbers of a row on its way to the experts and back: the hidden size, or that of their latent."""
        return self.moe.width(self.hidden)

    @property
    def moe_layers(self) -> int:
        return len(self.moe_layer_ids)

    @property
    def asked_layers(self) -> int:
        """The numbers that messages to experts have for a layer: those of MoE layers, and `look_up_layer`."""
        return self.moe_layers + (self.table is not None)

    @property
    def look_up_layer(self) -> int:
        """What asks for rows of the table; slice s of it stands where expert s of the first MoE layer does."""
        return self.moe_layers

    @property
    def routed_predictors(self) -> int:
        """Of the MoE layers, those that predict."""
        return sum(layer >= self.layers for layer in self.moe_layer_ids)

    @cached_property
    def windowed_layers(self) -> tuple[int, ...]:
        """Those that see a window of the last tokens, where others see all; of a model with windows alone none."""
        own = enumerate(self.pattern[: self.layers])
        found = tuple(n for n, kind in own if self.kinds[kind].attention.window)
        return found if len(found) < self.layers else ()

    @property
    def widest_window(self) -> int:
        """Tokens that these see at most, the newest among them."""
        return max((self.layer(n).attention.window or 0 for n in self.windowed_layers), default=0)

    def windowed_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """The part of `kv_bytes_per_token` that these have."""
        return sum(self.layer(n).attention.kv_bytes(dtype_bytes) for n in self.windowed_layers)

    def kv_bytes_per_token(self, dtype_bytes: int = 2, block_size: int | None = None) -> int:
        """Of a KV cache with blocks of so many tokens, its part of the states in a block included, rounded up; without
        a block size that of keys and values alone."""
        kept = sum(kind.attention.kv_bytes(dtype_bytes) * layers for kind, layers in self._counted())
        return kept if block_size is None else kept - (-self.state_bytes() // block_size)

    def far_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """The part of `kv_bytes_per_token` that may lie in memory of the host: rows of layers that attend those which
        an indexer chose. Rows of a byte a number end with scales."""
        return sum(far_row_bytes(kind.attention, dtype_bytes) * layers for kind, layers in self._counted())

    @property
    def far_layers(self) -> int:
        """Layers of which that is."""
        return sum(layers for kind, layers in self._counted() if far_row_bytes(kind.attention, 1))

    def state_bytes(self) -> int:
        """Of a sequence's states, which do not grow with it; a KV cache keeps them once in every block."""
        return 4 * sum(kind.attention.state_numbers * layers for kind, layers in self._counted())

    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return projections_of(self.moe.activation) * self.expert_width * self.moe.inner

    def routed_parameters(self) -> int:
        return self.moe_layers * self.experts * self.expert_parameters()

    def table_parameters(self) -> int:
        """Of the look-up table, which expert nodes read."""
        return self.table.rows * self.table.width if self.table else 0

    def attention_parameters(self) -> int:
        """Everything else but the routed experts: attention, routers, shared and dense FFNs, embeddings."""
        h = self.hidden
        stack = sum(
            layers * (_attention_parameters(kind.attention, h) + _local_parameters(kind.ffn, h) + 2 * h)
            for kind, layers in self._counted()
        )
        joins = self.predictors * 2 * h * h + (h * self.table.heads * self.table.width if self.table else 0)
        return stack + joins + self.vocab_size * h * (1 if self.tied else 2) + h

    def encoder_parameters(self) -> int:
        """Of the encoder of pictures, which every attention node has."""
        return self.encoder.parameters_beside(self.hidden) if self.encoder else 0

    def cut(self, layers: int) -> "ModelSpec":
        """The first `layers` layers of this model; at least one MoE layer must remain."""
        first = self.moe_layer_ids[0]
        if layers <= first:
            raise ConfigError(
                f"layers: {layers} leaves no MoE layer of {self.family}; the first is layer {first}, "
                f"so use at least {first + 1}"
            )
        last = self.layer(min(layers, self.layers) - 1).moe
        if last is not None and last.late:
            raise ConfigError(
                f"layers: {layers} ends with a layer of {self.family} whose experts are added behind the next one; "
                f"use {layers + 1}"
            )
        return replace(self, pattern=self.pattern[:layers])

    def predicting(self, *, narrow: bool = False) -> "ModelSpec":
        """With one layer of multi-token prediction, which is as the last one that keeps keys, chooses what it attends
        itself and has experts; a `narrow` one is as those that have a window and, behind it, as those that have no
        experts. Raises ConfigError where the model has none of these."""
        last = [self.kinds[kind] for kind in reversed(self.pattern)]
        if not narrow:
            alike = next(one for one in last if one.moe is not None and one.attention.keeps_for_itself)
            return replace(self, pattern=(*self.pattern, self.kinds.index(alike)), predictors=1)
        windowed = next((one.attention for one in last if one.attention.window), None)
        dense = next((one.ffn for one in last if one.moe is None), None)
        if windowed is None or dense is None:
            raise ConfigError(
                f"--draft mtp: the layer of multi-token prediction of {self.family} is one with a window and without "
                "experts, and none of this model's layers says how; use --draft suffix",
                param="draft",
            )
        kinds = (*self.kinds, LayerSpec(windowed, dense))
        return replace(self, kinds=kinds, pattern=(*self.pattern, len(self.kinds)), predictors=1)

    def fingerprint(self) -> str:
        """Hex digest of the whole shape; equal on every node that serves the same model."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def _counted(self) -> list[tuple[LayerSpec, int]]:
        """Each kind of layer and how many there are of it."""
        return [(self.kinds[kind], layers) for kind, layers in Counter(self.pattern).items()]


def far_row_bytes(a: AttentionSpec, element: int) -> int:
    """Of a token's latent in a layer that attends those which an indexer chose; 0 in others."""
    if a.kind != "mla" or a.indexer is None or a.source is not None:
        return 0
    return element * (a.kv_lora_rank + a.rope_dim) + 8 * (element == 1)


def distinct(layers: Sequence[LayerSpec]) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
    """`kinds` and `pattern` of a stack of layers."""
    numbers: dict[LayerSpec, int] = {}
    pattern = tuple(numbers.setdefault(layer, len(numbers)) for layer in layers)
    return tuple(numbers), pattern


def _attention_parameters(a: AttentionSpec, h: int) -> int:
    if a.kind == "none":
        return 0
    if a.kind == "conv":
        return a.heads * (4 * h + a.taps)
    if a.kind == "linear":
        keys, values = a.kv_heads * a.head_dim, a.heads * a.value_dim
        if a.rule == "channel":
            # for decays and for the output's gate: a map each, or maps behind maps
            made = h * (keys + values) if a.direct else 2 * a.head_dim * (h + values)
            return h * (2 * keys + 2 * values + a.heads) + made + (2 * keys + values) * a.taps
        return h * (2 * keys + 3 * values + 2 * a.heads) + (2 * keys + values) * a.taps
    index = a.indexer
    if a.kind != "mla":
        scored = index.dim * h * (index.heads + 1) if index else 0
        return scored + h * (2 * a.heads * a.head_dim + a.gate_width + 2 * a.kv_heads * a.head_dim)
    q_in = a.q_lora_rank or h
    scored = 0
    if index and index.kept:
        scored = index.dim * (h + (h if index.own else q_in) * index.heads) + h * index.heads
    return scored + (
        (h * a.q_lora_rank if a.q_lora_rank else 0)
        + q_in * a.heads * a.head_dim
        + h * (a.kv_lora_rank + a.rope_dim) * (a.source is None)
        + a.kv_lora_rank * a.heads * (a.nope_dim + a.value_dim)
        + a.heads * a.value_dim * h
        + h * a.gate_width
    )


def _local_parameters(ffn: DenseSpec | MoeSpec, h: int) -> int:
    """Of an FFN, what an attention node holds: a dense one, or the router, the shared expert and the ways into a latent
    and back."""
    maps = projections_of(ffn.activation)
    if isinstance(ffn, DenseSpec):
        return maps * h * ffn.inner
    return ffn.choices * h + maps * h * ffn.shared_inner + 2 * h * ffn.latent
