"""What a backend hands to PyTorch: recorded with a reason, told once, and nothing else."""

import logging

import pytest
import torch

from afserve.kernels.fallbacks import Fallback
from afserve.kernels.ops import Ops
from afserve.kernels.reference import Reference
from tests.kernels.conftest import native
from tests.kernels.steps import Seen, every_op, host_batch, inherited

HALF, WARN = torch.float16, "native kernels: {} runs in PyTorch: {}"


def test_every_op_of_the_native_library_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes from the reference, which is no computation, that LayerNorm is a step of rows, and the order of
    latents' products; that some heads of a layer keep latents by single ops, and what several devices add."""
    seen, ops = Seen(monkeypatch, Reference), native("", 1)
    every_op(ops, host_batch(3, 2, 40), fp8=False)
    assert ops.fallbacks() == () and seen.names <= {
        "empty_cache", "layer_norm", "attend_latent", "keep_latents", "add_parts"
    }  # fmt: skip


def test_what_the_library_leaves_to_pytorch_is_a_choice() -> None:
    """A backend that lost a method of its own would compare the truth with itself in every test."""
    kind = type(native("", 1)._backend)
    assert inherited(kind) == {
        "layer_norm", "attend_latent", "keep_latents", "add_parts", "near_rows", "pack_linear_fp8"
    }  # fmt: skip


def test_float16_falls_back_op_by_op(falling: Ops, truth: Ops, caplog: pytest.LogCaptureFixture) -> None:
    weight, x = torch.randn(40, 32).to(HALF), torch.randn(3, 32).to(HALF)
    with caplog.at_level(logging.WARNING, "afserve.kernels"):
        packed = falling.pack_linear(weight)
        assert falling.fallbacks() == (
            Fallback("linear", "torch.float16 weights"),
        )  # known before the first row
        for _ in range(2):
            assert torch.equal(falling.linear(x, packed), truth.linear(x, truth.pack_linear(weight)))
            assert torch.equal(falling.rms_norm(x, weight[0], 1e-6), truth.rms_norm(x, weight[0], 1e-6))
        falling.rms_norm(x.double(), weight[0].double(), 1e-6)
    assert [(f.op, f.reason) for f in falling.fallbacks()] == [
        ("linear", "torch.float16 weights"),
        ("rms_norm", "tensors of torch.float16"),
        ("rms_norm", "tensors of torch.float64"),
    ]
    assert caplog.messages == [
        WARN.format("linear", "torch.float16 weights"),
        WARN.format("rms_norm", "tensors of torch.float16"),
    ]


def test_every_op_in_float16_is_told(falling: Ops) -> None:
    every_op(falling, host_batch(3, 2, 40), fp8=False, dtype=HALF)
    assert {fallback.op for fallback in falling.fallbacks()} == {
        "rms_norm", "add_sums", "add_rms_norm", "linear", "linear_heads", "mlp", "rope", "write_kv", "write_latent",
        "attend_gqa", "attend_mla", "choose_rows", "gqa_half", "mla_half", "route", "expert_ffn",
    }  # fmt: skip
