"""Kernels of another library: used where they gave the reference's answers, and never where they are wrong, fail or are
absent. The fakes have the signatures that `flashinfer/norm.py` and `flashinfer/decode.py` of 0.6 declare."""

import logging
import sys
import tomllib
from importlib import import_module
from types import ModuleType

import pytest
import torch

from afserve.config import EngineSettings
from afserve.config_texts import GPU_LIBRARIES
from afserve.errors import ConfigError
from afserve.kernels.libraries.library import Libraries
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.triton.backend import TritonBackend
from bench.origin import ROOT
from tests.kernels.triton.declared import expect_declared
from tests.kernels.triton.test_backend import batch_of, gqa_layer


class Fake:
    """What it was called with, and how it answers: right, or what `spoil` makes of that."""

    def __init__(self, device, spoil=lambda answer: answer):
        self.calls, self._spoil, self._right = [], spoil, Reference(device)

    def rmsnorm(self, input, weight, eps=1e-6, out=None, enable_pdl=None):
        self.calls.append("rmsnorm")
        return self._spoil(self._right.rms_norm(input, weight, eps))

    def fused_add_rmsnorm(self, input, residual, weight, eps=1e-6, enable_pdl=None):
        self.calls.append("fused_add_rmsnorm")
        summed = residual.clone()
        answer = self._spoil(self._right.add_rms_norm(summed, input, weight, eps))
        residual.copy_(summed)  # what raises has not been launched
        input.copy_(answer)

    def trtllm_batch_decode_with_kv_cache(
        self, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
        enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
    ):  # fmt: skip
        assert workspace_buffer.numel() >= 1 << 20 and kv_layout == "HND" and bmm2_scale == 1.0
        assert query.shape[0] == len(seq_lens) == len(block_tables) and int(max(seq_lens)) <= max_seq_len
        self.calls.append(f"decode of {len(seq_lens)}")
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
        batch = PagedBatch(seq_lens, seq_lens, starts, seq_lens, block_tables, 1, max_seq_len)
        window = None if window_left < 0 else window_left + 1
        seen = self._right.attend_gqa(query, *(x.float() for x in kv_cache), batch, bmm1_scale, window)
        return self._spoil(seen)


@pytest.fixture
def installed(monkeypatch, device):
    """installed(spoil): a package called flashinfer whose kernels answer so."""
    monkeypatch.setattr("afserve.kernels.devices.scratch.FLASHINFER", 1 << 20)

    def install(spoil=lambda answer: answer):
        fake = Fake(device, spoil)
        package, norm, decode = (
            ModuleType(n) for n in ("flashinfer", "flashinfer.norm", "flashinfer.decode")
        )
        package.__version__, package.__path__ = "0.6.0", []
        norm.rmsnorm, norm.fused_add_rmsnorm = fake.rmsnorm, fake.fused_add_rmsnorm
        decode.trtllm_batch_decode_with_kv_cache = fake.trtllm_batch_decode_with_kv_cache
        for module in (package, norm, decode):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return fake

    return install


def opened(device):
    return Libraries.open_named("flashinfer", device)


def backend_on(device):
    return TritonBackend(device, multiprocessors=2, libraries=opened(device))


def half_of(backend, device):
    """A decode step's half of one token, and what tests at load had called before."""
    ops = Ops(backend, device, 1)
    k, v = (torch.zeros(3, 2, 8, 16).bfloat16().to(device) for _ in "kv")
    bound = ops.bind_gqa(gqa_layer(ops, torch.bfloat16, device), k, v)
    called = list(fake_calls(backend)) if backend.libraries.opened else []
    torch.manual_seed(3)
    x = torch.randn(1, 32).bfloat16().to(device)
    half = ops.gqa_half(x, bound, batch_of(device, 1, 1, 8))
    return x, half.normed_TH, called


def fake_calls(backend):
    return backend.libraries.opened[0]._norm.rmsnorm.__self__.calls


