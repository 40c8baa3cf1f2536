"""A fused attention half of the native library over its part of a cache, grouped-query or latent: how it is called; and
how one with states is built and called, in one piece or in parts.

It knows addresses, and no fallback: `native.py`, or a mixer, runs single ops where there is none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, float32

from afserve.kernels import _native
from afserve.kernels.cache import StateShape
from afserve.kernels.delta import DeltaRows
from afserve.kernels.indexer import chosen_batch
from afserve.kernels.layer import BoundStates, FusedStates, Half, MixerParts, StateLayer, StateRows
from afserve.kernels.native_fused import SCORINGS
from afserve.kernels.native_products import CODES, address, plain
from afserve.kernels.native_steps import fits as fits_norm
from afserve.kernels.native_steps import linear_of
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch

KINDS = "head", "channel", "sum", "convolution"
"""Codes of native/states.h; a layer without a mixer has the next one."""


@dataclass(frozen=True, slots=True)
class HalfOverCache:
    """`top_k` is 0 without a router; `held` are tensors that the half reads and nobody else holds. `top` rows are
    chosen by an indexer, 0 without one; with `reuses` those are attended that an earlier layer chose."""

    half: _native.AttentionHalf
    dtype: torch.dtype
    top_k: int
    held: tuple[Tensor | None, ...]
    top: int = 0
    reuses: bool = False


def fits(over: HalfOverCache, x_TH: Tensor) -> bool:
    return x_TH.dtype is over.dtype and x_TH.is_contiguous()


def run(engine: _native.Engine, over: HalfOverCache, x_TH: Tensor, batch: PagedBatch) -> Half:
    tokens = x_TH.shape[0]
    normed, expert, weight = torch.empty_like(x_TH), None, None
    if over.top_k:  # sizes one by one, since a tuple of them takes half as long again
        expert = torch.empty(tokens, over.top_k, dtype=torch.int32)
        weight = torch.empty(tokens, over.top_k, dtype=torch.float32)
    slot_TK = room_for_choice(over.top, batch)
    if over.reuses and batch.chosen.rows is not None:
        slot_TK = batch.chosen.rows.block_table_SB
    over.half.run(
        engine,
        batch_handle(batch),
        x_TH.data_ptr(),
        normed.data_ptr(),
        address(expert),
        address(weight),
        *slots_of(slot_TK),
    )
    if over.top:
        batch.chosen.rows = None if slot_TK is None else chosen_batch(batch, slot_TK, over.top)
    return Half(normed, expert, weight)


def room_for_choice(top: int, batch: PagedBatch) -> Tensor | None:
    """For the slots of the `top` rows that each token attends; None where all attend all that they see."""
    if not top or batch.max_context <= top:
        return None
    return torch.zeros((batch.tokens, top), dtype=torch.int32)


def slots_of(slot_TK: Tensor | None) -> tuple[int, int]:
    """Address, and slots of a token."""
    return (0, 0) if slot_TK is None else (slot_TK.data_ptr(), slot_TK.shape[1])


def batch_handle(batch: PagedBatch) -> _native.Batch:
    """Addresses of the batch's integers: those that `bind_batch` looked up for all layers of a step, or now."""
    if isinstance(batch.handle, _native.Batch):
        return batch.handle
    table = batch.block_table_SB
    return _native.Batch(
        batch.query_start_S1.data_ptr(),
        batch.context_S.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        batch.sequences,
        batch.position_T.data_ptr(),
        batch.kv_slot_T.data_ptr(),
        batch.tokens,
    )


def why_not_states(layer: StateLayer, gate: _native.Linear | None) -> str:
    """What the library can't take of a layer; empty where it runs it in one call."""
    dtype, mixer = layer.input_norm_H.dtype, layer.mixer
    if dtype not in CODES:
        return f"{dtype} weights"
    norms = layer.input_norm_H, layer.post_norm_H, None if mixer is None else mixer.norm_D
    if not all(fits_norm(norm, dtype) for norm in norms):
        return "norms of several dtypes, or with gaps"
    maps = () if mixer is None else (mixer.down, mixer.out, *mixer.second)
    if not all(linear_of(one, dtype) for one in maps):
        return f"{dtype} weights"
    if layer.rule and layer.rule.scoring not in SCORINGS:
        return f"scoring {layer.rule.scoring.value}"
    return f"a gate that {dtype} can't hold" if layer.rule and not gate else ""


def fused_states(
    engine: _native.Engine, layer: StateLayer, gate: _native.Linear | None, rule: _native.Rule
) -> "NativeStates":
    bias_E = None if layer.bias_E is None else plain(layer.bias_E, float32)
    weights, held = _mixer(layer.mixer)
    norms = layer.input_norm_H, layer.post_norm_H
    dtype, hidden = norms[0].dtype, norms[0].shape[0]
    first, last = map(address, norms)
    half = _native.StateHalf(
        CODES[dtype], hidden, layer.eps, first, last, weights, gate, address(bias_E), rule
    )
    return NativeStates(engine, layer, half, (*norms, bias_E, *held))


