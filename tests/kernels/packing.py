"""Experts from stacked weights, slot by slot. Shapes: E experts, J = 2 I gate over up, I inner, H hidden."""

from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.packed import SWIGLU, Gating, PackedExperts


def pack_experts(
    ops: Ops, gate_up_EJH: Tensor, down_EHI: Tensor, int8: bool = False, gating: Gating = SWIGLU
) -> PackedExperts:
    experts, hidden, inner = down_EHI.shape
    packed = ops.empty_experts(experts, hidden, inner, down_EHI.dtype, int8, gating=gating)
    for slot in range(experts):
        ops.set_expert(packed, slot, gate_up_EJH[slot], down_EHI[slot])
    return packed
