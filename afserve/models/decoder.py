"""The attention side of a model: embeddings, attention halves with routers, shared and dense FFNs, LM head.

It knows no network: a layer's bound half returns rows, expert ids and weights, and whoever calls it brings back the
sum of the routed experts. Shapes: T tokens, H hidden, V vocabulary, R selected rows.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from afserve.families.pattern.naming import Naming, bias_of
from afserve.kernels.cache import KeptShape, LayerCache
from afserve.kernels.indexer import NearRows
from afserve.kernels.layer import Half
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedExperts, PackedLinear
from afserve.kernels.stack import DecoderParts, DraftChain, Stack, StackLayer, StepDecoder
from afserve.models.attention import LatentHalf, load_attention
from afserve.models.beside import DraftHead, TargetParts
from afserve.models.dense import Dense
from afserve.models.halves import BoundHalf, LayerTensors, LoadHalf, Part, SplitLoading, norm_weights
from afserve.models.heads import TableMaps, embedded, load_ends
from afserve.models.local_ffn import LatentRows, LocalFfn
from afserve.models.predictor import Predictor
from afserve.models.rope import Rotary, head_tables, latent_tables
from afserve.models.router import Sent, load_router, parted
from afserve.models.vision.sections import SectionedRotary
from afserve.models.vision.tower import PictureEncoder
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec, far_row_bytes
from afserve.spec_parts import DenseSpec, RopeSpec
from afserve.tiles import WholeEncoderSpec

log = logging.getLogger("afserve.models")


class DecoderLayer:
    """One layer without its routed experts. `moe_number` counts MoE layers; None for a dense layer."""

    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, split: SplitLoading | None
    ) -> None:
        self._ops = ops
        naming, layer = tensors.naming, tensors.layer
        ffn = spec.layer(layer).ffn
        self.moe_number = spec.moe_index.get(layer)
        router = (
            None
            if isinstance(ffn, DenseSpec)
            else load_router(spec, layer, tensors.source, naming, tensors.dtype)
        )
        load_half: LoadHalf = load_attention if split is None else split.half
        self._half = load_half(spec, tensors, ops, rope, router)
        self._ffn = LocalFfn(spec, tensors, ops, split)
        self._moe = moe = spec.layer(layer).moe
        self._latent = LatentRows(spec, moe, tensors, ops) if moe and moe.latent else None
        scaled = spec.around.scaled_by_layer
        self._row_scale = float(tensors(naming.layer_scale, 1)) if scaled else 1.0

    @property
    def keeps(self) -> KeptShape:
        """What the attention half writes to a cache."""
        return self._half.keeps

    def bind(self, cache: LayerCache, near: NearRows | None = None) -> BoundHalf:
        """The attention half over this layer's part of a cache; what it returns is what FFNs and expert nodes eat.
        `near`: rows of its latents, where these are far."""
        if near is not None and isinstance(self._half, LatentHalf):
            return self._half.bind(cache, near)
        return self._half.bind(cache)

    def stacked(
        self, half: BoundHalf, experts: Sequence[PackedExperts] | None, group: int = 0
    ) -> StackLayer | None:
        """The whole layer, given the experts of every MoE layer, or none where these are away, and the group of its KV;
        None where an op of it is none of a stack's."""
        zero = self._moe is not None and self._moe.zero_experts
        if half.bound is None or zero or self.late or self._latent is not None or self._ffn.splits:
            return None
        own = experts[self.moe_number] if experts is not None and self.moe_number is not None else None
        away, steps = self.moe_number is not None and own is None, self._ffn.steps(self._row_scale)
        return StackLayer(half.bound, self._ffn.maps, own, away, group, steps)

    def local_ffn(self, normed_TH: Tensor, x_TH: Tensor) -> Tensor | None:
        """The shared expert of an MoE layer, or a dense layer's FFN; None when there is neither. `x_TH` is the residual
        stream, which some shared experts read by a norm of their own."""
        return self._ffn(normed_TH, x_TH)

    def sent(self, half: Half) -> Sent:
        """Rows as the layer's experts eat them, and what its router chose."""
        normed_TH, expert_TK, weight_TK = half
        assert self._moe is not None and expert_TK is not None and weight_TK is not None, "without a router"
        x_TX = normed_TH if self._latent is None else self._latent.lowered(normed_TH)
        if not self._moe.zero_experts:
            return Sent(x_TX, expert_TK, weight_TK)
        return parted(x_TX, expert_TK, weight_TK, self._moe.experts)

    @property
    def late(self) -> bool:
        """Whether the sum of its experts is added behind the next layer, which has none."""
        return self._moe is not None and self._moe.late

    @property
    def adds_at_once(self) -> bool:
        """Whether a norm follows the sum of shared and routed experts, so that `whole_sum` takes both."""
        return self._ffn.adds_at_once

    def adds_alone(self, sent: Sent) -> bool:
        """Whether a layer's sums, and before them those of its shared expert, are added as they come."""
        return not self.adds_at_once and self._latent is None and sent.own_TX is None

    def whole_sum(self, routed_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        """What an MoE layer adds to the residual stream, but for a shared expert that was added before; `routed_TH` are
        the sums of its experts, as wide as what was `sent`."""
        if self._latent is not None:
            routed_TH = self._latent.raised(routed_TH)
        return self._ffn.whole_sum(routed_TH, shared_TH)

    def finish(self, x_TH: Tensor) -> None:
        """The last step of a layer, behind all that it adds."""
        if self._row_scale != 1.0:
            x_TH *= self._row_scale


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
        dense_dtype: str = "auto",
        lm_head: str = "auto",
        split: SplitLoading | None = None,
    ) -> None:
        """`dense_dtype`: what linear maps are kept in; see `Dense`. `lm_head`: see `load_ends`. `split`: of a node
        on several devices, of which `ops` is the first one's."""
        self.spec, self.ops, self.dtype = spec, ops, dtype
        self.places = (ops.device, *(() if split is None else split.further))
        self._dense = Dense(ops, dtype, dense_dtype)
        ends = load_ends(spec, source, naming, self._dense, dtype, lm_head)
        self._embed_VH = ends.embed_VH
        table, maps = spec.table, None
        if table is not None:
            maps = TableMaps(spec, table, source, naming, self._dense, ops)
        self._table = maps
        around, hidden = spec.around, (spec.hidden,)
        head_bias = (
            source.tensor(bias_of(naming.head), (spec.vocab_size,), dtype) if around.head_bias else None
        )
        if split is not None and split.head is not None and isinstance(ends.head_VH, Tensor):
            self._head: PackedLinear | None = None
            self._scored: Part = split.head(ends.head_VH, head_bias)
        else:
            self._head = self._dense.linear(ends.head_VH, bias_O=head_bias)
            self._scored = partial(ops.logits, packed=self._head)
        less_one = around.norm_less_one
        self._norm = norm_weights(source, naming.final_norm, spec.hidden, dtype, less_one)
        self._norm_bias = (
            source.tensor(bias_of(naming.final_norm), hidden, dtype) if around.norm_bias else None
        )
        made: dict[tuple[RopeSpec | None, int], Rotary] = {}  # layers that turn alike share their tables
        found: list[DecoderLayer] = []
        self.predictor: Predictor | None = None
        self.head: DraftHead | None = None
        self.encoder: PictureEncoder | None = None
        self._positions = max_positions
        for layer in range(len(spec.pattern)):
            attention = spec.layer(layer).attention
            kind = attention.rope, attention.head_dim
            if kind not in made:
                alpha_D = rope_factors(attention.rope, source, naming)
                shape = latent_tables if attention.kind == "mla" else head_tables
                made[kind] = shape(attention, max_positions, dtype, ops.device, alpha_D)
            tensors = LayerTensors(source, naming, layer, dtype, self._dense, less_one)
            found.append(DecoderLayer(spec, tensors, ops, made[kind], split))
            if layer == spec.layers:
                assert naming.predictor is not None, "refused by `served_spec`"
                self.predictor = Predictor(spec, naming.predictor, tensors, ops)
            progress((layer + 1) / len(spec.pattern))
        self.sections: SectionedRotary | None = None
        if isinstance(spec.encoder, WholeEncoderSpec):
            own = next(table for (rope, _), table in made.items() if rope is not None)
            self.sections = SectionedRotary(spec.encoder, own.cos_PD, own.sin_PD)
        self.layers, self.predicting = found[: spec.layers], found[spec.layers :]
        if self.rounding_error is not None:
            named, error = self._dense.name, self.rounding_error
            log.warning("dense weights are rounded to %s: relative error %.2g", named, error)

    def beside(self) -> TargetParts:
        """What a head takes of it."""
        assert self._head is not None, "a head is not asked for where it is split"
        own = self.ops, self.dtype, self._positions, self._dense
        return TargetParts(*own, self.words, self._head, self.normed)

    @property
    def keeps(self) -> list[KeptShape]:
        """What every layer writes to a cache, those that draft last."""
        kept = [layer.keeps for layer in (*self.layers, *self.predicting)]
        return kept if self.head is None else [*kept, *self.head.keeps]

    @property
    def rounding_error(self) -> float | None:
        """Relative, of linear maps that were rounded to `dense_dtype`; None where none was."""
        return self._dense.rounding_error

    @property
    def dense_in_fp8(self) -> bool:
        """Whether linear maps stay in the checkpoint's FP8 blocks."""
        return self._dense.holds_blocks and self.spec.in_fp8_blocks

    def fetches(self, layer: int) -> bool:
        """Whether latents of this layer, by its place in `keeps`, may lie far."""
        own = len(self.layers) + len(self.predicting)
        return layer < own and far_row_bytes(self.spec.layer(layer).attention, 1) > 0

    def bind(
        self, layers: Sequence[LayerCache], near: Sequence[NearRows | None] = ()
    ) -> tuple[BoundHalf, ...]:
        """Every layer's attention half over one cache, that of the `predictor` last, and over what is `near` of it."""
        own = [self._with_source(number, layers) for number in range(len(layers))]
        source = [self.spec.layer(number).attention.source for number in range(len(layers))]
        rows = [near[number if of is None else of] if near else None for number, of in enumerate(source)]
        pairs = zip((*self.layers, *self.predicting), own, rows, strict=True)
        return tuple(layer.bind(cache, some) for layer, cache, some in pairs)

    def _with_source(self, number: int, layers: Sequence[LayerCache]) -> LayerCache:
        """A layer's part of a cache; of one that attends another's latents these, and index keys of its own."""
        a = self.spec.layer(number).attention
        if a.source is None:
            return layers[number]
        return layers[a.source][:1] + (layers[number] if a.kv_width else ())

    def stack(
        self,
        layers: Sequence[DecoderLayer],
        halves: Sequence[BoundHalf],
        group_of: Sequence[int],
        experts: Sequence[PackedExperts] | None,
    ) -> Stack | None:
        """These layers over the cache that `halves` are bound to, each with the group of its KV, and with the experts
        of each MoE layer, expert e in slot e, or none where they are away; None where the kernels do not run them in
        one call."""
        if experts is not None and len(experts) < self.spec.moe_layers:
            return None
        parts = zip(layers, halves, group_of, strict=True)
        stacked = [one for layer, half, at in parts if (one := layer.stacked(half, experts, at)) is not None]
        return self.ops.stack_layers(stacked) if 0 < len(stacked) == len(layers) else None

    def chain(self, stack: Stack) -> DraftChain | None:
        """Drafts in one call, by the predictor whose decoder layer `stack` is; None where the kernels have no such."""
        if self.predictor is None or self._head is None or not self._plain_ends:
            return None
        around = self.spec.around
        return stack.chain_drafts(self.predictor.parts(self._embed_VH, self._head, around.logit_scale))

    def step_decoder(self, stack: Stack) -> StepDecoder | None:
        """Greedy steps in one call, by a `stack` of all layers; None where the kernels have no such."""
        around, embed_VH = self.spec.around, self._embed_VH
        if self._head is None or self._table is not None:
            return None
        scales = around.embedding_scale, around.logit_scale, around.logit_cap
        norm = self._norm, self._norm_bias, around.centred
        ends = DecoderParts(embed_VH, *norm, self._head, self.spec.eps, *scales)
        return stack.open_decoder(ends)

    @property
    def _plain_ends(self) -> bool:
        around = self.spec.around
        return around.embedding_scale == 1.0 and around.logit_cap is None

    def embed(self, token_T: Tensor, looked_up_TX: Tensor | None = None) -> Tensor:
        """A fresh x_TH, which the layers change in place. `looked_up_TX` are rows of the look-up table of a model that
        has one; without them, as where it is only measured, they count as zeros."""
        x_TH = self.words(token_T)
        if self._table is not None:
            return self._table.add(x_TH, looked_up_TX)
        scale = self.spec.around.embedding_scale
        return x_TH if scale == 1.0 else x_TH.mul_(scale)

    def words(self, token_T: Tensor) -> Tensor:
        """Fresh rows of the embedding alone, as the checkpoint has them."""
        return embedded(self._embed_VH, token_T, self.dtype, self.ops)

    def logits(self, x_RH: Tensor) -> Tensor:
        """Float32 logits of the rows given, (R, V)."""
        return self.scores(self.normed(x_RH))

    def scores(self, normed_RH: Tensor) -> Tensor:
        """The same of rows after a norm."""
        scale = self.spec.around.logit_scale
        logits_RV = self._scored(normed_RH)
        if scale != 1.0:
            logits_RV.mul_(scale)
        cap = self.spec.around.logit_cap
        return logits_RV if cap is None else self.ops.steps.cap_rows(logits_RV, cap)

    def pooled(self, x_H: Tensor) -> Tensor:
        """A row after the final norm, as a float32 vector of length 1, on the host. Row by row, so that it does not
        depend on who shares the batch."""
        row_H: Tensor = self.normed(x_H[None])[0].cpu().double()
        length = float(row_H.norm())
        return row_H.div(length or 1.0).float()

    def normed(self, x_RH: Tensor) -> Tensor:
        """Rows of the last layer after the final norm."""
        around, eps = self.spec.around, self.spec.eps
        if around.centred:
            normed_RH = self.ops.layer_norm(x_RH, self._norm, self._norm_bias, eps)
        else:
            normed_RH = self.ops.rms_norm(x_RH, self._norm, eps)
        return normed_RH


def rope_factors(rope: RopeSpec | None, source: TensorSource, naming: Naming) -> Tensor | None:
    """Learned ones, in float32: what frequencies are multiplied by is e to the power of them."""
    if rope is None or not rope.learned:
        return None
    return source.tensor(naming.rope_factors, (rope.dim // 2,), torch.float32)
