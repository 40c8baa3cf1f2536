"""The backend of the native CPU library: hands addresses to C++, and to the reference what does not fit, op by op.

An op falls back, and says so in `fallbacks`, when its tensors are of a dtype the library does not know (float16,
float64) or lie as no address can say. `ops.py` checked shapes; here it is what addresses need: strides, index dtypes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels import _native, native_caches, native_fused, native_half, native_stack, tiled
from afserve.kernels.delta import DeltaLayer, DeltaRows
from afserve.kernels.formats.eight_bits import is_eight
from afserve.kernels.latent import BoundMla, MlaLayer, PreparedMla
from afserve.kernels.layer import BoundGqa, FusedStates, GqaLayer, Half, PreparedGqa, StateLayer
from afserve.kernels.native_caches import NativeNearRows, attend, choose_rows, fits, last_plain, odd, pair_of
from afserve.kernels.native_fused import SCORINGS
from afserve.kernels.native_ggml import NativeGgml
from afserve.kernels.native_half import HalfOverCache, batch_handle
from afserve.kernels.native_products import CODES, FLOAT_CODE, NativeProducts, address, matrix, plain
from afserve.kernels.native_steps import NativeRowSteps
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference_routed import choose
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.stack import Stack, StackLayer

FLOAT32 = torch.float32
SELECTIONS = (Selection.PLAIN, Selection.GROUP_TOP2_SUM, Selection.GROUP_MAX)


class Native(NativeProducts):
    """Products are `NativeProducts`; here are rows, caches, attention, the router and the fused half."""

    def __init__(self, threads: int, isa: str = "") -> None:
        super().__init__(threads, isa)
        self.ggml, self.steps = NativeGgml(self._engine), NativeRowSteps(self._engine)
        self.near_rows = NativeNearRows
        self._rules: dict[RouterRule, _native.Rule] = {}

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        code = CODES.get(x_TH.dtype)
        if code is None or weight_H.dtype is not x_TH.dtype or not weight_H.is_contiguous():
            return self._fall_back("rms_norm", odd(x_TH, weight_H)).rms_norm(x_TH, weight_H, eps)
        size = weight_H.shape[0]
        x = x_TH if x_TH.dim() == 2 and x_TH.stride(1) == 1 else x_TH.reshape(-1, size)
        out = torch.empty(x_TH.shape, dtype=x_TH.dtype)
        _native.rms_norm(
            self._engine,
            code,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            size,
            weight_H.data_ptr(),
            eps,
            out.data_ptr(),
        )
        return out

    def add_sums(self, x_TH: Tensor, y_TH: Tensor, bad_T: Tensor | None, layer: int) -> None:
        code, wide = CODES.get(x_TH.dtype), y_TH.dtype is FLOAT32
        alike = wide or y_TH.dtype is x_TH.dtype
        if code is None or not alike or not x_TH.is_contiguous() or not y_TH.is_contiguous():
            self._fall_back("add_sums", odd(x_TH, y_TH)).add_sums(x_TH, y_TH, bad_T, layer)
            return
        rows, size = x_TH.shape
        y_code, bad = FLOAT_CODE if wide else code, 0 if bad_T is None else bad_T.data_ptr()
        _native.add_sums(self._engine, code, x_TH.data_ptr(), y_code, y_TH.data_ptr(), rows, size, bad, layer)

    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        code = CODES.get(x_TH.dtype)
        fit = x_TH.is_contiguous() and y_TH.is_contiguous() and weight_H.is_contiguous()
        if code is None or not fit or not x_TH.dtype == y_TH.dtype == weight_H.dtype:
            fallback = self._fall_back("add_rms_norm", odd(x_TH, y_TH, weight_H))
            return fallback.add_rms_norm(x_TH, y_TH, weight_H, eps)
        out = torch.empty_like(x_TH)
        size = weight_H.shape[0]
        _native.add_rms_norm(
            self._engine,
            code,
            x_TH.data_ptr(),
            y_TH.data_ptr(),
            x_TH.numel() // size,
            size,
            weight_H.data_ptr(),
            eps,
            out.data_ptr(),
        )
        return out

    def rope(
        self, x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool
    ) -> Tensor:
        code = CODES.get(x_TAD.dtype)
        if code is None:
            fallback = self._fall_back("rope", odd(x_TAD))
            return fallback.rope(x_TAD, cos_PD, sin_PD, position_T, interleaved)
        x = x_TAD if x_TAD.stride(2) == 1 else x_TAD.contiguous()
        cos, sin = plain(cos_PD, torch.float32), plain(sin_PD, torch.float32)
        position = plain(position_T, torch.int64)
        out = torch.empty(x_TAD.shape, dtype=x_TAD.dtype)
        _native.rope(
            self._engine,
            code,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            x.shape[0],
            x.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            position.data_ptr(),
            cos.shape[0],
            cos.shape[1],
            interleaved,
            out.data_ptr(),
        )
        return out

    def empty_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        cache = self._plain.empty_cache(shape, dtype)
        _native.prefer_huge_pages(cache.data_ptr(), cache.numel() * cache.element_size())
        return cache

    def empty_kv(
        self, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if dtype not in CODES or not all(tiled.fits(shape[2], size) for size in sizes):
            return self.empty_cache((*shape, sizes[0]), dtype), self.empty_cache((*shape, sizes[1]), dtype)
        return tiled.views(self.empty_cache((math.prod(shape) * sum(sizes),), dtype), shape, sizes)

    def write_kv(
        self, k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor
    ) -> None:
        if not fits(k_NGBD, k_TGD.dtype) or not fits(v_NGBD, v_TGD.dtype):
            if k_NGBD.dim() != tiled.ROWS:
                self.write_kv(k_TGD.to(k_NGBD.dtype), v_TGD.to(v_NGBD.dtype), k_NGBD, v_NGBD, kv_slot_T)
            else:
                fallback = self._fall_back("write_kv", odd(k_TGD, k_NGBD, v_NGBD))
                fallback.write_kv(k_TGD, v_TGD, k_NGBD, v_NGBD, kv_slot_T)
            return
        native_caches.write_kv(k_TGD, v_TGD, k_NGBD, v_NGBD, plain(kv_slot_T, torch.int64))

    def write_latent(self, latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor, rank: int) -> None:
        if not fits(cache_NBC, latent_TC.dtype):
            fallback = self._fall_back("write_latent", odd(latent_TC, cache_NBC))
            fallback.write_latent(latent_TC, cache_NBC, kv_slot_T, rank)
            return
        native_caches.write_latent(latent_TC, cache_NBC.unsqueeze(1), plain(kv_slot_T, torch.int64), rank)

    def attend_gqa(
        self,
        q_TAD: Tensor,
        k_NGBD: Tensor,
        v_NGBD: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        sink_A: Tensor | None = None,
    ) -> Tensor:
        if not fits(k_NGBD, q_TAD.dtype) or not fits(v_NGBD, q_TAD.dtype):
            k, v = tiled.as_rows(k_NGBD), tiled.as_rows(v_NGBD)
            fallback = self._fall_back("attend_gqa", odd(q_TAD, k_NGBD, v_NGBD))
            return fallback.attend_gqa(q_TAD, k, v, batch, scale, window, sink_A)
        sinks = None if sink_A is None else plain(sink_A, FLOAT32)
        return attend(self._engine, q_TAD, pair_of(k_NGBD, v_NGBD), batch, scale, window or 0, sinks)

    def attend_mla(
        self, q_TAC: Tensor, cache_NBC: Tensor, rank: int, batch: PagedBatch, scale: float
    ) -> Tensor:
        if not fits(cache_NBC, q_TAC.dtype):
            fallback = self._fall_back("attend_mla", odd(q_TAC, cache_NBC))
            return fallback.attend_mla(q_TAC, cache_NBC, rank, batch, scale)
        cache = cache_NBC.unsqueeze(1)
        return attend(self._engine, q_TAC, pair_of(cache, cache, rank), batch, scale)

    def choose_rows(
        self, q_TJI: Tensor, weight_TJ: Tensor, index_NBI: Tensor, batch: PagedBatch, top: int
    ) -> Tensor:
        if q_TJI.dtype not in CODES or q_TJI.dtype is not index_NBI.dtype or not last_plain(index_NBI):
            fallback = self._fall_back("choose_rows", odd(q_TJI, index_NBI))
            return fallback.choose_rows(q_TJI, weight_TJ, index_NBI, batch, top)
        return choose_rows(self._engine, q_TJI, weight_TJ, index_NBI, batch, top)

    def bind_batch(self, batch: PagedBatch) -> PagedBatch:
        return batch.with_handle(batch_handle(batch))

    def delta(
        self, rows: DeltaRows, layer: DeltaLayer, state_NF: Tensor, block_size: int, batch: PagedBatch
    ) -> Tensor:
        shape, decay, beta = layer.shape, plain(rows.decay_TE, FLOAT32), plain(rows.beta_TV, FLOAT32)
        mixed, conv = plain(rows.mixed_TC, FLOAT32), plain(layer.conv_WC, FLOAT32)
        out = torch.empty(batch.tokens, shape.value_heads, shape.value)
        sizes = shape.key_heads, shape.value_heads, shape.key, shape.value, shape.taps
        _native.delta(
            self._engine, sizes, shape.rule_number, conv.data_ptr(), address(layer.bias_C),
            address(layer.skip_V), mixed.data_ptr(), decay.data_ptr(), beta.data_ptr(), out.data_ptr(),
            state_NF.data_ptr(), state_NF.stride(0), state_NF.shape[0], block_size, batch_handle(batch),
        )  # fmt: skip
        return out

    def prepare_gqa(self, layer: GqaLayer) -> PreparedGqa:
        gate = self._packed_gate(layer)
        reason = native_fused.why_not_gqa(layer, gate)
        if reason:
            self.fallbacks.record_fallback("gqa_half", reason)
            return PreparedGqa(layer)
        rule = self._rule(layer.rule or RouterRule(1, Scoring.SOFTMAX))
        return PreparedGqa(layer, native_fused.fused_gqa(layer, gate, rule))

    def _packed_gate(self, layer: GqaLayer | MlaLayer | StateLayer) -> _native.Linear | None:
        """None when the rows' dtype would lose bits of the gate."""
        dtype, gate_EH = layer.input_norm_H.dtype, layer.gate_EH
        if dtype not in CODES or gate_EH is None:
            return None
        kept_EH = gate_EH.to(dtype)
        if not ((kept_EH.float() == gate_EH.float()) | gate_EH.isnan()).all():
            return None
        handle = self.pack_linear(kept_EH, layer.gate_bias_E).handle
        return handle if isinstance(handle, _native.Linear) else None

    def bind_gqa(self, prepared: PreparedGqa, k_NGBD: Tensor, v_NGBD: Tensor) -> BoundGqa:
        layer, fused = prepared.layer, prepared.handle
        if not isinstance(fused, native_fused.FusedGqa):  # prepare_gqa said why
            return BoundGqa(layer, k_NGBD, v_NGBD)
        if not all(fits(cache, layer.input_norm_H.dtype) for cache in (k_NGBD, v_NGBD)):
            self.fallbacks.record_fallback("gqa_half", odd(layer.input_norm_H, k_NGBD, v_NGBD))
            return BoundGqa(layer, k_NGBD, v_NGBD)
        over = fused.layer.over(pair_of(k_NGBD, v_NGBD))
        return BoundGqa(layer, k_NGBD, v_NGBD, _over_cache(layer, over, fused.held))

    def gqa_half(self, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half | None:
        handle = bound.handle
        if not isinstance(handle, HalfOverCache):  # bind_gqa or prepare_gqa said why
            return None
        if not native_half.fits(handle, x_TH):
            self.fallbacks.record_fallback("gqa_half", odd(x_TH, bound.k_NGBD, bound.v_NGBD))
            return None
        return native_half.run(self._engine, handle, x_TH, batch)

    def prepare_mla(self, layer: MlaLayer) -> PreparedMla:
        gate = self._packed_gate(layer)
        reason = native_fused.why_not_mla(layer, gate)
        if reason:
            self.fallbacks.record_fallback("mla_half", reason)
            return PreparedMla(layer)
        rule = self._rule(layer.rule or RouterRule(1, Scoring.SOFTMAX))
        return PreparedMla(layer, native_fused.fused_mla(layer, gate, rule))

    def bind_mla(self, prepared: PreparedMla, plain: BoundMla) -> BoundMla:
        layer, fused, cache_NBC, index_NBI = prepared.layer, prepared.handle, plain.cache_NBC, plain.index_NBI
        near = plain.near.open_with(self._engine) if isinstance(plain.near, NativeNearRows) else None
        if not isinstance(fused, native_fused.FusedMla):  # prepare_mla said why
            return plain
        kept = (cache_NBC,) if index_NBI is None else (cache_NBC, index_NBI)
        chosen = index_NBI is not None or layer.reuses  # by keys in the rows' dtype alone
        known = all(fits(x, layer.input_norm_H.dtype) and x.is_contiguous() for x in kept)
        if not known or (chosen and is_eight(cache_NBC.dtype)):
            self.fallbacks.record_fallback("mla_half", odd(layer.input_norm_H, *kept))
            return plain
        rows, keys = cache_NBC.unsqueeze(1), None if index_NBI is None else index_NBI.unsqueeze(1)
        index = None if keys is None else pair_of(keys, keys)
        half = fused.layer.over(pair_of(rows, rows, layer.rank), index, near)
        over, top = _over_cache(layer, half, fused.held), layer.indexer.top if layer.indexer else 0
        return replace(plain, handle=replace(over, top=top, reuses=layer.reuses))

    def mla_half(self, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Half | None:
        handle = bound.handle
        if not isinstance(handle, HalfOverCache):  # bind_mla or prepare_mla said why
            return None
        if not native_half.fits(handle, x_TH):
            self.fallbacks.record_fallback("mla_half", odd(x_TH, bound.cache_NBC))
            return None
        return native_half.run(self._engine, handle, x_TH, batch)

    def prepare_states(self, layer: StateLayer) -> FusedStates | None:
        gate = self._packed_gate(layer)
        if reason := native_half.why_not_states(layer, gate):
            self.fallbacks.record_fallback("state_half", reason)
            return None
        rule = self._rule(layer.rule or RouterRule(1, Scoring.SOFTMAX))
        return native_half.fused_states(self._engine, layer, gate, rule)

    def stack_layers(self, layers: Sequence[StackLayer]) -> Stack | None:
        return native_stack.stack_of(self._engine, tuple(layers))

    def route(
        self,
        x_TH: Tensor,
        gate_EH: Tensor,
        bias_E: Tensor | None,
        rule: RouterRule,
        gate_bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if gate_bias_E is not None or rule.scoring not in SCORINGS:
            biased = gate_bias_E is not None and "a bias of the router's logits"
            self._fall_back("route", biased or f"scoring {rule.scoring.value}")
            return choose(_logits(x_TH, gate_EH, gate_bias_E), bias_E, rule)
        code, gate_code = CODES.get(x_TH.dtype), CODES.get(gate_EH.dtype)
        if code is None or gate_code not in (code, CODES[torch.float32]) or not gate_EH.is_contiguous():
            return self._fall_back("route", odd(x_TH, gate_EH)).route(x_TH, gate_EH, bias_E, rule)
        x = matrix(x_TH)
        tokens, hidden = x.shape
        bias = None if bias_E is None else plain(bias_E, torch.float32)
        expert = torch.empty((tokens, rule.top_k), dtype=torch.int32)
        weight = torch.empty((tokens, rule.top_k), dtype=torch.float32)
        _native.route(
            self._engine,
            code,
            x.data_ptr(),
            x.stride(0),
            tokens,
            gate_EH.data_ptr(),
            gate_code,
            gate_EH.shape[0],
            hidden,
            address(bias),
            self._rule(rule),
            expert.data_ptr(),
            weight.data_ptr(),
        )
        return expert, weight

    def _rule(self, rule: RouterRule) -> _native.Rule:
        made = self._rules.get(rule)
        if made is None:
            kinds = SCORINGS.index(rule.scoring), SELECTIONS.index(rule.selection)
            groups = rule.groups, rule.top_groups
            weights = rule.epsilon, rule.scale, rule.closed_value
            made = _native.Rule(rule.top_k, *kinds, *groups, rule.renormalise, *weights)
            self._rules[rule] = made
        return made


def _logits(x_TH: Tensor, gate_EH: Tensor, gate_bias_E: Tensor | None) -> Tensor:
    """(T, E) float32, of sums in float64: a row has the same bits alone and among others, which PyTorch's product of
    float32 has not."""
    added_E = None if gate_bias_E is None else gate_bias_E.double()
    return F.linear(x_TH.double(), gate_EH.double(), added_E).float()


def _over_cache(
    layer: GqaLayer | MlaLayer, half: _native.AttentionHalf, held: tuple[Tensor | None, ...]
) -> HalfOverCache:
    return HalfOverCache(half, layer.input_norm_H.dtype, layer.rule.top_k if layer.rule else 0, held)
