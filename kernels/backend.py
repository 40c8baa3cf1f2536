"""What a backend of the door is: every op of `Ops`, without its checks.

A backend holds a `Reference` for what does not fit it, and notes that in `fallbacks`; it inherits nothing from it, so
that a test of a backend compares two programs. Contracts are in the docstrings of `ops.py`; shapes as there.
"""

from typing import Protocol

import torch
from torch import Tensor

from afserve.kernels.delta import DeltaLayer, DeltaRows
from afserve.kernels.fallbacks import Fallbacks
from afserve.kernels.grouped import Grouped, Groups
from afserve.kernels.latent import BoundMla, MlaLayer, PreparedMla
from afserve.kernels.layer import BoundGqa, GqaLayer, Half, PreparedGqa
from afserve.kernels.packed import Biases, ExpertShape, PackedExperts, PackedHeads, PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule
from afserve.kernels.scaled import BlockScaled
from afserve.kernels.stack import LayeredExperts, Stack, StackLayer


class NativeCalls(Protocol):
    """What a backend of compiled code offers beside the ops: calls that run many of them without Python between two,
    and a core of a node that waits."""

    def borrow_core(self, memory_B: Tensor | None, offset: int) -> bool: ...
    def expert_layers(
        self, layers: tuple[PackedExperts, ...], rows: torch.dtype, sums: torch.dtype
    ) -> LayeredExperts | None: ...
    def stack_layers(self, layers: tuple[StackLayer, ...]) -> Stack | None: ...


class KernelBackend(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def holds_fp8(self) -> bool:
        """Whether expert slots can keep e4m3 blocks."""
        ...

    @property
    def fallbacks(self) -> Fallbacks: ...
    @property
    def native_calls(self) -> NativeCalls | None:
        """None where Python calls every op."""
        ...

    def holds_int8(self, dtype: torch.dtype) -> bool:
        """Whether expert slots can keep int8 weights for rows of `dtype`, rather than 16 bits of the same values."""
        ...

    def holds_int4(self, dtype: torch.dtype) -> bool:
        """The same for int4 weights with a scale per group of inputs."""
        ...

    def explain(self) -> str: ...

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None, int8: bool = False, int4: Groups | None = None
    ) -> PackedLinear: ...
    def pack_heads(
        self, weight_AOI: Tensor, int8: bool = False, int4: Groups | None = None
    ) -> PackedHeads: ...
    def empty_experts(self, shape: ExpertShape, int8: bool = False) -> PackedExperts: ...
    def empty_experts_fp8(self, shape: ExpertShape) -> PackedExperts: ...
    def empty_experts_int4(self, shape: ExpertShape, groups: Groups) -> PackedExperts: ...
    def set_expert(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up_JH: Tensor,
        down_HI: Tensor,
        biases: Biases | None = None,
    ) -> None: ...
    def set_expert_fp8(
        self, experts: PackedExperts, slot: int, gate: BlockScaled, up: BlockScaled, down: BlockScaled
    ) -> None: ...
    def set_expert_int4(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up: Grouped,
        down: Grouped,
        biases: Biases | None = None,
    ) -> None: ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor: ...
    def layer_norm(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor: ...
    def add_sums(self, x_TH: Tensor, y_TH: Tensor, bad_T: Tensor | None, layer: int) -> None: ...
    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor: ...
    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor: ...
    def logits(self, x_TH: Tensor, packed: PackedLinear) -> Tensor: ...
    def argmax(self, logits_RV: Tensor) -> Tensor: ...
    def linear_heads(self, x_TAI: Tensor, packed: PackedHeads) -> Tensor: ...
    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor: ...
    def route(
        self,
        x_TH: Tensor,
        gate_EH: Tensor,
        bias_E: Tensor | None,
        rule: RouterRule,
        gate_bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    def expert_ffn(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool,
    ) -> None: ...

    def empty_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...
    def empty_kv(
        self, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...
    def clear_blocks(self, cache: tuple[Tensor, ...], block_B: Tensor) -> None: ...
    def write_kv(
        self, k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor
    ) -> None: ...
    def write_latent(self, latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor) -> None: ...
    def rope(
        self, x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool
    ) -> Tensor: ...
    def attend_gqa(
        self,
        q_TAD: Tensor,
        k_NGBD: Tensor,
        v_NGBD: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        sink_A: Tensor | None = None,
    ) -> Tensor: ...
    def attend_mla(
        self, q_TAC: Tensor, cache_NBC: Tensor, rank: int, batch: PagedBatch, scale: float
    ) -> Tensor: ...

    def delta(
        self, rows: DeltaRows, layer: DeltaLayer, state_NF: Tensor, block_size: int, batch: PagedBatch
    ) -> Tensor: ...

    def prepare_gqa(self, layer: GqaLayer) -> PreparedGqa: ...
    def bind_gqa(self, prepared: PreparedGqa, k_NGBD: Tensor, v_NGBD: Tensor) -> BoundGqa: ...
    def bind_batch(self, batch: PagedBatch) -> PagedBatch: ...
    def gqa_half(self, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half: ...
    def prepare_mla(self, layer: MlaLayer) -> PreparedMla: ...
    def bind_mla(self, prepared: PreparedMla, cache_NBC: Tensor) -> BoundMla: ...
    def mla_half(self, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Half: ...
