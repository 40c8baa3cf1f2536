"""What a backend hands to PyTorch: recorded with a reason, told once, and nothing else."""

import logging
from dataclasses import replace

import pytest
import torch

from afserve.kernels.fallbacks import Fallback
from afserve.kernels.layer import PreparedGqa
from afserve.kernels.ops import Ops
from afserve.kernels.reference import Reference
from tests.kernels.conftest import native
from tests.kernels.steps import Seen, every_op, host_batch
from tests.kernels.test_native_layer import HEADS, HIDDEN, caches, decode_batch, layer

HALF, WARN = torch.float16, "native kernels: {} runs in PyTorch: {}"


def test_every_op_of_the_native_library_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only memory comes from the reference: that is no computation."""
    ops, seen = native("", 1), Seen(monkeypatch, Reference)
    every_op(ops, host_batch(3, 2, 40), fp8=False)
    assert ops.fallbacks() == () and seen.names <= {"empty_cache", "clear_blocks"}


def test_a_backend_is_not_a_reference(falling: Ops) -> None:
    assert not isinstance(falling._backend, Reference)


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
        "attend_gqa", "attend_mla", "gqa_half", "mla_half", "route", "expert_ffn",
    }  # fmt: skip


def with_sinks(ops: Ops, sink_A: torch.Tensor) -> PreparedGqa:
    return ops.prepare_gqa(replace(layer(ops, torch.float32, True, True).layer, sink_A=sink_A))


def test_attention_sinks_are_the_references(falling: Ops, truth: Ops) -> None:
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7))
    sink, batch, results = torch.linspace(-1, 2, HEADS), decode_batch([3, 40, 64]), []
    for ops in (falling, truth):
        stream = x.clone()
        bound = ops.bind_gqa(with_sinks(ops, sink), *caches(3, torch.float32))
        half = ops.gqa_half(stream, bound, batch)
        results.append((stream, half.normed_TH))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, atol=2e-5, rtol=1e-4)
    plain = x.clone()
    without = truth.bind_gqa(layer(truth, torch.float32, True, True), *caches(3, torch.float32))
    truth.gqa_half(plain, without, batch)
    assert not torch.allclose(plain, results[1][0], atol=1e-3)
    assert set(falling.fallbacks()) == {
        Fallback("gqa_half", "attention sinks"),
        Fallback("attend_gqa", "attention sinks"),
    }
    with pytest.raises(ValueError, match=r"sink_A: shape \(2,\), expected \(4,\)"):
        with_sinks(truth, sink[:2])
