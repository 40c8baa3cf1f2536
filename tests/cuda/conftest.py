"""The device guard of the pretended GPUs, compiled once per run."""

import shutil

import pytest
import torch

from tests.cuda.pretend import PretendedDevice, load_guard


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("g++") is None:
        pytest.skip("pretending a GPU takes a C++ compiler")
    load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def pretended_gpus(guard: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode PyTorch shows a mode whole operations such as `to`, which its fake mode cannot run."""
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())
    monkeypatch.setattr("afserve.kernels.devices.cuda.CudaDevice", PretendedDevice)
