"""Experts from stacked weights, slot by slot. Shapes: E experts, J = 2 I gate over up, I inner, H hidden.

And rows as products with int4 weights and ggml's types read them."""

from collections.abc import Callable

import torch
from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.packed import SWIGLU, Gating, PackedExperts

BYTE_SETS = "avx2", "neon"  # whose rows for weights of few bits have 8; the first one's have for int8, too


def pack_experts(
    ops: Ops, gate_up_EJH: Tensor, down_EHI: Tensor, int8: bool = False, gating: Gating = SWIGLU
) -> PackedExperts:
    experts, hidden, inner = down_EHI.shape
    packed = ops.empty_experts(experts, hidden, inner, down_EHI.dtype, int8, gating=gating)
    for slot in range(experts):
        ops.set_expert(packed, slot, gate_up_EJH[slot], down_EHI[slot])
    return packed


def in_bytes(x: Tensor) -> Tensor:
    """Each 32 numbers of a row as whole numbers of 8 bits with a scale of their own."""
    inputs = x.shape[-1]
    part = torch.nn.functional.pad(x.bfloat16().float(), (0, -inputs % 32)).unflatten(-1, (-1, 32))
    most = part.abs().amax(-1, keepdim=True)
    code = torch.where(most > 1e-30, part * (torch.tensor(127.0) / most), 0).round()
    rounded: Tensor = code.double() * (most / 127).double()
    return rounded.flatten(-2)[..., :inputs]


def rows_of_codes(ops: Ops, dtype: torch.dtype, int8: bool = False) -> Callable[[Tensor], Tensor]:
    """What rows of this dtype are rounded to, if at all by more than tests allow."""
    return in_bytes if ops.isa in BYTE_SETS[: 1 if int8 else 2] and dtype == torch.bfloat16 else Tensor.double
