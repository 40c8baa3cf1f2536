"""The one door to all kernels: typed, checked, and the same whichever backend does the work.

Engine code holds an `Ops` and calls its methods; it never names a backend. `open_ops` picks the fastest one
that works here and says which in `Ops.backend_name`. Shapes: T tokens, H hidden, O/I outputs/inputs,
E experts, K top-k, R rows, A query heads, G key/value heads, D head size, C latent + rope size, N blocks,
B block size, P positions.
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from afserve.config import AUTO
from afserve.errors import ConfigError
from afserve.kernels.cache import StateShape, opened_cache
from afserve.kernels.checks import (
    cache_shapes,
    expect_cache,
    expect_delta,
    expect_gqa,
    expect_last,
    expect_latent_cache,
    expect_latents,
    expect_marks,
    expect_mla,
    expect_rank,
    expect_shape,
    expect_tokens,
)
from afserve.kernels.delta import DeltaLayer, DeltaRows
from afserve.kernels.devices.cuda import count_gpus
from afserve.kernels.fallbacks import Fallback
from afserve.kernels.half import half_of_ops
from afserve.kernels.half_latent import DeviceParts, latent_half_of_ops
from afserve.kernels.indexer import NearRows
from afserve.kernels.isa import check_isa
from afserve.kernels.latent import BoundMla, MlaLayer, PreparedMla
from afserve.kernels.layer import BoundGqa, GqaLayer, Half, PreparedGqa
from afserve.kernels.packed import PackedExperts, PackedHeads, PackedLinear
from afserve.kernels.packing import Packing
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.routing import RouterRule
from afserve.kernels.stack import Exchange, Stack, Stacked


class Ops:
    """Checks arguments, then calls the backend, whose own methods stand for what needs no check."""

    def __init__(self, backend: Reference, device: torch.device, threads: int, reason: str = "") -> None:
        self._backend, self._reason = backend, reason
        self.device, self.threads = device, threads
        self.backend_name, self.isa, self.holds_fp8 = backend.name, backend.isa, backend.holds_fp8
        self.fp8_maps = backend.fp8_maps
        self.holds_int8, self.holds_int4, self.ggml = backend.holds_int8, backend.holds_int4, backend.ggml
        packing = Packing(backend)
        self.pack_linear, self.pack_heads = packing.pack_linear, packing.pack_heads
        self.pack_linear_fp8 = packing.pack_linear_fp8
        self.empty_experts, self.set_expert = packing.empty_experts, packing.set_expert
        self.set_expert_int4, self.set_expert_fp8 = packing.set_expert_int4, packing.set_expert_fp8
        self.set_half = packing.set_half
        parts = DeviceParts(backend)
        self.gqa_part, self.mla_part, self.mlp_part = parts.gqa_part, parts.mla_part, parts.mlp_part
        self.add_parts, self.join_half = parts.add_parts, parts.join_half
        self.put_expert, self.borrow_core = packing.put_expert, backend.borrow_core
        self.compile_ahead = backend.compile_ahead
        self.bind_batch, self.empty_cache = backend.bind_batch, backend.empty_cache
        self.stack_layers, self.expert_layers = backend.stack_layers, backend.expert_layers
        self.prepare_states, self.open_cache = backend.prepare_states, partial(opened_cache, backend)
        self.choose_rows, self.steps = backend.choose_rows, backend.steps  # indexer.py, row_steps.py

    def explain(self) -> str:
        return self._backend.explain() + (f" ({self._reason})" if self._reason else "")

    def fallbacks(self) -> tuple[Fallback, ...]:
        """The ops that PyTorch did for the backend so far, each with what did not fit. The log has each op once."""
        return self._backend.fallbacks.met()

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps), the mean in float32, over the last dimension."""
        expect_shape("weight_H", weight_H, (x_TH.shape[-1],))
        return self._backend.rms_norm(x_TH, weight_H, eps)

    def layer_norm(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension, in float32, rounded once."""
        expect_shape("weight_H", weight_H, (x_TH.shape[-1],))
        if bias_H is not None:
            expect_shape("bias_H", bias_H, (x_TH.shape[-1],))
        return self._backend.layer_norm(x_TH, weight_H, bias_H, eps)

    def add_sums(self, x_TH: Tensor, y_TH: Tensor, bad_T: Tensor | None = None, layer: int = 0) -> None:
        """x_TH += y_TH in place, rounded once; y_TH is float32 or of the same dtype.
        bad_T: int32, -1 for every row that was fine so far. Rows of the new x_TH that hold a value that is not finite
        get `layer` there, unless an earlier layer stands in it.
        """
        shape = x_TH.shape
        expect_shape("y_TH", y_TH, shape)
        expect_marks(bad_T, shape[0])
        self._backend.add_sums(x_TH, y_TH, bad_T, layer)

    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """x_TH += y_TH in place, then the norm of the new x_TH."""
        expect_shape("weight_H", weight_H, (x_TH.shape[-1],))
        expect_shape("y_TH", y_TH, tuple(x_TH.shape))
        return self._backend.add_rms_norm(x_TH, y_TH, weight_H, eps)

    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        expect_last("x_TI", x_TI, packed.inputs)
        return self._backend.linear(x_TI, packed)

    def logits(self, x_TH: Tensor, packed: PackedLinear) -> Tensor:
        """`linear` with a float32 result; the native library never rounds it to the rows' dtype."""
        expect_last("x_TH", x_TH, packed.inputs)
        return self._backend.logits(x_TH, packed)

    def argmax(self, logits_RV: Tensor) -> Tensor:
        """The id of every row's highest logit, the lowest among equals; -1 where a logit of the row is not finite.
        (R,) int32. V must not be 0."""
        expect_rank("logits_RV", logits_RV, 2)
        return self._backend.argmax(logits_RV)

    def linear_heads(self, x_TAI: Tensor, packed: PackedHeads) -> Tensor:
        """y[t, a] = x[t, a] @ weight[a]^T: MLA's absorbed projections, batch-invariant unlike torch.bmm."""
        expect_shape("x_TAI", x_TAI, (x_TAI.shape[0], packed.heads, packed.inputs))
        return self._backend.linear_heads(x_TAI, packed)

    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        """down(silu(gate(x)) * up(x)); gate stacked over up."""
        expect_last("x_TH", x_TH, gate_up.inputs)
        if gate_up.outputs != 2 * down.inputs:
            sizes = f"{gate_up.outputs} outputs, down {down.inputs} inputs"
            raise ValueError(f"mlp: gate_up has {sizes}; need 2:1")
        return self._backend.mlp(x_TH, gate_up, down)

    def rope(
        self, x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool
    ) -> Tensor:
        """Rotate pairs (2i, 2i+1) if interleaved, else (i, i + D/2). cos and sin have D/2 columns, float32. The result
        is always in the half-split order: first members of all pairs, then second members."""
        expect_rank("x_TAD", x_TAD, 3)
        if cos_PD.shape != sin_PD.shape or 2 * cos_PD.shape[1] != x_TAD.shape[2]:
            raise ValueError(f"rope: x_TAD {tuple(x_TAD.shape)} does not fit cos_PD {tuple(cos_PD.shape)}")
        return self._backend.rope(x_TAD, cos_PD, sin_PD, position_T, interleaved)

    def empty_kv(
        self, blocks: int, groups: int, block_size: int, sizes: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """A GQA cache of zeros for keys and values of `sizes` elements: (N, G, B, D), or tiles of them (tiled.py)
        where the backend reads those faster. The other ops take either; nobody else looks inside."""
        return self._backend.empty_kv((blocks, groups, block_size), sizes, dtype)

    def write_kv(
        self, k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor
    ) -> None:
        """Store keys and values of T tokens at their slots (block * B + offset)."""
        keys, values = cache_shapes(k_NGBD, v_NGBD)
        expect_shape("k_TGD", k_TGD, (kv_slot_T.shape[0], keys[1], keys[3]))
        expect_shape("v_TGD", v_TGD, (kv_slot_T.shape[0], values[1], values[3]))
        self._backend.write_kv(k_TGD, v_TGD, k_NGBD, v_NGBD, kv_slot_T)

    def write_latent(self, latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor, rank: int = 0) -> None:
        """Store the MLA latent (compressed KV of `rank` numbers, then the rotated rope key) of T tokens."""
        expect_latents("latent_TC", latent_TC, cache_NBC, len(kv_slot_T))
        self._backend.write_latent(latent_TC, cache_NBC, kv_slot_T, rank)

    def attend_gqa(
        self,
        q_TAD: Tensor,
        k_NGBD: Tensor,
        v_NGBD: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        sink_A: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of each sequence's new tokens over its whole paged context -> (T, A, D_v).

        `window` counts the token itself. `sink_A`: a logit per head that takes weight and gives no value.
        """
        expect_rank("q_TAD", q_TAD, 3)
        groups = cache_shapes(k_NGBD, v_NGBD)[0][1]
        if q_TAD.shape[1] % groups:
            raise ValueError(f"q_TAD: {q_TAD.shape[1]} heads do not divide by {groups} key/value heads")
        if sink_A is not None:
            expect_shape("sink_A", sink_A, (q_TAD.shape[1],))
        expect_tokens("q_TAD", q_TAD, batch)
        return self._backend.attend_gqa(q_TAD, k_NGBD, v_NGBD, batch, scale, window, sink_A)

    def attend_mla(
        self, q_TAC: Tensor, cache_NBC: Tensor, rank: int, batch: PagedBatch, scale: float
    ) -> Tensor:
        """Absorbed MLA: queries already in latent space, (T, A, rank + rope) -> (T, A, rank). Keys are whole latent
        rows, values their first `rank` columns (DeepSeek-V2, arXiv 2405.04434, 2.1)."""
        expect_rank("q_TAC", q_TAC, 3)
        expect_latents("q_TAC", q_TAC, cache_NBC, batch.tokens)
        return self._backend.attend_mla(q_TAC, cache_NBC, rank, batch, scale)

    def delta(self, rows: DeltaRows, layer: DeltaLayer, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        """A gated delta net between its projections -> (T, V, D) float32; states in the cache are read and written.
        `cache_NBE` is that of `StateShape(layer.shape.numbers)`. See `delta.py`."""
        expect_delta(rows, layer, batch)
        expect_rank("cache_NBE", cache_NBE, 3)
        state_NF = StateShape(layer.shape.numbers).of_blocks(cache_NBE)
        expect_last("cache_NBE", state_NF, layer.shape.numbers)
        return self._backend.delta(rows, layer, state_NF, cache_NBE.shape[1], batch)

    def prepare_gqa(self, layer: GqaLayer) -> PreparedGqa:
        """Called once at load: checks the layer, and lets the backend pack what it wants of it."""
        expect_gqa(layer)
        return self._backend.prepare_gqa(layer)

    def bind_gqa(self, prepared: PreparedGqa, k_NGBD: Tensor, v_NGBD: Tensor) -> BoundGqa:
        """A layer and its part of a cache, checked against each other once. Tensors must keep their memory."""
        expect_cache(prepared.layer, k_NGBD, v_NGBD)
        return self._backend.bind_gqa(prepared, k_NGBD, v_NGBD)

    def gqa_half(self, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half:
        """Norm, qkv, rope, cache write, attention, output projection, residual, norm, router in one call.

        x_TH becomes, in place, the residual stream after attention; the result is what the FFN half needs.
        """
        expect_shape("x_TH", x_TH, (batch.tokens, bound.layer.input_norm_H.shape[0]))
        half = None if batch.turns else self._backend.gqa_half(x_TH, bound, batch)
        return half_of_ops(self._backend, x_TH, bound, batch) if half is None else half

    def prepare_mla(self, layer: MlaLayer) -> PreparedMla:
        """`prepare_gqa` for a layer with a latent."""
        expect_mla(layer)
        return self._backend.prepare_mla(layer)

    def bind_mla(
        self, of: PreparedMla, kv_NBC: Tensor, index_NBI: Tensor | None = None, near: NearRows | None = None
    ) -> BoundMla:
        """`bind_gqa` for a layer with a latent. With `near`, of this cache, chosen rows are attended there."""
        expect_latent_cache(of.layer, kv_NBC, index_NBI)
        return self._backend.bind_mla(of, BoundMla(of.layer, kv_NBC, index_NBI=index_NBI, near=near))

    def mla_half(self, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Half:
        """`gqa_half` for a layer with a latent: x_TH becomes, in place, the residual stream after attention."""
        expect_shape("x_TH", x_TH, (batch.tokens, bound.layer.input_norm_H.shape[0]))
        half = self._backend.mla_half(x_TH, bound, batch)
        return latent_half_of_ops(self._backend, x_TH, bound, batch) if half is None else half

    def run_stack(
        self,
        stack: Stack,
        x_TH: Tensor,
        groups: Sequence[PagedBatch],
        bad_T: Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> Stacked:
        """x_TH becomes, in place, what the last layer gives; keys and values are written. `groups`: the tokens over
        each KV group's block table. `bad_T` as of `add_sums`, with the number of the layer. The same bits as halves,
        FFNs and `add_sums` one by one. `exchange`: the way to experts that are away (`comm.transport.Exchanging`)."""
        expect_shape("x_TH", x_TH, (groups[0].tokens, stack.hidden))
        expect_marks(bad_T, groups[0].tokens)
        return stack.run_layers(x_TH, groups, bad_T, exchange)

    def route(
        self,
        x_TH: Tensor,
        gate_EH: Tensor,
        bias_E: Tensor | None,
        rule: RouterRule,
        gate_bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores in float32 -> expert_TK (int32), weight_TK (float32).

        A row whose logits are not all finite gets experts 0 .. K - 1 with weights that are NaN, so that its sum is
        found by `add_sums`; a NaN in bias_E does that to every row. Ids are below E whatever comes in. `gate_bias_E` is
        added to the logits, `bias_E` only to what experts are chosen by.
        """
        expect_last("x_TH", x_TH, gate_EH.shape[1])
        return self._backend.route(x_TH, gate_EH, bias_E, rule, gate_bias_E)

    def expert_ffn(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool = False,
    ) -> None:
        """out_RH = sum over k of weight_RK * FFN_slot(x_RH), summed in float32; slots below 0 are skipped. Models
        of 16 bits round each expert's part to their dtype first: float32 sums of those do not depend on which parts are
        added where. add: the sum starts from out_RH instead of zero."""
        rows, hidden = x_RH.shape
        if hidden != experts.hidden:
            raise ValueError(f"x_RH: hidden size {hidden}, the experts have {experts.hidden}")
        expect_shape("out_RH", out_RH, (rows, hidden))
        expect_shape("weight_RK", weight_RK, slot_RK.shape)
        self._backend.expert_ffn(x_RH, slot_RK, weight_RK, experts, out_RH, add)


def open_ops(device: str = "cpu", threads: int = 1, backend: str = "auto", isa: str = AUTO) -> Ops:
    """The fastest backend that works on `device`, or the one called `backend`: "native" on CPUs, "triton" on GPUs,
    "torch"; or libraries for some of triton's ops. isa: of the native library. ConfigError: what is not here."""
    where = torch.device(device)
    check_isa(isa)
    if where.type != "cuda" and backend not in (AUTO, "native", "torch"):
        raise ConfigError(f"--gpu-kernels: {backend} is for GPUs, and {where} is none; leave it out")
    if isa != AUTO and (backend == "torch" or where.type == "cuda"):
        raise ConfigError(f"--isa: {isa} is of the native library, which does not compute here", param="isa")
    if backend == "torch":
        return Ops(Reference(where), where, threads)
    if where.type == "cuda":
        return _open_triton(where, threads, backend)
    return _open_native(where, threads, isa, required=backend == "native")


def _open_native(device: torch.device, threads: int, isa: str, *, required: bool) -> Ops:
    try:
        from afserve.kernels.native import Native
    except ImportError as error:
        why = "the native library was not built"
        if required:
            raise ConfigError(f"backend: {why} ({error}); reinstall with a compiler") from error
        return Ops(Reference(device), device, threads, f"{why}; reinstall with a C++ compiler")
    return Ops(Native(threads, "" if isa == AUTO else isa), device, threads)


def _open_triton(device: torch.device, threads: int, backend: str) -> Ops:
    if not count_gpus():
        raise ConfigError(f"device: {device} asked for, but torch sees no CUDA device here; use --device cpu")
    try:
        triton = import_module("afserve.kernels.triton.backend")  # it imports this folder
    except ImportError as error:
        if backend != AUTO:
            told = f"backend: triton is not installed ({error}); pip install afserve[gpu]"
            raise ConfigError(told) from error
        return Ops(Reference(device), device, threads, "triton is not installed; pip install afserve[gpu]")
    opened = triton.TritonBackend.open(device, AUTO if backend == "triton" else backend)
    return Ops(opened, opened.device, threads)
