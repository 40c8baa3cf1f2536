"""The device guard of the pretended GPUs, compiled once and kept where pytest keeps what it knows of earlier runs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.pretend import PretendedDevice, current_watch, load_guard


@pytest.fixture(scope="session")
def guard(kept: Callable[[str], Path]) -> None:
    if shutil.which("g++") is None:
        pytest.skip("pretending a GPU takes a C++ compiler")
    load_guard(kept("afserve-guard"))


@pytest.fixture
def pretended_gpus(guard: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode PyTorch shows a mode whole operations such as `to`, which its fake mode cannot run."""
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())
    monkeypatch.setattr("afserve.kernels.devices.cuda.CudaDevice", PretendedDevice)
    for user in ("m2n.link", "device_exchange.wire"):
        monkeypatch.setattr(f"afserve.comm.{user}.fused_on", lambda device: None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """(kernel, grid) of every launch of Triton's; none runs."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    seen: list[tuple[str, object]] = []

    def run(self: Any, *args: object, grid: object, **options: object) -> None:
        name: str = self.fn.__name__
        seen.append((name, grid))
        watched = current_watch()
        if watched is not None and watched.launched is not None:
            watched.launched.append(name)

    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", run)
    return seen
