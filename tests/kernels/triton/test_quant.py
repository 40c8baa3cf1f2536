"""Quantisation to e4m3 against torch's own rounding, with scales from float64."""

import pytest
import torch

from afserve.kernels.triton.quant import quantise_blocks, quantise_groups

pytestmark = pytest.mark.usefixtures("fp8")


def expected(x, scale):
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (9, 70), (16, 5)])
def test_groups(device, dtype, shape):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 30).to(dtype)
    x[:1, :16] = 0  # a group of zeros has a scale and stays zero
    q, scale = quantise_groups(x.to(device), group=16)
    q, scale = q.cpu(), scale.cpu()
    assert scale.shape == (shape[0], -(-shape[1] // 16))
    for g in range(scale.shape[1]):
        part = x[:, 16 * g : 16 * g + 16]
        truth = part.double().abs().amax(1).clamp(min=1e-10) / 448
        assert torch.allclose(scale[:, g].double(), truth, rtol=1e-6)
        same = expected(part, scale[:, g, None]).float()
        assert torch.equal(q[:, 16 * g : 16 * g + 16].float(), same)


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (40, 70)])
def test_blocks(device, shape):
    torch.manual_seed(1)
    w = torch.randn(shape)
    q, scale = (t.cpu() for t in quantise_blocks(w.to(device), block=32))
    assert scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = w[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
            assert scale[i, j] == pytest.approx(part.abs().max().item() / 448, rel=1e-6)
            got = q[32 * i : 32 * i + 32, 32 * j : 32 * j + 32].float()
            assert torch.equal(got, expected(part, scale[i, j]).float())


def test_rows_with_a_stride(device):
    wide = torch.randn(6, 64).to(device)
    q, scale = quantise_groups(wide[:, :32], group=16)
    q2, scale2 = quantise_groups(wide[:, :32].contiguous(), group=16)
    assert torch.equal(q.float(), q2.float()) and torch.equal(scale, scale2)
