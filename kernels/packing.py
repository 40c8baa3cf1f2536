"""The door for weights: checked, then brought into the order in which the backend multiplies them. Once, at load.

It knows no op. Shapes: E experts, J = 2 I, I inner size, H hidden, O/I outputs/inputs, A heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.kernels.checks import (
    both_biases,
    expect_bits,
    expect_blocks,
    expect_groups,
    expect_rank,
    expect_shape,
    expect_slot,
)
from afserve.kernels.formats.scaled import BlockScaled
from afserve.kernels.grouped import Grouped, Groups, quantised_groups
from afserve.kernels.packed import SWIGLU, ExpertShape, Gating, PackedExperts, PackedHeads, PackedLinear
from afserve.kernels.reference import Reference


class Packing:
    """Checks weights, then calls the backend; `Ops` has its methods."""

    def __init__(self, backend: Reference) -> None:
        self._backend = backend

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, int8: bool = False, int4: Groups | None = None
    ) -> PackedLinear:
        """Called once at load. The weight may be dropped by the caller afterwards. int8, int4: see `empty_experts`."""
        expect_rank("weight_OI", weight_OI, 2)
        if bias_O is not None:
            expect_shape("bias_O", bias_O, (weight_OI.shape[0],))
        expect_bits(int8, int4)
        return self._backend.pack_linear(weight_OI, bias_O, int8, int4)

    def pack_linear_fp8(self, weight: BlockScaled, bias_O: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """The same of e4m3 blocks, for rows of `dtype`. Where `holds_fp8` and `fp8_maps` they are kept as they are, and
        rows are rounded to e4m3 per 128 columns on the way; else they are de-quantised."""
        expect_blocks("weight", weight, weight.shape)
        if bias_O is not None:
            expect_shape("bias_O", bias_O, (weight.shape[0],))
        return self._backend.pack_linear_fp8(weight, bias_O, dtype)

    def pack_heads(self, weight_AOI: Tensor, int8: bool = False, int4: Groups | None = None) -> PackedHeads:
        """One weight per head; called once at load. int8, int4: as of `empty_experts`."""
        expect_rank("weight_AOI", weight_AOI, 3)
        expect_bits(int8, int4)
        return self._backend.pack_heads(weight_AOI, int8, int4)

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
        places: int | None = None,
    ) -> PackedExperts:
        """Slots without weights; fill them one at a time with `set_expert`, so nothing is ever held twice.

        int8: weights are kept as int8 with a scale per output; rows stay in `dtype`.
        fp8: weights are kept as e4m3 with a scale per 128x128 block; needs `holds_fp8`, or raises ConfigError. On GPUs
        rows and activations are rounded to e4m3 per 128 columns on the way; on CPUs they stay as they are.
        int4: weights are kept as int4 with a scale per group of inputs.
        bias: slots have biases of both projections; gating: how gate and up are joined. Neither goes with fp8.
        places: there is memory for the weights of so many slots, and `put_expert` says of which. On CPUs only.
        """
        expect_bits(int8, int4, fp8)
        shape = ExpertShape(slots, hidden, inner, dtype, bias, gating, places)
        if int4 is not None:
            return self._backend.empty_experts_int4(shape, int4)
        if fp8 and not shape.plain:
            raise ValueError("fp8: only experts of a plain SwiGLU without biases are kept so")
        if fp8:
            return self._backend.empty_experts_fp8(shape)
        return self._backend.empty_experts(shape, int8)

    def put_expert(self, experts: PackedExperts, slot: int, place: int | None) -> None:
        """The slot's weights are at this place from now on, and set next; None: it has none. No `expert_ffn` may name
        the slot, and no other slot be at the place."""
        expect_slot(slot, experts)
        self._backend.put_expert(experts, slot, -1 if place is None else place)

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
        expect_shape("gate_up_JH", gate_up_JH, (experts.joined, experts.hidden))
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

    def set_half(
        self, experts: PackedExperts, slot: int, gate_up: Sequence[Tensor] = (), down_HI: Tensor | None = None
    ) -> None:
        """A half of `set_expert` or both, of slots without biases that keep numbers or int8: gate over up, in one
        tensor or in two, and down. On CPUs only."""
        if experts.bias or experts.fp8 or experts.int4 is not None or experts.ggml is not None:
            raise ValueError(
                "experts: slots with biases, or of other forms than numbers and int8, are set whole"
            )
        expect_slot(slot, experts)
        for part in gate_up:
            expect_shape("gate_up", part, (experts.joined // len(gate_up), experts.hidden))
        if down_HI is not None:
            expect_shape("down_HI", down_HI, (experts.hidden, experts.inner))
        self._backend.set_half(experts, slot, gate_up, down_HI)

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
        expect_groups("gate_up", gate_up, (experts.joined, experts.hidden), experts.int4)
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