def test_right_answers_are_used(installed, device, close, caplog):
    fake = installed()
    backend = backend_on(device)
    with caplog.at_level(logging.INFO, "afserve.kernels"):
        x, normed, called = half_of(backend, device)
    assert caplog.messages == [
        "flashinfer-python 0.6.0 computes rms_norm of rows of 32 in torch.bfloat16",
        "flashinfer-python 0.6.0 computes add_rms_norm of rows of 32 in torch.bfloat16",
        "flashinfer-python 0.6.0 computes attend_gqa of 4 over 2 heads of 16, blocks of 8, torch.bfloat16",
    ]
    assert called == ["rmsnorm", "fused_add_rmsnorm", "decode of 3"]  # tested at load
    assert fake.calls[3:] == ["rmsnorm", "decode of 1", "fused_add_rmsnorm"]
    own_x, own, _ = half_of(TritonBackend(device, multiprocessors=2), device)
    close(x, own_x.double(), steps=4.0)
    close(normed, own.double(), steps=8.0)
    assert backend.explain().endswith("flashinfer-python 0.6.0 computes add_rms_norm, attend_gqa, rms_norm")


def off_by_a_tenth(answer):
    return answer * 1.1


def hidden_nan(answer):
    return answer.nan_to_num(0.0)


def spread_nan(answer):
    return torch.full_like(answer, float("nan"))


def other_dtype(answer):
    return answer.float()


@pytest.mark.parametrize("spoil", [off_by_a_tenth, spread_nan])
def test_wrong_answers_are_refused(installed, device, caplog, spoil):
    fake = installed(spoil)
    backend = backend_on(device)
    with caplog.at_level(logging.WARNING, "afserve.kernels"):
        x, normed, called = half_of(backend, device)
    assert fake.calls == called, "serving called what its test refused"
    own = half_of(TritonBackend(device, multiprocessors=2), device)
    assert torch.equal(x, own[0]) and torch.equal(normed, own[1])
    refused = [m for m in caplog.messages if "is not used" in m]
    assert len(refused) == len({m.split(":")[1] for m in refused}) >= 2
    assert all(
        m.startswith("flashinfer-python 0.6.0: ") and m.endswith("own kernels compute it") for m in refused
    )
    assert "rms_norm of rows of 32" in backend.explain()


@pytest.mark.parametrize(
    ("spoil", "matter", "times"),
    [
        (hidden_nan, "numbers that are none are at other places", 2),
        (other_dtype, "rms_norm is torch.float32 (5, 32), not torch.bfloat16 (5, 32)", 1),
    ],
)
def test_what_is_wrong_is_said(installed, device, spoil, matter, times):
    """A row that is no number may not be hidden."""
    installed(spoil)
    library = opened(device)
    library.test_norms(32, torch.bfloat16)
    assert library.tell_libraries().count(matter) == times


def raises(answer):
    raise RuntimeError("no kernel image is available for execution on the device\nmore")


def test_what_raises_is_refused_with_its_words(installed, device):
    installed(raises)
    backend = backend_on(device)
    half_of(backend, device)
    assert "RuntimeError: no kernel image is available for execution on the device" in backend.explain()
    assert "computes nothing" in backend.explain() and "more" not in backend.explain()


def test_what_was_not_tested_is_not_used(installed, device):
    """Sizes that no layer has, prompts, and rows that lie apart."""
    fake = installed()
    backend = backend_on(device)
    half_of(backend, device)
    before = len(fake.calls)
    x, weight = torch.randn(2, 64).bfloat16().to(device), torch.ones(64).bfloat16().to(device)
    backend.rms_norm(x[:, :48], weight[:48], 1e-6)
    backend.rms_norm(x[:, :32], weight[:32], 1e-6)
    k = torch.zeros(3, 2, 8, 16).bfloat16().to(device)
    q = torch.zeros(3, 4, 16).bfloat16().to(device)
    backend.attend_gqa(q, k, k, batch_of(device, 3, 20, 8), 0.25, None)
    backend.attend_gqa(q[:1], k, k, batch_of(device, 1, 20, 8), 0.25, 5)
    assert len(fake.calls) == before


