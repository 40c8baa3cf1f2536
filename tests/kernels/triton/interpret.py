"""Triton's interpreter, mended where it rounds unlike the chip: for `conftest.py` and for processes of tests."""

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


def interpret() -> None:
    """Interpret every kernel decorated from now on, and Triton's own functions that were decorated before."""
    if triton.knobs.runtime.interpret:
        return
    triton.knobs.propagate_env = (
        False  # or the knob sets TRITON_INTERPRET, and processes that tests start interpret too
    )
    triton.knobs.runtime.interpret = True
    for module in (tl, tl.standard, tl.random):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(value.fn))
    interpreter._convert_float = _rounding_as_the_chip(interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot_of_values(builder.create_dot)


def _rounding_as_the_chip(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The interpreter truncates to bfloat16, loses the carry into e4m3's exponent and reads its NaN as 480; torch does
    as the chip."""
    rounded = {
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    }
    widened = {tl.float16: (torch.float16, torch.uint16), tl.float32: (torch.float32, torch.uint32)}

    def converted(value, source, target, rounding):  # type: ignore[no-untyped-def]
        if source == tl.float8e4nv and target in widened:
            dtype, bits = widened[target]
            stored = torch.from_numpy(np.array(value).view(np.uint8)).view(torch.float8_e4m3fn)
            return stored.to(dtype).view(bits).numpy()
        if source != tl.float32 or target not in rounded:
            return convert(value, source, target, rounding)
        dtype, bits = rounded[target]
        return torch.from_numpy(np.array(value, dtype=np.float32)).to(dtype).view(bits).numpy()

    return converted


def _dot_of_values(dot: Callable[..., object]) -> Callable[..., object]:
    """The interpreter keeps bfloat16 as uint16 and would multiply the bit patterns."""

    def multiply(self, a, b, *rest):  # type: ignore[no-untyped-def]
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    return multiply
