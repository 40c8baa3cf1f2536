"""All layers of a model as one call of the native library.

A stack is made where every half is fused and every FFN is the library's; else there is none, and halves and FFNs are
called one by one, with the same bits. Shapes: T tokens, H hidden, K top-k, L MoE layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.kernels import _native, native_half
from afserve.kernels.checks import expect_shape
from afserve.kernels.formats.ggml import GgmlRows
from afserve.kernels.indexer import chosen_batch
from afserve.kernels.native_ggml import embedding_of
from afserve.kernels.native_products import address, plain
from afserve.kernels.native_steps import ffn_steps, fits, linear_of
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import (
    Decoded,
    DecoderParts,
    DraftChain,
    Drafted,
    Exchange,
    PredictorParts,
    Stack,
    Stacked,
    StackLayer,
    StepDecoder,
    Stopped,
)


def stack_of(engine: _native.Engine, layers: tuple[StackLayer, ...]) -> "NativeStack | None":
    """None where a layer is not the library's from end to end, or layers are not alike."""
    found = [_native_layer(layer) for layer in layers]
    whole = [layer for layer in found if layer is not None]
    halves = [layer.half.handle for layer in layers]
    dtypes = {half.dtype for half in halves if isinstance(half, native_half.HalfOverCache)}
    tops = {half.top for half in halves if isinstance(half, native_half.HalfOverCache) and half.top}
    chosen = {_top_k(layer) for layer in layers if layer.routes}
    if len(whole) < len(layers) or len(dtypes) != 1 or len(chosen) > 1 or len(tops) > 1:
        return None
    moe_layers = sum(layer.routes for layer in layers)
    most = max(chosen, default=0), max(tops, default=0)
    return NativeStack(engine, layers, whole, dtypes.pop(), moe_layers, *most)


def _top_k(layer: StackLayer) -> int:
    half = layer.half.handle
    return half.top_k if isinstance(half, native_half.HalfOverCache) else 0


def _native_layer(layer: StackLayer) -> _native.StackLayer | None:
    half = layer.half.handle
    if not isinstance(half, native_half.HalfOverCache):
        return None
    first = second = experts = None
    if layer.ffn is not None:
        first, second = linear_of(layer.ffn[0], half.dtype), linear_of(layer.ffn[1], half.dtype)
        if first is None or second is None:
            return None
    if layer.experts is not None:
        handle = layer.experts.handle
        if not isinstance(handle, _native.Experts) or layer.experts.dtype is not half.dtype:
            return None
        experts = handle
    steps = None if layer.steps is None else ffn_steps(layer.steps, half.dtype)
    if steps is None and layer.steps is not None:
        return None
    return _native.StackLayer(half.half, first, second, experts, layer.away, layer.group, steps)


class NativeStack(Stack):
    """`layers` hold what `whole`, the library's forms of them, point at."""

    def __init__(
        self,
        engine: _native.Engine,
        layers: tuple[StackLayer, ...],
        whole: list[_native.StackLayer],
        dtype: torch.dtype,
        moe_layers: int,
        top_k: int,
        rows: int,
    ) -> None:
        """`rows`: so many are chosen by indexers, 0 without any."""
        self._rows = rows
        self._engine, self._layers, self._stack = engine, layers, _native.Stack(whole)
        self._dtype, self._moe_layers, self._top_k = dtype, moe_layers, top_k
        self.hidden = layers[0].half.layer.input_norm_H.shape[0]

    def run_layers(
        self, x_TH: Tensor, groups: Sequence[PagedBatch], bad_T: Tensor | None, exchange: Exchange | None
    ) -> Stacked:
        if x_TH.dtype is not self._dtype or not x_TH.is_contiguous():
            raise ValueError(
                f"x_TH: {x_TH.dtype} with strides {x_TH.stride()}, expected contiguous {self._dtype}"
            )
        tokens, top_k = x_TH.shape[0], self._top_k
        expert = torch.empty((self._moe_layers, tokens, top_k), dtype=torch.int32)
        normed = weight = None
        if exchange is not None:
            normed, weight = torch.empty_like(x_TH), torch.empty(tokens, top_k, dtype=torch.float32)
        earlier = groups[0].chosen.rows  # of layers that ran before these, or of a step that was stopped
        slot_TK = (
            native_half.room_for_choice(self._rows, groups[0]) if earlier is None else earlier.block_table_SB
        )
        layers, seconds, waited = self._stack.run(
            self._engine,
            [native_half.batch_handle(batch) for batch in groups],
            x_TH.data_ptr(),
            expert.data_ptr(),
            address(bad_T),
            exchange,
            address(normed),
            address(weight),
            *native_half.slots_of(slot_TK),
        )
        if self._rows and slot_TK is not None:
            groups[0].chosen.rows = chosen_batch(groups[0], slot_TK, self._rows)
        if layers == len(self._layers):
            return Stacked(expert, seconds, waited)
        assert normed is not None and weight is not None, "a layer waits for sums of nobody"
        sent = sum(layer.routes for layer in self._layers[: layers + 1])
        return Stacked(expert[:sent], seconds, waited, Stopped(layers, normed, weight))

    def chain_drafts(self, parts: PredictorParts) -> DraftChain | None:
        if self._rows:
            return None
        join, head = linear_of(parts.join, self._dtype), linear_of(parts.head, self._dtype)
        embed_VH, norms = parts.embed_VH, (parts.embedding_norm_H, parts.hidden_norm_H, parts.last_norm_H)
        alike = all(fits(one, self._dtype) for one in (*norms, _numbers(embed_VH)))
        if join is None or head is None or not alike or len(embed_VH) != parts.head.outputs:
            return None
        made = _native.Predictor(
            self._stack,
            embedding_of(embed_VH),
            norms[0].data_ptr(),
            norms[1].data_ptr(),
            norms[2].data_ptr(),
            parts.eps,
            parts.logit_scale,
            join,
            head,
        )
        return NativeChain(self._engine, self, made, parts, self._top_k)

    def open_decoder(self, parts: DecoderParts) -> StepDecoder | None:
        head, embed_VH, norm_H = linear_of(parts.head, self._dtype), parts.embed_VH, parts.last_norm_H
        alike = all(fits(one, self._dtype) for one in (norm_H, parts.last_bias_H, _numbers(embed_VH)))
        if head is None or not alike or len(embed_VH) != parts.head.outputs:
            return None
        ends = embedding_of(embed_VH), norm_H.data_ptr(), address(parts.last_bias_H), parts.centred
        scales = parts.embedding_scale, parts.logit_scale, parts.logit_cap or 0.0
        made = _native.Decoder(self._stack, *ends, parts.eps, scales, self._rows, head)
        return NativeDecoder(self._engine, self, made, parts, (self._moe_layers, self._top_k))