def _mixer(parts: MixerParts | None) -> tuple[_native.MixerWeights, tuple[Tensor | None, ...]]:
    """And what it points at."""
    if parts is None:
        nothing = _native.MixerArrays(0, 0, 0, 0, 0, 0, 0)
        return _native.MixerWeights(len(KINDS), (0,) * 5, None, None, None, None, nothing, 0.0, 1), ()
    delta, rate_E, skip_V, bias_C = parts.delta, parts.rate_E, None, None
    if delta is None:
        assert parts.conv_WC is not None, "a convolution has taps"
        conv_WC, sizes = parts.conv_WC, (0, parts.conv_WC.shape[1], 0, 1, len(parts.conv_WC))
    else:
        conv_WC, bias_C, skip_V, shape = delta.conv_WC, delta.bias_C, delta.skip_V, delta.shape
        sizes = shape.key_heads, shape.value_heads, shape.key, shape.value, shape.taps
    if parts.kind == "channel" and parts.floor is None and rate_E is not None:
        rate_E = -rate_E
    floats = conv_WC, bias_C, skip_V, rate_E, parts.step_E, parts.bias_C
    held = tuple(None if x is None else plain(x, float32) for x in floats)
    forget, opening = map(_handle, parts.second) if parts.second else (None, None)
    down, out = _handle(parts.down), _handle(parts.out)
    arrays = _native.MixerArrays(*map(address, (*held, parts.norm_D)))
    kind, end = KINDS.index(parts.kind), (parts.floor or 0.0, parts.norm_groups)
    return _native.MixerWeights(kind, sizes, down, forget, opening, out, arrays, *end), (*held, parts.norm_D)


def _handle(packed: PackedLinear) -> _native.Linear:
    assert isinstance(packed.handle, _native.Linear), "asked for before"
    return packed.handle


class NativeStates(FusedStates):
    """`held` are what `half` points at."""

    def __init__(
        self,
        engine: _native.Engine,
        layer: StateLayer,
        half: _native.StateHalf,
        held: tuple[Tensor | None, ...],
    ) -> None:
        self._engine, self._layer, self._half, self._held = engine, layer, half, held
        self._dtype = layer.input_norm_H.dtype
        self._top_k = layer.rule.top_k if layer.rule else 0

    def bind(self, cache_NBE: Tensor) -> BoundStates:
        state = self._state(cache_NBE)
        over = self._half.over(*state, cache_NBE.shape[1])
        handle = HalfOverCache(over, self._dtype, self._top_k, (*self._held, cache_NBE))
        return BoundStates(self._layer, cache_NBE, handle)

    def _state(self, cache_NBE: Tensor) -> tuple[int, int, int]:
        """Address, numbers from block to block, and blocks."""
        mixer = self._layer.mixer
        if mixer is None:
            return 0, 0, 0
        state_NF = StateShape(_numbers(mixer)).of_blocks(cache_NBE)
        return state_NF.data_ptr(), state_NF.stride(0), len(state_NF)

    def run_half(self, x_TH: Tensor, bound: BoundStates, batch: PagedBatch) -> Half:
        handle = bound.handle
        assert isinstance(handle, HalfOverCache), "made by `bind`"
        return run(self._engine, handle, plain(x_TH, self._dtype), batch)

    def begin_half(self, x_TH: Tensor) -> StateRows:
        mixer, tokens = self._layer.mixer, len(x_TH)
        assert mixer is not None, "of a layer that mixes rows"
        gate = torch.empty(tokens, mixer.out.inputs, dtype=self._dtype)
        if mixer.delta is None:
            mixed, decay, beta = (
                torch.empty(tokens, mixer.out.inputs),
                None,
                torch.empty(tokens, mixer.out.inputs),
            )
        else:
            shape = mixer.delta.shape
            widths = shape.channels, shape.decays, shape.value_heads
            mixed, decay, beta = (torch.empty(tokens, width) for width in widths)
        x = plain(x_TH, self._dtype)
        pointers = mixed.data_ptr(), address(decay), beta.data_ptr(), gate.data_ptr()
        self._half.begin(self._engine, x.data_ptr(), tokens, *pointers)
        return StateRows(mixed if decay is None else DeltaRows(mixed, decay, beta), gate)

    def end_half(self, x_TH: Tensor, read_TD: Tensor, gate_TD: Tensor) -> Half:
        tokens, expert, weight = len(x_TH), None, None
        normed = torch.empty_like(x_TH)
        if self._top_k:
            expert = torch.empty(tokens, self._top_k, dtype=torch.int32)
            weight = torch.empty(tokens, self._top_k, dtype=float32)
        read = plain(read_TD, float32)
        pointers = x_TH.data_ptr(), tokens, read.data_ptr(), gate_TD.data_ptr(), normed.data_ptr()
        self._half.end(self._engine, *pointers, address(expert), address(weight))
        return Half(normed, expert, weight)

    def convolve(self, x_TC: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        mixer = self._layer.mixer
        assert mixer is not None and mixer.conv_WC is not None, "of a layer that is a convolution"
        x, out = plain(x_TC, float32), torch.empty(x_TC.shape)
        taps, channels = mixer.conv_WC.shape
        conv, state, size = plain(mixer.conv_WC, float32), self._state(cache_NBE), cache_NBE.shape[1]
        pointers = conv.data_ptr(), x.data_ptr(), out.data_ptr()
        _native.convolve(self._engine, channels, taps, *pointers, *state, size, batch_handle(batch))
        return out


def _numbers(mixer: MixerParts) -> int:
    if mixer.delta is not None:
        return mixer.delta.shape.numbers
    assert mixer.conv_WC is not None, "a convolution has taps"
    return (len(mixer.conv_WC) - 1) * mixer.conv_WC.shape[1]
