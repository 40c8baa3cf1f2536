"""RMSNorm, its residual form and SwiGLU against float64."""

from types import SimpleNamespace

import pytest
import torch

from afserve.kernels.reference import Reference
from afserve.kernels.triton import backend
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.norm import add_rms_norm, rms_norm, silu_mul

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def truth(x, weight, eps=1e-6):
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (5, 40), (3, 2, 48), (2, 1, 2, 6), (2, 3000)])
def test_rms_norm(device, close, dtype, shape):
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(rms_norm(x.to(device), weight.to(device), 1e-6), truth(x, weight))


def test_rms_norm_of_heads_inside_wider_rows(device, close):
    wide = torch.randn(5, 3 * 16 + 8).bfloat16()
    heads, weight = wide[:, 8:].view(5, 3, 16), torch.randn(16).bfloat16()
    close(rms_norm(heads.to(device), weight.to(device), 1e-6), truth(heads, weight))
    wide = wide.to(device)
    close(rms_norm(wide[:, 8:].view(5, 3, 16), weight.to(device), 1e-6), truth(heads, weight))


def test_float32_weight_gives_float32(device):
    assert (
        rms_norm(torch.ones(2, 8).bfloat16().to(device), torch.ones(8).to(device), 1e-6).dtype
        is torch.float32
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 7), (5, 40)])
def test_add_rms_norm(device, close, dtype, shape):
    torch.manual_seed(1)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    total = x.clone().to(device)
    out = add_rms_norm(total, residual.to(device), weight.to(device), 1e-6)
    assert torch.equal(total.cpu(), (x.float() + residual.float()).to(dtype))  # in place
    close(out, truth(total.cpu(), weight))


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize(("devices", "shape"), [(2, (0, 8)), (2, (5, 74)), (4, (3, 2500)), (8, (1, 16))])
def test_parts_of_devices_are_added_as_by_the_reference(device, monkeypatch, devices, shape, reached):
    """In their order, and bit by bit; also where a device cannot read the others' memory, by copies."""
    asked, ops = [], TritonBackend(device, 2)
    monkeypatch.setattr(backend, "reaches", lambda *pair: asked.append(pair) or reached)
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(shape, generator=generator) * 10.0**at for at in range(devices)]
    there = [part.to(device) for part in parts]
    wanted = Reference.add_parts(SimpleNamespace(), parts)
    assert torch.equal(ops.add_parts(there).cpu(), wanted) and asked
    assert all(torch.equal(part.cpu(), own) for part, own in zip(there, parts, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 74)])
def test_silu_mul(device, close, dtype, shape):
    torch.manual_seed(2)
    x = (torch.randn(shape) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    close(silu_mul(x.to(device)), gate * gate.sigmoid() * up)
