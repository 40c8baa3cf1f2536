"""The ops on a CUDA device: Triton kernels where they beat PyTorch, PyTorch (cuBLAS) for the dense products.

Nothing here waits for the device and every grid is an upper bound, so a step can be captured in a CUDA graph. It
checks no arguments (`ops.py` did) and asks `triton_tiles` for tiles. Shapes as in `reference.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar, cast

import torch
from torch import Tensor

import triton
from afserve.errors import ConfigError
from afserve.kernels.delta import DeltaLayer, DeltaRows, delta_rows
from afserve.kernels.devices.cuda import chip_of, make_current, numbered, reaches
from afserve.kernels.formats.scaled import FP8, BlockScaled, blocks_of, dequantised
from afserve.kernels.grouped import Grouped, Groups, int8_rows, whole_rows
from afserve.kernels.half import opened, routed_half
from afserve.kernels.latent import MlaLayer, PreparedMla
from afserve.kernels.layer import BoundGqa, FusedStates, GqaLayer, Half, PreparedGqa, StateLayer
from afserve.kernels.libraries.library import Libraries
from afserve.kernels.packed import Biases, ExpertShape, PackedExperts
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring
from afserve.kernels.states.rules import OWN
from afserve.kernels.triton import experts as triton_experts
from afserve.kernels.triton import experts_apart as apart
from afserve.kernels.triton import experts_bits as triton_bits
from afserve.kernels.triton import kv as triton_kv
from afserve.kernels.triton import norm as triton_norm
from afserve.kernels.triton import router as triton_router
from afserve.kernels.triton.ahead import compile_ahead
from afserve.kernels.triton.attention import attend_gqa
from afserve.kernels.triton.eight import rows_dtype
from afserve.kernels.triton.experts import ExpertWeights
from afserve.kernels.triton.experts_bits import CodedWeights
from afserve.kernels.triton.joining import Joint
from afserve.kernels.triton.latents import LatentBackend
from afserve.kernels.triton.launch import planned
from afserve.kernels.triton.quant import quantise_blocks
from afserve.kernels.triton.row_steps import TritonRowSteps
from afserve.kernels.triton.state_prompts import move_prompts
from afserve.kernels.triton.states import move_rows
from afserve.kernels.triton.tiles import TileTable

AnyLayer = TypeVar("AnyLayer", GqaLayer, MlaLayer)
CODED = (torch.bfloat16, torch.float16, torch.float32)  # rows that codes are multiplied with


class TritonBackend(LatentBackend):
    """Dense products, LayerNorm, argmax, a choice of rows by keys in 8 bits and the caches' memory are PyTorch's by
    choice, which is no fallback.

    `parts` fixes how many parts a context is cut into, so that a sequence's result does not depend on the batch;
    None cuts as many as fill the chip. `libraries` compute what passed their tests (`libraries/tested.py`).
    """

    name = "triton"
    steps = TritonRowSteps()

    def __init__(
        self,
        device: torch.device,
        multiprocessors: int,
        tiles: TileTable | None = None,
        has_fp8: bool = True,
        parts: int | None = None,
        libraries: Libraries | None = None,
    ) -> None:
        super().__init__(device, multiprocessors, tiles or TileTable(), has_fp8, parts)
        self.libraries = libraries or Libraries()
        self.compile_ahead = (
            None if self.libraries.opened else compile_ahead
        )  # they compile in ways of their own
        self._four_bit_tiles = planned(self.tiles.four_bit_tiles)

    @classmethod
    def open(cls, device: torch.device, libraries: str = "auto") -> Self:
        """For a CUDA device that is present; it becomes the process's current one, where Triton launches. Raises
        ConfigError if its chip has no bfloat16 matrix instructions, and for a library that is not here."""
        device = numbered(device)
        chip = chip_of(device)
        if chip.capability < (8, 0):
            major, minor = chip.capability
            raise ConfigError(
                f"device {device}: {chip.name} is compute capability {major}.{minor}, the Triton kernels "
                'need 8.0 or newer; use another device, or backend "torch"'
            )
        make_current(device)
        shared = int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
        tiles = TileTable.of_chip(chip.name, shared, tensor_memory=chip.capability[0] == 10)
        found = Libraries.open_named(libraries, device)
        return cls(device, chip.processors, tiles, chip.capability >= (8, 9), None, found)

    def with_tiles(self, tiles: TileTable) -> "TritonBackend":
        return TritonBackend(self.device, self._multiprocessors, tiles, self._has_fp8, self._parts)

    def holds_int8(self, dtype: torch.dtype) -> bool:
        return dtype in CODED

    def holds_int4(self, dtype: torch.dtype) -> bool:
        return dtype in CODED

    def explain(self) -> str:
        return f"Triton {triton.__version__} on {self.device}, {self.tiles.explain()}{self.libraries.tell_libraries()}"

    def empty_experts(self, shape: ExpertShape, int8: bool = False) -> PackedExperts:
        if shape.gating.odd and not int8:
            return super().empty_experts(shape)
        if int8:
            group = whole_rows(shape.hidden, shape.inner)
            return replace(self._coded(shape, 8, Groups(group)), int8=True)
        packed = super().empty_experts(shape)
        assert packed.gate_up_EJH is not None and packed.down_EHI is not None
        joint = Joint(shape.gating, packed.gate_up_bias_EJ, packed.down_bias_EH)
        return replace(packed, handle=ExpertWeights(packed.gate_up_EJH, packed.down_EHI, joint=joint))

    def empty_experts_int4(self, shape: ExpertShape, groups: Groups) -> PackedExperts:
        return replace(self._coded(shape, 4, groups), int4=groups)

    def _coded(self, shape: ExpertShape, bits: int, groups: Groups) -> PackedExperts:
        if shape.gating.odd:
            raise ConfigError(
                f"device {self.device}: experts with {shape.gating.odd} are kept in 16 or 32 bits, not in {bits}"
            )
        coded = triton_bits.empty(shape, bits, groups, self.device)
        sizes = shape.slots, shape.hidden, shape.inner
        packed = PackedExperts(*sizes, None, None, coded, shape.dtype, gating=shape.gating, bias=shape.bias)
        packed.coded = coded.tensors
        return packed

    def set_expert_int4(
        self, experts: PackedExperts, slot: int, gate_up: Grouped, down: Grouped, biases: Biases | None = None
    ) -> None:
        assert isinstance(experts.handle, CodedWeights), "slots of another backend"
        experts.handle.set(slot, gate_up, down, biases)

    def empty_experts_fp8(self, shape: ExpertShape) -> PackedExperts:
        if not self._has_fp8:
            raise ConfigError(
                f"device {self.device} has no FP8 matrix instructions (8.9 or newer); use 16-bit weights"
            )
        slots, hidden, inner = shape.slots, shape.hidden, shape.inner
        across_i, across_h = blocks_of(inner, hidden)

        def zeros(*size: int, of: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=of, device=self.device)

        coded = (
            zeros(slots, 2 * inner, hidden, of=FP8),
            zeros(slots, hidden, inner, of=FP8),
            zeros(slots, 2 * across_i, across_h, of=torch.float32),
            zeros(slots, across_h, across_i, of=torch.float32),
        )
        handle = ExpertWeights(*coded, products=self.libraries.products(shape))
        return PackedExperts(slots, hidden, inner, None, None, handle, dtype=shape.dtype, coded=coded)

    def set_expert(
        self, experts: PackedExperts, slot: int, gate_up_JH: Tensor, down_HI: Tensor, biases: Biases | None = None,
    ) -> None:  # fmt: skip
        if isinstance(experts.handle, CodedWeights):
            group = experts.handle.group
            gate_up, down = (int8_rows(w.to(self.device), group) for w in (gate_up_JH, down_HI))
            experts.handle.set(slot, gate_up, down, biases)
            return
        if not isinstance(experts.handle, ExpertWeights) or not experts.handle.scaled:
            super().set_expert(experts, slot, gate_up_JH, down_HI, biases)
            return
        blocks = (BlockScaled(*quantise_blocks(w.to(self.device))) for w in (*gate_up_JH.chunk(2), down_HI))
        self.set_expert_fp8(experts, slot, *blocks)

    def set_expert_fp8(
        self, experts: PackedExperts, slot: int, gate: BlockScaled, up: BlockScaled, down: BlockScaled
    ) -> None:
        if isinstance(experts.handle, CodedWeights):
            self.set_expert(experts, slot, *dequantised(gate, up, down, experts.dtype))
            return
        weights = experts.handle
        if (
            not isinstance(weights, ExpertWeights)
            or weights.gate_up_scale is None
            or weights.down_scale is None
        ):
            self.set_expert(experts, slot, *dequantised(gate, up, down, experts.dtype))
            return
        inner, blocks = experts.inner, weights.gate_up_scale.shape[1] // 2
        for weight, row, block in ((gate, 0, 0), (up, inner, blocks)):
            weights.gate_up_EJH[slot, row : row + inner].copy_(weight.q_OI)
            weights.gate_up_scale[slot, block : block + blocks].copy_(weight.scale)
        weights.down_EHI[slot].copy_(down.q_OI)
        weights.down_scale[slot].copy_(down.scale)
        if weights.products is not None:
            weights.products.expect_scales(gate.scale, up.scale, down.scale)

    def expert_ffn(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool,
    ) -> None:
        if experts.gating.odd:
            self.fallbacks.record_fallback("expert_ffn", experts.gating.odd)
            super().expert_ffn(x_RH, slot_RK, weight_RK, experts, out_RH, add)
            return
        rows = x_RH if x_RH.dtype is experts.dtype else x_RH.to(experts.dtype)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        each = experts.rows_expected(slot_RK.numel())
        if isinstance(experts.handle, CodedWeights):
            find = self._four_bit_tiles if experts.handle.bits == 4 else self._expert_tiles
            tiles = find("fp32" if rows.dtype is torch.float32 else "16-bit", each)
            chosen = slot_RK.contiguous(), weight_RK.contiguous()
            triton_bits.expert_ffn(rows, *chosen, experts.handle, tiles, out_RH, add)
            return
        weights = _weights(experts)
        chosen = slot_RK.contiguous(), weight_RK.contiguous()
        products = weights.products
        if products is not None and len(rows):
            told = partial(apart.expert_ffn, rows, *chosen, weights, products, out_RH, add)
            if products.compute_apart(told):
                return
        tiles = self._expert_tiles(weights.kind, each)
        triton_experts.expert_ffn(rows, *chosen, weights, tiles, out_RH, add)

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        normed_TH = self.libraries.norm_rows(x_TH, weight_H, eps)
        return triton_norm.rms_norm(x_TH, weight_H, eps) if normed_TH is None else normed_TH

    def add_sums(self, x_TH: Tensor, y_TH: Tensor, bad_T: Tensor | None, layer: int) -> None:
        triton_norm.add_sums(x_TH, y_TH, bad_T, layer)

    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        normed_TH = self.libraries.norm_sums(x_TH, y_TH, weight_H, eps)
        return triton_norm.add_rms_norm(x_TH, y_TH, weight_H, eps) if normed_TH is None else normed_TH

    def add_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Copied here first from devices whose memory kernels of this one cannot read."""
        read = all(reaches(self.device, part.device) for part in parts)
        return triton_norm.add_parts(parts) if read else super().add_parts(parts)

    def route(
        self,
        x_TH: Tensor,
        gate_EH: Tensor,
        bias_E: Tensor | None,
        rule: RouterRule,
        gate_bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if gate_bias_E is not None or rule.scoring is Scoring.SPARSE_MIXER:
            self.fallbacks.record_fallback("route", "a bias of the router's logits, or the sparse mixer")
            return super().route(x_TH, gate_EH, bias_E, rule, gate_bias_E)
        return triton_router.route(x_TH, gate_EH, bias_E, rule, self.tiles.router())

    def prepare_gqa(self, layer: GqaLayer) -> PreparedGqa:
        return PreparedGqa(self._ready(layer))

    def prepare_mla(self, layer: MlaLayer) -> PreparedMla:
        return PreparedMla(self._ready(layer))

    def _ready(self, layer: AnyLayer) -> AnyLayer:
        """Before a node says ready libraries' ops are tested with the sizes of its layers."""
        self.libraries.test_norms(layer.input_norm_H.shape[0], layer.input_norm_H.dtype)
        return _with_gate_like_rows(layer)

    def bind_gqa(self, prepared: PreparedGqa, k_NGBD: Tensor, v_NGBD: Tensor) -> BoundGqa:
        layer = prepared.layer
        if layer.sink_A is None:
            self.libraries.test_attention(layer.heads, k_NGBD, v_NGBD, layer.scale, layer.window)
        return super().bind_gqa(prepared, k_NGBD, v_NGBD)

    def prepare_states(self, layer: StateLayer) -> FusedStates | None:
        """Single ops run."""
        if layer.mixer is not None and layer.mixer.delta is not None:
            self.libraries.test_delta(layer.mixer.delta.shape, layer.input_norm_H.dtype)
        return None

    def delta(
        self, rows: DeltaRows, layer: DeltaLayer, state_NF: Tensor, block_size: int, batch: PagedBatch
    ) -> Tensor:
        moves = self.libraries.moves(layer.shape, rows.mixed_TC.dtype)
        singly = move_rows if moves.step is OWN.step else None
        together = move_prompts if moves.segment is OWN.segment else None
        return delta_rows(rows, layer, state_NF, block_size, batch, moves, singly, together)

    def rope(
        self, x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool
    ) -> Tensor:
        return triton_kv.rope(x_TAD, cos_PD, sin_PD, position_T, interleaved)

    def write_kv(
        self, k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor
    ) -> None:
        triton_kv.write_kv(k_TGD, v_TGD, k_NGBD, v_NGBD, kv_slot_T)

    def write_latent(self, latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor, rank: int) -> None:
        triton_kv.write_latent(latent_TC, cache_NBC, kv_slot_T, rank)

    def gqa_half(self, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half | None:
        """The reference's steps; head norms, rotation and the cache write are one launch."""
        layer, k_NGBD, v_NGBD = bound.layer, bound.k_NGBD, bound.v_NGBD
        if unusual := layer.unusual(gated=True):
            self.fallbacks.record_fallback("gqa_half", unusual)
            return None
        normed = self.rms_norm(x_TH, layer.input_norm_H, layer.eps)
        heads = self.linear(normed, layer.qkv).view(-1, layer.heads + 2 * layer.groups, layer.head_dim)
        q, k, v = heads.split((layer.heads, layer.groups, layer.groups), dim=1)
        q = triton_kv.rope_write_kv(
            q, k, v, layer.cos_PD, layer.sin_PD, batch.position_T, k_NGBD, v_NGBD, batch.kv_slot_T, False,
            layer.q_norm_D, layer.k_norm_D, layer.eps,
        )  # fmt: skip
        seen = self.attend_gqa(q, k_NGBD, v_NGBD, batch, layer.scale, layer.window, layer.sink_A)
        return routed_half(self, x_TH, layer, opened(self, normed, seen, layer.steps))

    def attend_gqa(
        self, q_TAD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch, scale: float, window: int | None,
        sink_A: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if sink_A is None:
            seen_TAD = self.libraries.attend_decode(q_TAD, k_NGBD, v_NGBD, batch, scale, window)
            if seen_TAD is not None:
                return seen_TAD
        q = q_TAD.to(rows_dtype(k_NGBD, q_TAD))
        decode, chunk = self.tiles.gqa(
            max(q.shape[2], v_NGBD.shape[3]), q.element_size(), k_NGBD.itemsize == 1
        )
        keys = batch.max_context if window is None else min(window, batch.max_context)
        parts = self.context_parts(batch.sequences * k_NGBD.shape[1], keys, decode.split)
        seen_TAD = attend_gqa(q, k_NGBD, v_NGBD, batch, scale, window, sink_A, decode, chunk, parts)
        return seen_TAD.to(q_TAD.dtype)


def _with_gate_like_rows(layer: AnyLayer) -> AnyLayer:
    if layer.gate_EH is None:
        return layer
    gate_EH = triton_router.gate_like_rows(layer.gate_EH, layer.input_norm_H.dtype)
    return replace(layer, gate_EH=gate_EH)


def _weights(experts: PackedExperts) -> ExpertWeights:
    return cast(ExpertWeights, experts.handle)
