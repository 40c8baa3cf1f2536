"""Runs the same tests in Triton's interpreter where there is no CUDA device, and on the device (marker gpu) where
there is one. The switch is set here, before the kernels are imported; the product reads no environment variable.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from pathlib import Path  # noqa: E402

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

HERE = Path(__file__).parent
CUDA = torch.cuda.is_available()


def _interpret() -> None:
    """Interpret every kernel decorated from now on, and Triton's own functions that were decorated before."""
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
    """The interpreter truncates to bfloat16 and loses the carry into e4m3's exponent; torch rounds as the chip does."""
    rounded = {
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    }

    def converted(value, source, target, rounding):  # type: ignore[no-untyped-def]
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


if not CUDA:
    _interpret()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CUDA and HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture
def fp8() -> None:
    """For tests that convert to e4m3: chips before 8.9 cannot."""
    if CUDA and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this chip has no FP8 conversions (8.9 or newer)")


@pytest.fixture
def close() -> Callable[..., None]:
    """close(actual, float64 truth, steps): no further apart than `steps` roundings of the actual's dtype."""

    def check(actual: torch.Tensor, truth: torch.Tensor, steps: float = 4.0) -> None:
        assert actual.shape == truth.shape, (actual.shape, truth.shape)
        if truth.numel():
            bound = steps * torch.finfo(actual.dtype).eps * max(1.0, truth.abs().max().item())
            worst = (actual.double().cpu() - truth.double().cpu()).abs().max().item()
            assert worst <= bound, f"off by {worst:.3g}, allowed {bound:.3g}"

    return check
