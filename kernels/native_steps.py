"""The native library's steps of rows, and how halves and FFNs of a stack are told of theirs.

It knows addresses, and no fallback but PyTorch's steps. Shapes as in `row_steps.py`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from afserve.kernels import _native
from afserve.kernels.layer import NO_STEPS, Steps
from afserve.kernels.native_products import CODES, address, gating_of, plain
from afserve.kernels.packed import Gating, PackedLinear
from afserve.kernels.row_steps import RowSteps
from afserve.kernels.stack import FfnSteps


class NativeRowSteps(RowSteps):
    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    def open_rows(self, x_TAD: Tensor, gate: Tensor, *, softplus: bool = False) -> Tensor:
        if x_TAD.dtype not in CODES or gate.dtype is not x_TAD.dtype:
            return super().open_rows(x_TAD, gate, softplus=softplus)
        x, given = x_TAD.contiguous(), gate.contiguous()
        rows, heads, size = x.shape
        wide = given.numel() > rows * heads
        pointers = x.data_ptr(), rows, heads, size, given.data_ptr()
        _native.open_rows(self._engine, CODES[x.dtype], *pointers, wide, softplus)
        return x

    def join_rows(self, gating: Gating, both_TJ: Tensor) -> Tensor:
        native = gating_of(gating)
        if both_TJ.dtype not in CODES or native is None:
            return super().join_rows(gating, both_TJ)
        both = both_TJ.contiguous()
        rows, inner = both.shape[0], both.shape[1] // gating.projections
        out = torch.empty((rows, inner), dtype=both.dtype)
        given = both.data_ptr(), rows, inner
        _native.join_rows(self._engine, CODES[both.dtype], native, *given, out.data_ptr())
        return out

    def centre_rows(self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        dtype = x_TH.dtype
        if dtype not in CODES or not fits(weight_H, dtype) or not fits(bias_H, dtype):
            return super().centre_rows(x_TH, weight_H, bias_H, eps)
        x, out = x_TH.contiguous(), torch.empty(x_TH.shape, dtype=dtype)
        size = len(weight_H)
        given = x.data_ptr(), x.numel() // size, size, weight_H.data_ptr(), address(bias_H)
        _native.centre_rows(self._engine, CODES[dtype], *given, eps, out.data_ptr())
        return out

    def cap_rows(self, x_TV: Tensor, cap: float) -> Tensor:
        x = plain(x_TV, torch.float32)
        _native.cap_rows(self._engine, x.data_ptr(), len(x), x.shape[1], cap)
        return x


def linear_of(packed: PackedLinear, dtype: torch.dtype) -> _native.Linear | None:
    """The library's map, if it is one for such rows."""
    handle = packed.handle
    return handle if isinstance(handle, _native.Linear) and packed.dtype is dtype else None


def fits(norm_H: Tensor | None, dtype: torch.dtype) -> bool:
    return norm_H is None or (norm_H.dtype is dtype and norm_H.is_contiguous())


def odd_steps(steps: Steps, dtype: torch.dtype) -> str:
    """What the library can't take of them; empty where it does all."""
    others = replace(NO_STEPS, chunk=steps.chunk, blocks=steps.blocks, log_scale=steps.log_scale)
    if others.names():
        return others.names()
    if steps.gate is not None and linear_of(steps.gate, dtype) is None:
        return f"a gate for the output with {steps.gate.dtype} weights"
    return "" if all(fits(norm, dtype) for norm in _norms(steps)) else "norms of several dtypes, or with gaps"


def _norms(steps: Steps) -> tuple[Tensor | None, ...]:
    biases = steps.input_bias_H, steps.post_bias_H
    return steps.after_norm_H, steps.v_norm_D, steps.router_norm_H, *biases


def half_steps(
    steps: Steps, wide_EH: Tensor | None
) -> tuple[_native.HalfSteps | None, tuple[Tensor | None, ...]]:
    """None for none, and what it points at. `wide_EH` is a router's gate that the rows' dtype can't hold."""
    if wide_EH is None and not replace(steps, late=False).names():
        return None, ()
    norms, scales = _norms(steps), (steps.q_scale_P, steps.expert_scale_E, wide_EH)
    floats = tuple(None if x is None else plain(x, torch.float32) for x in scales)
    gate = None if steps.gate is None else steps.gate.handle
    assert gate is None or isinstance(gate, _native.Linear)
    flags = steps.softplus, steps.parallel, steps.centred
    places = [address(norm) for norm in norms], [address(x) for x in floats]
    experts = 0 if wide_EH is None else len(wide_EH)
    made = _native.HalfSteps(gate, *flags, steps.clip or 0.0, *places, experts)
    return made, (*norms, *floats)


def ffn_steps(steps: FfnSteps, dtype: torch.dtype) -> _native.FfnSteps | None:
    """None where the library can't take them."""
    norms = steps.before_shared_H, steps.after_shared_H, steps.after_routed_H, steps.after_H
    opening = None if steps.opening is None else linear_of(steps.opening, dtype)
    if (opening is None and steps.opening is not None) or not all(fits(norm, dtype) for norm in norms):
        return None
    gating = None if steps.gating is None else gating_of(steps.gating)
    if gating is None and steps.gating is not None:
        return None
    scales = steps.shared_scale, steps.row_scale, steps.eps
    return _native.FfnSteps(opening, gating, *scales, [address(norm) for norm in norms])
