"""Every op in plain PyTorch: the oracle of the tests, the path where nothing faster is at hand, and what a backend is.

A backend derives from it and has its own for what it does faster; tests list what each one leaves to PyTorch. What
ops mean is in the docstrings of `ops.py`, which checks their arguments too. Shapes: T tokens, S sequences, H hidden,
E experts, K top-k, R rows, I inner size, A query heads, G key/value heads, D head size, C latent rank,
N cache blocks, B block size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.delta import DeltaLayer, DeltaRows, delta_rows
from afserve.kernels.devices.pages import untouched
from afserve.kernels.fallbacks import Fallbacks
from afserve.kernels.formats.eight_bits import is_eight, key_value_rows, latent_rows, latents_at, pair_at
from afserve.kernels.formats.scaled import BlockScaled, dequantised
from afserve.kernels.grouped import Grouped, Groups, int8_rounded, rounded_weight
from afserve.kernels.indexer import NearRows, choose_rows
from afserve.kernels.latent import BoundMla, MlaLayer, PreparedMla
from afserve.kernels.layer import BoundGqa, FusedStates, GqaLayer, Half, PreparedGqa, StateLayer
from afserve.kernels.packed import Biases, ExpertShape, GgmlPacking, PackedExperts, PackedHeads, PackedLinear
from afserve.kernels.paged import PagedBatch, sequences, visible
from afserve.kernels.reference_routed import choose, sums_by_choice, sums_by_slot
from afserve.kernels.routing import RouterRule
from afserve.kernels.row_steps import RowSteps
from afserve.kernels.stack import LayeredExperts, Stack, StackLayer

CPU = torch.device("cpu")


class Reference:
    """Off the CPU no op waits for the device, if the batch has its host integers. `holds_fp8`: whether slots of experts
    for rows of a dtype keep e4m3 blocks, multiplied as they are, and so do linear maps where there are `fp8_maps`.
    `ggml` packs weights of ggml's types."""

    name = "torch"
    isa = ""  # the instruction set, of a native library
    fp8_maps = False
    ggml: GgmlPacking | None = None
    steps = RowSteps()
    near_rows: type[NearRows] = NearRows
    compile_ahead: Callable[[Callable[[], object]], None] | None = None  # triton/ahead.py

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self.fallbacks = Fallbacks(self.name)

    def holds_fp8(self, dtype: torch.dtype) -> bool:
        return False

    def holds_int8(self, dtype: torch.dtype) -> bool:
        """Whether `empty_experts(..., int8=True)` takes a byte per weight, for rows of `dtype`."""
        return False

    def holds_int4(self, dtype: torch.dtype) -> bool:
        """The same of `empty_experts(..., int4=groups)` and half a byte per weight."""
        return False

    def explain(self) -> str:
        return f"PyTorch {torch.__version__}"

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None, int8: bool = False, int4: Groups | None = None
    ) -> PackedLinear:
        size, kept = weight_OI.shape, rounded_weight(weight_OI, int8, int4)
        return PackedLinear(size[0], size[1], kept, bias_O, dtype=weight_OI.dtype)

    def pack_linear_fp8(self, weight: BlockScaled, bias_O: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        return self.pack_linear(weight.dequantised().to(dtype), bias_O)

    def pack_heads(self, weight_AOI: Tensor, int8: bool = False, int4: Groups | None = None) -> PackedHeads:
        heads, outputs, inputs = weight_AOI.shape
        kept = rounded_weight(weight_AOI.flatten(0, 1), int8, int4).view(weight_AOI.shape)
        return PackedHeads(heads, outputs, inputs, kept, dtype=weight_AOI.dtype)

    def linear_heads(self, x_TAI: Tensor, packed: PackedHeads) -> Tensor:
        assert packed.weight_AOI is not None
        return torch.bmm(x_TAI.transpose(0, 1), packed.weight_AOI.transpose(1, 2)).transpose(0, 1)

    def argmax(self, logits_RV: Tensor) -> Tensor:
        return logits_RV.argmax(-1).int().masked_fill(~logits_RV.isfinite().all(-1), -1)

    def empty_experts(self, shape: ExpertShape, int8: bool = False) -> PackedExperts:
        slots, hidden, inner = shape.slots, shape.hidden, shape.inner

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=shape.dtype, device=self.device)

        return PackedExperts(
            slots, hidden, inner,
            zeros(shape.places or slots, shape.joined, hidden), zeros(shape.places or slots, hidden, inner),
            dtype=shape.dtype, int8=int8, gating=shape.gating,
            gate_up_bias_EJ=zeros(slots, shape.joined) if shape.bias else None,
            down_bias_EH=zeros(slots, hidden) if shape.bias else None,
            bias=shape.bias,
            place_E=None if shape.places is None else [-1] * slots,
        )  # fmt: skip

    def put_expert(self, experts: PackedExperts, slot: int, place: int) -> None:
        experts.put(slot, place)

    def set_expert(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up_JH: Tensor,
        down_HI: Tensor,
        biases: Biases | None = None,
    ) -> None:
        Reference.set_half(self, experts, slot, [gate_up_JH], down_HI)
        if experts.gate_up_bias_EJ is not None and experts.down_bias_EH is not None:
            assert biases is not None, "checked at the door"
            experts.gate_up_bias_EJ[slot], experts.down_bias_EH[slot] = biases

    def set_half(
        self, experts: PackedExperts, slot: int, gate_up: Sequence[Tensor], down_HI: Tensor | None
    ) -> None:
        for all_E, half in (
            (experts.gate_up_EJH, gate_up),
            (experts.down_EHI, [] if down_HI is None else [down_HI]),
        ):
            assert all_E is not None
            if half:
                whole = torch.cat(list(half))
                all_E[experts.place_of(slot)] = int8_rounded(whole) if experts.int8 else whole

    def empty_experts_fp8(self, shape: ExpertShape) -> PackedExperts:
        raise ConfigError(f"experts: the {self.name} backend keeps no FP8 weights; load them de-quantised")

    def empty_experts_int4(self, shape: ExpertShape, groups: Groups) -> PackedExperts:
        return replace(self.empty_experts(shape), int4=groups)

    def set_expert_int4(
        self, experts: PackedExperts, slot: int, gate_up: Grouped, down: Grouped, biases: Biases | None = None
    ) -> None:
        self.set_expert(experts, slot, gate_up.dequantised(), down.dequantised(), biases)

    def set_expert_fp8(
        self, experts: PackedExperts, slot: int, gate: BlockScaled, up: BlockScaled, down: BlockScaled
    ) -> None:
        self.set_expert(experts, slot, *dequantised(gate, up, down, experts.dtype))

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x = x_TH.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return weight_H * x.to(x_TH.dtype)

    def layer_norm(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        return self.steps.centre_rows(x_TH, weight_H, bias_H, eps)

    def add_sums(self, x_TH: Tensor, y_TH: Tensor, bad_T: Tensor | None, layer: int) -> None:
        x_TH += y_TH
        if bad_T is not None:
            bad_T.masked_fill_(~x_TH.isfinite().all(-1) & (bad_T < 0), layer)

    def add_parts(self, parts: Sequence[Tensor]) -> Tensor:
        return reduce(torch.add, (part_TH.to(parts[0].device, non_blocking=True) for part_TH in parts))

    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_TH += y_TH
        return self.rms_norm(x_TH, weight_H, eps)

    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        assert packed.weight_OI is not None
        return F.linear(x_TI, packed.weight_OI, packed.bias_O)

    def logits(self, x_TH: Tensor, packed: PackedLinear) -> Tensor:
        return self.linear(x_TH, packed).float()

    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        gate, up = self.linear(x_TH, gate_up).chunk(2, dim=-1)
        return self.linear(F.silu(gate) * up, down)

    def rope(
        self, x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool
    ) -> Tensor:
        cos = cos_PD[position_T].unsqueeze(1)
        sin = sin_PD[position_T].unsqueeze(1)
        x = x_TAD.float()
        if interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x_TAD.dtype)

    def empty_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On a CPU without touching it."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return untouched(shape, dtype)

    def empty_kv(
        self, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return self.empty_cache((*shape, sizes[0]), dtype), self.empty_cache((*shape, sizes[1]), dtype)

    def write_kv(
        self, k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor
    ) -> None:
        size = k_NGBD.shape[2]
        block, offset = kv_slot_T // size, kv_slot_T % size
        if is_eight(k_NGBD.dtype):
            k_TGD, v_TGD = key_value_rows(k_TGD, v_TGD, k_NGBD.dtype)
            k_NGBD, v_NGBD = k_NGBD.view(torch.int8), v_NGBD.view(torch.int8)
        k_NGBD[block, :, offset] = k_TGD
        v_NGBD[block, :, offset] = v_TGD

    def write_latent(self, latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor, rank: int) -> None:
        if is_eight(cache_NBC.dtype):
            latent_TC, cache_NBC = latent_rows(latent_TC, rank, cache_NBC.dtype), cache_NBC.view(torch.int8)
        cache_NBC.view(-1, cache_NBC.shape[-1])[kv_slot_T] = latent_TC

    def keep_latents(
        self, made_TD: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch
    ) -> Tensor | None:
        """`half_latent.latents_kept` in one piece; None, and nothing done, where single ops shall do it."""
        return None

    def attend_gqa(
        self, q_TAD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch, scale: float, window: int | None,
        sink_A: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        _, heads, _ = q_TAD.shape
        groups = k_NGBD.shape[1]
        out = torch.empty((q_TAD.shape[0], heads, v_NGBD.shape[3]), dtype=q_TAD.dtype, device=q_TAD.device)
        for start, stop, context, blocks in sequences(batch, k_NGBD.shape[2]):
            first = 0 if window is None else max(0, context - (stop - start) + 1 - window)
            pair = pair_at(k_NGBD, v_NGBD, blocks)
            k_GCD, v_GCD = (x.transpose(0, 1).flatten(1, 2)[:, first:context] for x in pair)
            q_AQD = q_TAD[start:stop].transpose(0, 1).float()
            repeat = heads // groups
            scores = q_AQD @ k_GCD.repeat_interleave(repeat, 0).transpose(1, 2) * scale
            seen_QC = visible(stop - start, context, window, q_TAD.device)[:, first:]
            scores = scores.masked_fill(~seen_QC, float("-inf"))
            if sink_A is not None:
                column = sink_A.float()[:, None, None].expand(-1, scores.shape[1], 1)
                weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out[start:stop] = (weights @ v_GCD.repeat_interleave(repeat, 0)).transpose(0, 1).to(out.dtype)
        return out

    def attend_mla(
        self, q_TAC: Tensor, cache_NBC: Tensor, rank: int, batch: PagedBatch, scale: float
    ) -> Tensor:
        out = torch.empty((*q_TAC.shape[:2], rank), dtype=q_TAC.dtype, device=q_TAC.device)
        for start, stop, context, blocks in sequences(batch, cache_NBC.shape[1]):
            latent = latents_at(cache_NBC, blocks, rank).flatten(0, 1)[:context]
            scores = q_TAC[start:stop].transpose(0, 1).float() @ latent.t() * scale
            scores = scores.masked_fill(~visible(stop - start, context, None, q_TAC.device), float("-inf"))
            out[start:stop] = (scores.softmax(-1) @ latent[:, :rank]).transpose(0, 1).to(out.dtype)
        return out

    def attend_latent(
        self, q_TAD: Tensor, q_rope_TAE: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch
    ) -> Tensor:
        """(T, A, value): attention over latents of queries in heads' own space, q_rope_TAE turned. Absorbed, which is
        least work for few tokens; a backend may multiply the latents up instead."""
        q_TAC = torch.cat((self.linear_heads(q_TAD, layer.up_k), q_rope_TAE), 2)
        seen_TAC = self.attend_mla(q_TAC, cache_NBC, layer.rank, batch, layer.scale)
        return self.linear_heads(seen_TAC, layer.up_v)

    def choose_rows(
        self, q_TJI: Tensor, weight_TJ: Tensor, index_NBI: Tensor, batch: PagedBatch, top: int
    ) -> Tensor:
        return choose_rows(q_TJI, weight_TJ, index_NBI, batch, top)

    def delta(
        self, rows: DeltaRows, layer: DeltaLayer, state_NF: Tensor, block_size: int, batch: PagedBatch
    ) -> Tensor:
        return delta_rows(rows, layer, state_NF, block_size, batch)

    def prepare_gqa(self, layer: GqaLayer) -> PreparedGqa:
        """Called once at load; with what the backend packs of the layer, if it has a fused half for it."""
        return PreparedGqa(layer)

    def bind_gqa(self, prepared: PreparedGqa, k_NGBD: Tensor, v_NGBD: Tensor) -> BoundGqa:
        return BoundGqa(prepared.layer, k_NGBD, v_NGBD)

    def bind_batch(self, batch: PagedBatch) -> PagedBatch:
        """The same batch with what the backend looks up of it once, rather than in every layer of the step."""
        return batch

    def gqa_half(self, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half | None:
        """`Ops.gqa_half` in one piece; None, and nothing done, where single ops shall do it (half.py)."""
        return None

    def prepare_mla(self, layer: MlaLayer) -> PreparedMla:
        return PreparedMla(layer)

    def bind_mla(self, prepared: PreparedMla, plain: BoundMla) -> BoundMla:
        return plain

    def mla_half(self, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Half | None:
        return None  # half_latent.py

    def prepare_states(self, layer: StateLayer) -> FusedStates | None:
        return None  # mixers of single ops run

    def borrow_core(self, memory_B: Tensor | None, offset: int = 0) -> bool:
        """From now on one more thread computes on the core of another node of this host, while that one lends it:
        `offset` is that of its bell, in memory that both share (comm/mailbox/segment.py) and that is kept as long.
        Instead of the core borrowed before; without memory no core is. False where the backend can't; results have the
        same bits."""
        return False

    def expert_layers(
        self, layers: Sequence[PackedExperts], rows: torch.dtype, sums: torch.dtype
    ) -> LayeredExperts | None:
        """The experts of all MoE layers for `comm.transport.AnsweringLoop`: `expert_ffn` of rows and sums of these
        dtypes, which is called there. It computes with this backend's threads, so not while anything else here does.
        None where the backend has no such thing."""
        return None

    def stack_layers(self, layers: Sequence[StackLayer]) -> Stack | None:
        """All layers over one cache, for `run_stack`; None where the backend does not run all of these in one call."""
        return None

    def route(
        self,
        x_TH: Tensor,
        gate_EH: Tensor,
        bias_E: Tensor | None,
        rule: RouterRule,
        gate_bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        added_E = None if gate_bias_E is None else gate_bias_E.float()
        logits_TE = F.linear(x_TH.float(), gate_EH.float(), added_E)
        return choose(logits_TE, bias_E, rule)

    def expert_ffn(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool,
    ) -> None:
        total = out_RH.float() if add else torch.zeros(x_RH.shape, dtype=torch.float32, device=x_RH.device)
        sums = sums_by_slot if x_RH.device.type == "cpu" else sums_by_choice
        sums(x_RH.to(experts.dtype), slot_RK, weight_RK, experts, total)
        out_RH.copy_(total)