def test_an_answer_that_wrote_to_its_rows_is_refused(installed, device):
    fake = installed()
    right = fake._right.rms_norm

    def writes(x, weight, eps):
        answer = right(x, weight, eps)
        x.zero_()
        return answer

    fake._right.rms_norm = writes
    library = opened(device)
    library.test_norms(32, torch.bfloat16)
    assert "x was written to" in library.tell_libraries()


def test_what_is_not_installed_is_an_error_that_says_what_to_do(monkeypatch, device, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install 'afserve\[flashinfer\]', or leave it out") as refused:
        opened(device)
    assert refused.value.param == "gpu_kernels"
    for package in GPU_LIBRARIES.values():
        monkeypatch.setitem(sys.modules, package, None)
    with caplog.at_level(logging.INFO, "afserve.kernels"):
        assert Libraries.open_named("installed", device).opened == ()
    assert len(caplog.messages) == len(GPU_LIBRARIES)


def test_what_is_too_old_is_an_error_that_says_what_to_do(installed, monkeypatch, device):
    installed()
    monkeypatch.setattr(sys.modules["flashinfer"], "__version__", "0.5.3")
    with pytest.raises(ConfigError, match=r"is flashinfer-python 0.5.3 here, and 0.6 is the oldest"):
        opened(device)


def test_what_fails_while_serving_is_our_own_from_then_on(installed, device, caplog):
    fake = installed()
    backend = backend_on(device)
    half_of(backend, device)
    fake._spoil = raises
    with caplog.at_level(logging.WARNING, "afserve.kernels"):
        x, normed, _ = half_of(backend, device)
        before = len(fake.calls)
        half_of(backend, device)
    own = half_of(TritonBackend(device, multiprocessors=2), device)
    assert torch.equal(x, own[0]) and torch.equal(normed, own[1]) and len(fake.calls) == before
    assert ["while serving: RuntimeError: no kernel image" in m for m in caplog.messages] == [True] * 3
    assert "while serving" in backend.explain()


def test_every_library_has_an_adapter_and_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in GPU_LIBRARIES:
        adapter = import_module(f"afserve.kernels.libraries.{name.replace('-', '_')}").Adapter
        asked = [one for one in extras[name] if one.startswith(adapter.DISTRIBUTION)]
        assert asked and f">={adapter.OLDEST}" in asked[0]


def test_no_rows_are_own_kernels(installed, device):
    """A launch over a grid of nothing is an error of CUDA."""
    fake = installed()
    backend = backend_on(device)
    half_of(backend, device)
    before = len(fake.calls)
    none, weight = torch.zeros(0, 32).bfloat16().to(device), torch.ones(32).bfloat16().to(device)
    assert backend.rms_norm(none, weight, 1e-6).shape == (0, 32)
    assert backend.add_rms_norm(none, none.clone(), weight, 1e-6).shape == (0, 32)
    assert len(fake.calls) == before


def test_a_cpu_has_none():
    with pytest.raises(
        ConfigError, match="--gpu-kernels: flashinfer is for GPUs, and cpu is none"
    ) as refused:
        EngineSettings(gpu_kernels="flashinfer")
    assert refused.value.param == "gpu_kernels"
    assert EngineSettings(gpu_kernels="flashinfer", device="cuda").gpu_kernels == "flashinfer"
    with pytest.raises(
        ConfigError, match="--gpu-kernels: flashinfer is for GPUs, and cpu is none; leave it out"
    ):
        open_ops("cpu", 1, "flashinfer")
    with pytest.raises(ConfigError, match="--gpu-kernels: 'cutlass' is none of auto, installed, flashinfer"):
        EngineSettings(gpu_kernels="flashinfer,cutlass", device="cuda")


def test_own_kernels_are_the_default(installed, device):
    fake = installed()
    half_of(TritonBackend(device, multiprocessors=2), device)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("rmsnorm", "norm/__init__.py"),
        ("fused_add_rmsnorm", "norm/__init__.py"),
        ("trtllm_batch_decode_with_kv_cache", "decode.py"),
    ],
)
def test_the_fake_is_called_as_the_library_is(name, file):
    expect_declared(getattr(Fake, name), "flashinfer", file)