def _numbers(table: Tensor | GgmlRows) -> Tensor | None:
    return table if isinstance(table, Tensor) else None


class NativeDecoder(StepDecoder):
    """`layers` and `parts` hold what `decoder` points at."""

    def __init__(
        self,
        engine: _native.Engine,
        layers: NativeStack,
        decoder: _native.Decoder,
        parts: DecoderParts,
        chosen: tuple[int, int],
    ) -> None:
        """`chosen`: MoE layers and experts that a row has in each."""
        self._engine, self._decoder, self._chosen = engine, decoder, chosen
        self._held = layers, parts

    def decode_tokens(
        self,
        token_S: Tensor,
        groups: Sequence[PagedBatch],
        block_sizes: Sequence[int],
        passes: int,
        stops: Sequence[Sequence[int]],
    ) -> Decoded:
        sequences, (layers, top_k) = groups[0].sequences, self._chosen
        expect_shape("token_S", token_S, (sequences,))
        token_PS = torch.empty((passes, sequences), dtype=torch.int32)
        expert_PLSK = torch.empty((passes, layers, sequences, top_k), dtype=torch.int32)
        done, seconds, spoiled = self._decoder.decode(
            self._engine,
            [native_half.batch_handle(batch) for batch in groups],
            block_sizes,
            plain(token_S, torch.int64).data_ptr(),
            passes,
            stops,
            token_PS.data_ptr(),
            expert_PLSK.data_ptr(),
        )
        return Decoded(token_PS[:done], expert_PLSK[:done], seconds, spoiled)


class NativeChain(DraftChain):
    """`layer` and `parts` hold what `predictor` points at."""

    def __init__(
        self,
        engine: _native.Engine,
        layer: NativeStack,
        predictor: _native.Predictor,
        parts: PredictorParts,
        top_k: int,
    ) -> None:
        self._engine, self._layer, self._predictor = engine, layer, predictor
        self._parts, self._top_k = parts, top_k

    def draft_tokens(
        self,
        token_T: Tensor,
        hidden_TH: Tensor,
        batch: PagedBatch,
        ends_3S: Tensor,
        least: float,
        block_size: int,
    ) -> Drafted:
        deepest, sequences = max(1, int(ends_3S[2].max())), batch.sequences
        expect_shape("hidden_TH", hidden_TH, (batch.tokens, self._layer.hidden))
        expect_shape("token_T", token_T, (batch.tokens,))
        expect_shape("ends_3S", ends_3S, (3, sequences))
        drafted = torch.empty((sequences, deepest), dtype=torch.int32)
        likely = torch.empty((sequences, deepest))
        rows = batch.tokens + sequences * (deepest - 1)
        expert = torch.empty((rows, self._top_k), dtype=torch.int32)
        done = self._predictor.draft(
            self._engine,
            native_half.batch_handle(batch),
            plain(token_T, torch.int64).data_ptr(),
            plain(hidden_TH, self._parts.hidden_norm_H.dtype).data_ptr(),
            plain(ends_3S, torch.int32).data_ptr(),
            deepest,
            least,
            block_size,
            drafted.data_ptr(),
            likely.data_ptr(),
            expert.data_ptr(),
        )
        return Drafted(drafted, likely, expert[:done])
