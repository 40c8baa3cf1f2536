"""The one door to all kernels: typed, checked, and the same whichever backend does the work.

Engine code holds an `Ops` and calls its methods; it never names a backend. `open_ops` picks the fastest one
that works here and says which in `Ops.backend_name`. Shapes: T tokens, H hidden, O/I outputs/inputs,
E experts, K top-k, R rows, A query heads, G key/value heads, D head size, C latent + rope size, N blocks,
B block size, P positions.
"""

from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.backend import KernelBackend
from afserve.kernels.cache import KeptShape, LayerCache, PagedCache, StateShape
from afserve.kernels.checks import (
    both_biases,
    cache_shapes,
    expect_bits,
    expect_blocks,
    expect_groups,
    expect_last,
    expect_marks,
    expect_mla,
    expect_rank,
    expect_router,
    expect_shape,
    expect_sizes,
    expect_slot,
    expect_tokens,
)
from afserve.kernels.delta import DeltaLayer, DeltaRows
from afserve.kernels.fallbacks import Fallback
from afserve.kernels.gating import SWIGLU, Gating
from afserve.kernels.grouped import Grouped, Groups, quantised_groups
from afserve.kernels.latent import BoundMla, MlaLayer, PreparedMla
from afserve.kernels.layer import BoundGqa, GqaLayer, Half, PreparedGqa
from afserve.kernels.packed import ExpertShape, PackedExperts, PackedHeads, PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.routing import RouterRule
from afserve.kernels.scaled import BlockScaled
from afserve.kernels.stack import Exchange, LayeredExperts, Stack, Stacked, StackLayer

INT32 = torch.int32


