"""Speculation as the planner counts it: who drafts, how many tokens a step yields, and the layers that drafting takes.

A step verifies `tokens` drafts and one token more of each sequence. What it yields is a mean accepted length
(`acceptance.py`). It knows no hardware and no batch.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from afserve.errors import ConfigError
from afserve.placement.planner.perf.shape import AttentionLayers, ModelShape
from afserve.placement.planner.perf.shape_attention import attention_layers
from afserve.spec import ModelSpec
from afserve.spec_parts import DenseSpec

NEIGHBOURS = 0.5
"""Of a verified row that is not its sequence's first: the independent rows that choose as many distinct experts.
Neighbours choose alike: verifying 4 tokens loads about 2.5 times the experts of one (Cohere), not 4 times."""
MODEL = "model"  # the drafter that is a small model of its own
_HEAD_DIM, _KV_HEADS, _INNER = 128, 8, 3.5
"""Of a dense draft layer, where no checkpoint is read: Llama-3's, with an FFN of so many times the hidden size."""


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """layers: its own, which every drafted token passes. routed: they are like the model's, with experts in the pool;
    else dense, on the attention side. vocabulary: of its own head, 0 for the model's. at_once: one pass for all tokens
    of a step. hidden, groups: of a draft model, which has its own size and layers, FFNs among their projections, and an
    embedding."""

    name: str
    layers: int = 0
    routed: bool = False
    vocabulary: int = 0
    at_once: bool = False
    hidden: int = 0
    groups: tuple[AttentionLayers, ...] = ()


NOBODY = DrafterCosts("off")
DRAFTERS = {
    drafter.name: drafter
    for drafter in (
        DrafterCosts("mtp", layers=1, routed=True),
        DrafterCosts("eagle3", layers=1, vocabulary=32000),
        DrafterCosts("dflash", layers=5, at_once=True),
        DrafterCosts("dspark", layers=5, at_once=True),
        DrafterCosts("ngram"),
        DrafterCosts("suffix"),
    )
}


@dataclass(frozen=True, slots=True)
class Drafts:
    """`tokens` of each sequence in a step; `length`: tokens that the step yields in the mean, 1 to tokens + 1. spread:
    one standard deviation of the log of the accepted drafts. source: where these are from, in words."""

    drafter: DrafterCosts = NOBODY
    tokens: int = 0
    length: float = 1.0
    spread: float = 0.0
    source: str = ""

    def __str__(self) -> str:
        return f"{self.drafter.name}:{self.tokens}" if self.tokens else "off"

    @property
    def rows(self) -> int:
        """That a sequence has in a step."""
        return 1 + self.tokens

    @property
    def independent(self) -> float:
        """Independent rows that choose as many distinct experts, over these rows."""
        return (1 + NEIGHBOURS * self.tokens) / self.rows

    @property
    def deviation(self) -> float:
        """Of the log of `length`."""
        return self.spread * (self.length - 1) / self.length

    def further(self, deviations: float) -> float:
        """The length so many standard deviations away."""
        return min(1 + (self.length - 1) * math.exp(self.spread * deviations), self.rows)

    @property
    def passes(self) -> tuple[int, ...]:
        """Rows of a sequence in each pass of the drafter. The first also reads what the last step accepted, of which
        nobody knows before how many rows it is: it has them all."""
        if not self.tokens or not self.drafter.layers:
            return ()
        return (self.rows,) if self.drafter.at_once else (self.rows, *(1,) * (self.tokens - 1))


NO_DRAFTS = Drafts()


def model_drafter(spec: ModelSpec, folder: str) -> DrafterCosts:
    """Raises ConfigError where the model in `folder` has experts: which of them are read hangs on the batch."""
    if spec.moe_layer_ids:
        raise ConfigError(
            f"--draft model: {folder}: {spec.family} has experts, and plans count draft models without; take one of "
            "the same tokenizer such as Qwen3-0.6B, or measure with afserve up",
            param="draft",
        )
    layers = [spec.layer(number) for number in range(spec.layers)]
    inner = max(layer.ffn.inner for layer in layers if isinstance(layer.ffn, DenseSpec))
    groups = tuple(
        replace(group, weight_elems=group.weight_elems + 3 * spec.hidden * inner)
        for group in attention_layers((layer.attention for layer in layers), spec.hidden)
    )
    return DrafterCosts(
        MODEL, layers=spec.layers, vocabulary=spec.vocab_size, hidden=spec.hidden, groups=groups
    )


@lru_cache(maxsize=64)
def with_drafter(shape: ModelShape, drafter: DrafterCosts) -> ModelShape:
    """The model with the drafter's layers behind its own: what is held in memory, and what prompts pass."""
    if not drafter.layers:
        return shape
    routed = drafter.layers if drafter.routed else 0
    # `vocab` stands for an embedding and a head.
    own = drafter.vocabulary * drafter.hidden // shape.hidden if drafter.groups else drafter.vocabulary // 2
    return replace(
        shape,
        attention=(*shape.attention, *_layers_of(shape, drafter)),
        experts=replace(shape.experts, layers=shape.experts.layers + routed),
        vocab=shape.vocab + own,
    )


@lru_cache(maxsize=64)
def alone(shape: ModelShape, drafter: DrafterCosts) -> ModelShape:
    """The drafter's layers, and the head behind them, as a model of their own. Dense FFNs are among its projections."""
    return replace(
        shape,
        hidden=drafter.hidden or shape.hidden,
        attention=_layers_of(shape, drafter),
        experts=replace(shape.experts, layers=drafter.layers if drafter.routed else 0),
        dense_layers=0 if drafter.routed else drafter.layers,
        dense_elems=0,
        vocab=drafter.vocabulary or shape.vocab,
    )


def _layers_of(shape: ModelShape, drafter: DrafterCosts) -> tuple[AttentionLayers, ...]:
    """Those of a draft model. MTP: the model's own full attention behind a product of two hidden states (`eh_proj`).
    Else grouped attention whose query, key and value take two, with a dense FFN."""
    hidden = shape.hidden
    if drafter.groups:
        return drafter.groups
    if drafter.routed:
        like = shape.attention[0]
        return (replace(like, layers=drafter.layers, weight_elems=like.weight_elems + 2 * hidden * hidden),)
    heads = max(hidden // _HEAD_DIM, 1)
    grouped = min(_KV_HEADS, heads)
    wide = (heads + 2 * grouped) * _HEAD_DIM
    pair = 4.0 * heads * _HEAD_DIM
    group = AttentionLayers(
        "gqa",
        drafter.layers,
        weight_elems=2 * hidden * wide + heads * _HEAD_DIM * hidden + int(3 * _INNER * hidden * hidden),
        kv_elems=2 * grouped * _HEAD_DIM,
        pair_flops=pair,
        prefill_pair_flops=pair,
        heads=heads,
        kv_heads=grouped,
        row_elems=3 * hidden + 2 * wide,
    )
    return (group,)
