"""Runs the same tests in Triton's interpreter where there is no CUDA device, and on the device (marker gpu) where
there is one. The switch is set here, before the kernels are imported; the product reads no environment variable.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

from pathlib import Path

from tests.kernels.triton.checked_memory import fence_kernels
from tests.kernels.triton.interpret import interpret

HERE = Path(__file__).parent
CUDA = torch.cuda.is_available()


if not CUDA:
    interpret()
    fence_kernels()


@pytest.fixture(autouse=True)
def unwritten_memory_is_no_number() -> Iterator[None]:
    """What `torch.empty` gives, as far as PyTorch may fill it."""
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(strict, warn_only=warns)


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