class Ops:
    """Checks arguments, then calls the backend."""

    def __init__(self, backend: KernelBackend, device: torch.device, threads: int, reason: str = "") -> None:
        self._backend = backend
        self._calls = backend.native_calls
        self._reason = reason
        self.device = device
        self.threads = threads

    @property
    def backend_name(self) -> str:
        return self._backend.name

    @property
    def holds_fp8(self) -> bool:
        """Whether `empty_experts(..., fp8=True)` is to be had: e4m3 weights multiplied as they are."""
        return self._backend.holds_fp8

    def holds_int8(self, dtype: torch.dtype) -> bool:
        """Whether `empty_experts(..., int8=True)` takes a byte per weight, for rows of `dtype`; elsewhere it keeps the
        same values in `dtype`."""
        return self._backend.holds_int8(dtype)

    def holds_int4(self, dtype: torch.dtype) -> bool:
        """Whether `empty_experts(..., int4=groups)` takes half a byte per weight, for rows of `dtype`; elsewhere it
        keeps the same values in `dtype`."""
        return self._backend.holds_int4(dtype)

    def borrow_core(self, memory_B: Tensor | None, offset: int = 0) -> bool:
        """From now on one more thread computes on the core of another node of this host, while that one lends it:
        `offset` is that of its bell, in memory that both share (comm/mailbox/segment.py) and that is kept as long.
        Instead of the core borrowed before; without memory no core is. False where the backend can't; results have the
        same bits."""
        return self._calls is not None and self._calls.borrow_core(memory_B, offset)

    def explain(self) -> str:
        """One line for the start of a run: which path the ops take here."""
        path = self._backend.explain()
        return f"{path} ({self._reason})" if self._reason else path

    def fallbacks(self) -> tuple[Fallback, ...]:
        """The ops that PyTorch did for the backend so far, each with what did not fit. The log has each op once."""
        return self._backend.fallbacks.met()

    def pack_linear(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        int8: bool = False,
        int4: Groups | None = None,
    ) -> PackedLinear:
        """Called once at load. The weight may be dropped by the caller afterwards. int8, int4: see `empty_experts`."""
        expect_rank("weight_OI", weight_OI, 2)
        if bias_O is not None:
            expect_shape("bias_O", bias_O, (weight_OI.shape[0],))
        expect_bits(int8, int4)
        return self._backend.pack_linear(weight_OI, bias_O, int8, int4)

    def pack_experts(self, gate_up_EJH: Tensor, down_EHI: Tensor, int8: bool = False) -> PackedExperts:
        """gate_up_EJH stacks gate over up (J = 2 I). Called once at load."""
        expect_rank("down_EHI", down_EHI, 3)
        experts, hidden, inner = down_EHI.shape
        expect_shape("gate_up_EJH", gate_up_EJH, (experts, 2 * inner, hidden))
        packed = self.empty_experts(experts, hidden, inner, down_EHI.dtype, int8)
        for slot in range(experts):
            self.set_expert(packed, slot, gate_up_EJH[slot], down_EHI[slot])
        return packed

    def empty_experts(
        self,
        slots: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        int8: bool = False,
        fp8: bool = False,
        bias: bool = False,
        gating: Gating = SWIGLU,
        int4: Groups | None = None,
    ) -> PackedExperts:
        """Slots without weights; fill them one at a time with `set_expert`, so nothing is ever held twice.

        int8: weights are kept as int8 with a scale per output; rows stay in `dtype`.
        fp8: weights are kept as e4m3 with a scale per 128x128 block, rows and activations are rounded to e4m3 per
        128 columns on the way; needs `holds_fp8`, or raises ConfigError.
        int4: weights are kept as int4 with a scale per group of inputs.
        bias: slots have biases of both projections; gating: how gate and up are joined. Neither goes with fp8.
        """
        expect_bits(int8, int4, fp8)
        shape = ExpertShape(slots, hidden, inner, dtype, bias, gating)
        if int4 is not None:
            return self._backend.empty_experts_int4(shape, int4)
        if fp8 and not shape.plain:
            raise ValueError("fp8: only experts of a plain SwiGLU without biases are kept so")
        if fp8:
            return self._backend.empty_experts_fp8(shape)
        return self._backend.empty_experts(shape, int8)

    def set_expert(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up_JH: Tensor,
        down_HI: Tensor,
        gate_up_bias_J: Tensor | None = None,
        down_bias_H: Tensor | None = None,
    ) -> None:
        """Replace one slot's weights, and its biases where slots have them. No `expert_ffn` may name it meanwhile."""
        expect_shape("gate_up_JH", gate_up_JH, (2 * experts.inner, experts.hidden))
        expect_shape("down_HI", down_HI, (experts.hidden, experts.inner))
        expect_slot(slot, experts)
        biases = both_biases(experts, gate_up_bias_J, down_bias_H)
        if experts.int4 is None:
            self._backend.set_expert(experts, slot, gate_up_JH, down_HI, biases)
            return
        if experts.int4.e2m1:
            raise ValueError("experts: slots of four-bit floats are filled by set_expert_int4")
        gate_up, down = (quantised_groups(weight, experts.int4.size) for weight in (gate_up_JH, down_HI))
        self._backend.set_expert_int4(experts, slot, gate_up, down, biases)

    def expert_layers(
        self, layers: Sequence[PackedExperts], rows: torch.dtype, sums: torch.dtype
    ) -> LayeredExperts | None:
        """The experts of all MoE layers for `comm.transport.Answering`: `expert_ffn` of rows and sums of these dtypes,
        which is called there. It computes with this backend's threads, so not while anything else here does. None
        where the backend has no such thing."""
        return None if self._calls is None else self._calls.expert_layers(tuple(layers), rows, sums)

    def set_expert_int4(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up: Grouped,
        down: Grouped,
        gate_up_bias_J: Tensor | None = None,
        down_bias_H: Tensor | None = None,
    ) -> None:
        """`set_expert` of int4 slots from codes and scales, which are kept as they are. Raises ValueError where groups
        differ, or for a scale that is no bfloat16 number where slots keep those."""
        if experts.int4 is None:
            raise ValueError("experts: these slots keep no int4 weights")
        expect_groups("gate_up", gate_up, (2 * experts.inner, experts.hidden), experts.int4)
        expect_groups("down", down, (experts.hidden, experts.inner), experts.int4)
        expect_slot(slot, experts)
        biases = both_biases(experts, gate_up_bias_J, down_bias_H)
        self._backend.set_expert_int4(experts, slot, gate_up, down, biases)

    def set_expert_fp8(
        self, experts: PackedExperts, slot: int, gate: BlockScaled, up: BlockScaled, down: BlockScaled
    ) -> None:
        """`set_expert` from e4m3 blocks: copied as they are into fp8 slots, de-quantised into others."""
        expect_blocks("gate", gate, (experts.inner, experts.hidden))
        expect_blocks("up", up, (experts.inner, experts.hidden))
        expect_blocks("down", down, (experts.hidden, experts.inner))
        expect_slot(slot, experts)
        self._backend.set_expert_fp8(experts, slot, gate, up, down)

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

    def pack_heads(self, weight_AOI: Tensor, int8: bool = False, int4: Groups | None = None) -> PackedHeads:
        """One weight per head; called once at load. int8, int4: as of `empty_experts`."""
        expect_rank("weight_AOI", weight_AOI, 3)
        expect_bits(int8, int4)
        return self._backend.pack_heads(weight_AOI, int8, int4)

    def linear_heads(self, x_TAI: Tensor, packed: PackedHeads) -> Tensor:
        """y[t, a] = x[t, a] @ weight[a]^T: MLA's absorbed projections, batch-invariant unlike torch.bmm."""
        expect_shape("x_TAI", x_TAI, (x_TAI.shape[0], packed.heads, packed.inputs))
        return self._backend.linear_heads(x_TAI, packed)

    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        """down(silu(gate(x)) * up(x)); gate stacked over up."""
        expect_last("x_TH", x_TH, gate_up.inputs)
        if gate_up.outputs != 2 * down.inputs:
            raise ValueError(
                f"mlp: gate_up has {gate_up.outputs} outputs, down {down.inputs} inputs; need 2:1"
            )
        return self._backend.mlp(x_TH, gate_up, down)

    def rope(
        self, x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool
    ) -> Tensor:
        """Rotate pairs (2i, 2i+1) if interleaved, else (i, i + D/2). cos and sin have D/2 columns, float32.

        The result is always in the half-split order: first members of all pairs, then second members.
        """
        expect_rank("x_TAD", x_TAD, 3)
        if cos_PD.shape != sin_PD.shape or 2 * cos_PD.shape[1] != x_TAD.shape[2]:
            raise ValueError(f"rope: x_TAD {tuple(x_TAD.shape)} does not fit cos_PD {tuple(cos_PD.shape)}")
        return self._backend.rope(x_TAD, cos_PD, sin_PD, position_T, interleaved)

    def empty_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros for a paged cache. Blocks are read in any order, so on a CPU this asks for huge pages."""
        return self._backend.empty_cache(shape, dtype)

    def empty_kv(
        self, blocks: int, groups: int, block_size: int, sizes: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """A GQA cache of zeros for keys and values of `sizes` elements: (N, G, B, D), or tiles of them (tiled.py)
        where the backend reads those faster. The other ops take either; nobody else looks inside."""
        return self._backend.empty_kv((blocks, groups, block_size), sizes, dtype)

    def open_cache(
        self, layers: Sequence[KeptShape], blocks: int, block_size: int, dtype: torch.dtype
    ) -> PagedCache:
        """The memory of a node's whole KV cache, zeroed, so that reading past a context gives finite numbers."""
        return PagedCache(
            tuple(self._open_layer(shape, blocks, block_size, dtype) for shape in layers), block_size, dtype
        )

    def _open_layer(self, shape: KeptShape, blocks: int, block_size: int, dtype: torch.dtype) -> LayerCache:
        if isinstance(shape, StateShape):
            return (self.empty_cache((blocks, block_size, shape.width(block_size, dtype)), dtype),)
        if shape.value is None:
            return (self.empty_cache((blocks, block_size, shape.key), dtype),)
        return self.empty_kv(blocks, shape.heads, block_size, (shape.key, shape.value), dtype)

    def clear_blocks(self, cache: tuple[Tensor, ...], blocks: Sequence[int]) -> None:
        """Zero whole blocks of one layer's cache, in whatever order it is kept."""
        if not blocks:
            return
        for tensor in cache:
            if not 0 <= min(blocks) <= max(blocks) < tensor.shape[0]:
                raise ValueError(f"blocks: {min(blocks)} to {max(blocks)}, the cache has {tensor.shape[0]}")
        self._backend.clear_blocks(cache, torch.tensor(blocks, dtype=torch.int64, device=self.device))

    def write_kv(
        self, k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor
    ) -> None:
        """Store keys and values of T tokens at their slots (block * B + offset)."""
        keys, values = cache_shapes(k_NGBD, v_NGBD)
        expect_shape("k_TGD", k_TGD, (kv_slot_T.shape[0], keys[1], keys[3]))
        expect_shape("v_TGD", v_TGD, (kv_slot_T.shape[0], values[1], values[3]))
        self._backend.write_kv(k_TGD, v_TGD, k_NGBD, v_NGBD, kv_slot_T)

    def write_latent(self, latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor) -> None:
        """Store the MLA latent (compressed KV, then the rotated rope key) of T tokens."""
        expect_shape("latent_TC", latent_TC, (kv_slot_T.shape[0], cache_NBC.shape[2]))
        self._backend.write_latent(latent_TC, cache_NBC, kv_slot_T)

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

        `window`: a token sees itself and the `window - 1` before it. `sink_A`: a logit per head that takes weight and
        gives no value.
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
        """Absorbed MLA: queries already in latent space, (T, A, rank + rope) -> (T, A, rank).

        Keys are whole latent rows, values their first `rank` columns (DeepSeek-V2, arXiv 2405.04434, 2.1).
        """
        expect_rank("q_TAC", q_TAC, 3)
        expect_last("q_TAC", q_TAC, cache_NBC.shape[2])
        expect_tokens("q_TAC", q_TAC, batch)
        return self._backend.attend_mla(q_TAC, cache_NBC, rank, batch, scale)

    def delta(self, rows: DeltaRows, layer: DeltaLayer, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        """A gated delta net between its projections -> (T, V, D) float32; states in the cache are read and written.

        `cache_NBE` is that of `StateShape(layer.shape.numbers)`. See `delta.py`.
        """
        shape = layer.shape
        expect_shape("mixed_TC", rows.mixed_TC, (batch.tokens, shape.channels))
        for name, x in (("decay_TV", rows.decay_TV), ("beta_TV", rows.beta_TV)):
            expect_shape(name, x, (batch.tokens, shape.value_heads))
        expect_shape("conv_WC", layer.conv_WC, (shape.taps, shape.channels))
        expect_rank("cache_NBE", cache_NBE, 3)
        state_NF = StateShape(shape.numbers).of_blocks(cache_NBE)
        expect_last("cache_NBE", state_NF, shape.numbers)
        return self._backend.delta(rows, layer, state_NF, cache_NBE.shape[1], batch)

    def prepare_gqa(self, layer: GqaLayer) -> PreparedGqa:
        """Called once at load: checks the layer, and lets the backend pack what it wants of it."""
        hidden, size = layer.input_norm_H.shape[0], layer.head_dim
        expect_shape("post_norm_H", layer.post_norm_H, (hidden,))
        expect_sizes("qkv", layer.qkv, (layer.heads + 2 * layer.groups) * size, hidden)
        expect_sizes("out", layer.out, hidden, layer.heads * size)
        for name, norm, count in (
            ("q_norm_D", layer.q_norm_D, layer.heads),
            ("k_norm_D", layer.k_norm_D, layer.groups),
        ):
            if norm is not None:
                expect_shape(name, norm, (size * (count if layer.wide_norms else 1),))
        if layer.sink_A is not None:
            expect_shape("sink_A", layer.sink_A, (layer.heads,))
        expect_shape("cos_PD", layer.cos_PD, (layer.sin_PD.shape[0], size // 2))
        expect_shape("sin_PD", layer.sin_PD, (layer.cos_PD.shape[0], size // 2))
        expect_router(layer, hidden)
        return self._backend.prepare_gqa(layer)

    def bind_gqa(self, prepared: PreparedGqa, k_NGBD: Tensor, v_NGBD: Tensor) -> BoundGqa:
        """A layer and its part of a cache, checked against each other once. The tensors must keep their memory."""
        keys, values = cache_shapes(k_NGBD, v_NGBD)
        wanted = (keys[0], prepared.layer.groups, keys[2], prepared.layer.head_dim)
        if keys != wanted:
            raise ValueError(f"k_NGBD: shape {keys}, expected {wanted}")
        if values != wanted:
            raise ValueError(f"v_NGBD: shape {values}, expected {wanted}")
        chunk = prepared.layer.steps.chunk
        if chunk is not None and chunk % keys[2]:
            raise ConfigError(
                f"block_size: {keys[2]} tokens do not divide the {chunk} of the model's attention_chunk_size; "
                "use a block size that does",
                param="block_size",
            )
        return self._backend.bind_gqa(prepared, k_NGBD, v_NGBD)

    def bind_batch(self, batch: PagedBatch) -> PagedBatch:
        """The same batch with what the backend looks up of it once, rather than in every layer of the step."""
        return self._backend.bind_batch(batch)

    def gqa_half(self, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half:
        """Norm, qkv, rope, cache write, attention, output projection, residual, norm, router in one call.

        x_TH becomes, in place, the residual stream after attention; the result is what the FFN half needs.
        """
        expect_shape("x_TH", x_TH, (batch.tokens, bound.layer.input_norm_H.shape[0]))
        return self._backend.gqa_half(x_TH, bound, batch)

    def prepare_mla(self, layer: MlaLayer) -> PreparedMla:
        """`prepare_gqa` for a layer with a latent."""
        expect_mla(layer)
        return self._backend.prepare_mla(layer)

    def bind_mla(self, prepared: PreparedMla, cache_NBC: Tensor) -> BoundMla:
        """A layer and its part of a cache, checked against each other once. The tensor must keep its memory."""
        expect_rank("cache_NBC", cache_NBC, 3)
        expect_last("cache_NBC", cache_NBC, prepared.layer.rank + prepared.layer.rope)
        return self._backend.bind_mla(prepared, cache_NBC)

    def mla_half(self, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Half:
        """`gqa_half` for a layer with a latent: x_TH becomes, in place, the residual stream after attention."""
        expect_shape("x_TH", x_TH, (batch.tokens, bound.layer.input_norm_H.shape[0]))
        return self._backend.mla_half(x_TH, bound, batch)

    def stack_layers(self, layers: Sequence[StackLayer]) -> Stack | None:
        """All layers over one cache, for `run_stack`; None where the backend does not run all of these in one call."""
        return None if self._calls is None else self._calls.stack_layers(tuple(layers))

    def run_stack(
        self,
        stack: Stack,
        x_TH: Tensor,
        batch: PagedBatch,
        bad_T: Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> Stacked:
        """x_TH becomes, in place, what the last layer gives; keys and values are written. `bad_T` as of `add_sums`,
        with the number of the layer. The same bits as halves, FFNs and `add_sums` one by one. `exchange` is the data
        plane's way to experts that are away (`comm.transport.Exchanging`)."""
        expect_shape("x_TH", x_TH, (batch.tokens, stack.hidden))
        expect_marks(bad_T, batch.tokens)
        return stack.run_layers(x_TH, batch, bad_T, exchange)

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
        """out_RH = sum over k of weight_RK * FFN_slot(x_RH), summed in float32; slots below 0 are skipped.

        On CPUs, 16-bit models round each expert's part to their dtype first: float32 sums of those do not depend on
        which parts are added where.

        add: the sum starts from out_RH instead of zero.
        """
        rows, hidden = x_RH.shape
        if hidden != experts.hidden:
            raise ValueError(f"x_RH: hidden size {hidden}, the experts have {experts.hidden}")
        expect_shape("out_RH", out_RH, (rows, hidden))
        expect_shape("weight_RK", weight_RK, slot_RK.shape)
        self._backend.expert_ffn(x_RH, slot_RK, weight_RK, experts, out_RH, add)


def open_ops(device: str = "cpu", threads: int = 1, backend: str = "auto", isa: str = "") -> Ops:
    """The fastest backend for `device` that works on this machine, or the one called `backend`.

    Backends: "native" on CPUs, "triton" on CUDA devices, "torch" everywhere. isa: an instruction set of the native
    library instead of the best one, for tests and comparisons.
    """
    where = torch.device(device)
    if backend == "torch":
        return Ops(Reference(where), where, threads)
    if where.type == "cuda":
        return _open_triton(where, threads, required=backend == "triton")
    return _open_native(where, threads, isa, required=backend == "native")


def _open_native(device: torch.device, threads: int, isa: str, *, required: bool) -> Ops:
    try:
        from afserve.kernels.native import Native
    except ImportError as error:
        if required:
            raise ConfigError(
                f"backend: the native library was not built ({error}); reinstall with a compiler"
            ) from error
        return Ops(
            Reference(device),
            device,
            threads,
            "the native library was not built; reinstall with a C++ compiler",
        )
    return Ops(Native(threads, isa), device, threads)


def _open_triton(device: torch.device, threads: int, *, required: bool) -> Ops:
    if not torch.cuda.is_available():
        raise ConfigError(f"device: {device} asked for, but torch sees no CUDA device here; use --device cpu")
    try:
        triton = import_module("afserve.kernels.triton.backend")  # it imports this folder
    except ImportError as error:
        if required:
            raise ConfigError(
                f"backend: triton is not installed ({error}); pip install afserve[gpu]"
            ) from error
        return Ops(Reference(device), device, threads, "triton is not installed; pip install afserve[gpu]")
    opened = triton.TritonBackend.open(device)
    return Ops(opened, opened.device, threads)
