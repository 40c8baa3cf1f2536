"""FP8 expert slots behind the door: what is refused, and the CPU oracle against float64 and against plain weights."""

import pytest
import torch

from afserve.errors import ConfigError
from afserve.kernels.formats.scaled import BlockScaled, quantised_blocks
from afserve.kernels.ops import Ops, open_ops
from tests.kernels.reference_fp8 import BlockReference, rounded_rows

ORACLE = Ops(BlockReference(), torch.device("cpu"), 1)
HIDDEN, INNER = 160, 136  # neither is whole blocks of 128


def expert(seed=0):
    torch.manual_seed(seed)
    gate, up = (torch.randn(INNER, HIDDEN) / HIDDEN**0.5 for _ in "gu")
    return gate, up, torch.randn(HIDDEN, INNER) / INNER**0.5


def rounded64(x):
    """float64 rows through e4m3, group by group."""
    parts = []
    for part in x.split(128, dim=1):
        scale = part.abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(parts, 1)


def test_rows_and_blocks_round_as_torch_does():
    torch.manual_seed(1)
    x = torch.randn(3, 200) * 30
    x[1, :128] = 0
    assert torch.allclose(rounded_rows(x).double(), rounded64(x.double()), rtol=1e-6)
    blocks = quantised_blocks(torch.randn(130, 257))
    assert blocks.shape == (130, 257) and blocks.scale.shape == (2, 3)
    for i, j in ((0, 0), (1, 2), (0, 1)):
        part = blocks.q_OI[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        assert part.float().abs().max() == 448
        whole = blocks.dequantised()[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        assert torch.equal(whole, part.float() * blocks.scale[i, j])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_oracle_against_float64(dtype):
    stored = [quantised_blocks(w) for w in expert()]
    gate, up, down = (b.dequantised().double() for b in stored)
    slots = ORACLE.empty_experts(3, HIDDEN, INNER, dtype, fp8=True)
    ORACLE.set_expert_fp8(slots, 1, *stored)
    x, weight = torch.randn(4, HIDDEN).to(dtype), torch.rand(4, 2)
    out = torch.ones(4, HIDDEN)
    ORACLE.expert_ffn(x, torch.tensor([[1, -1]]).expand(4, 2), weight, slots, out, add=True)
    rows = rounded64(x.double())
    left = rows @ gate.t()
    y = rounded64(left * left.sigmoid() * (rows @ up.t())) @ down.t()
    truth = 1 + weight[:, :1].double() * y
    near = (
        out.double() - truth
    ).abs() <= 0.02 * truth.abs().max()  # a value at a rounding edge may fall either way
    assert near.all()
    assert (out.double() - truth).norm() <= (2e-2 if dtype is torch.bfloat16 else 5e-3) * (truth - 1).norm()


def test_plain_weights_are_quantised_into_fp8_slots():
    gate, up, down = expert()
    one, two = (ORACLE.empty_experts(1, HIDDEN, INNER, torch.bfloat16, fp8=True) for _ in range(2))
    ORACLE.set_expert(one, 0, torch.cat((gate, up)), down)
    ORACLE.set_expert_fp8(two, 0, *(quantised_blocks(w) for w in (gate, up, down)))
    x, outs = torch.randn(2, HIDDEN).bfloat16(), []
    for slots in (one, two):
        outs.append(torch.empty_like(x))
        ORACLE.expert_ffn(x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), slots, outs[-1])
    assert torch.equal(*outs)


def test_elsewhere_blocks_are_dequantised():
    ops = open_ops("cpu", 1, "torch")
    assert not ops.holds_fp8(torch.bfloat16)
    with pytest.raises(ConfigError, match="keeps no FP8 weights"):
        ops.empty_experts(1, HIDDEN, INNER, torch.bfloat16, fp8=True)
    stored = [quantised_blocks(w) for w in expert()]
    slots = ops.empty_experts(1, HIDDEN, INNER, torch.float32)
    ops.set_expert_fp8(slots, 0, *stored)
    x, out = torch.randn(2, HIDDEN), torch.empty(2, HIDDEN)
    ops.expert_ffn(x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), slots, out)
    gate, up, down = (b.dequantised() for b in stored)
    left = x @ gate.t()
    assert torch.allclose(out, (left * left.sigmoid() * (x @ up.t())) @ down.t(), atol=1e-4)


def test_bad_blocks_are_named():
    gate, up, down = (quantised_blocks(w) for w in expert())
    slots = ORACLE.empty_experts(2, HIDDEN, INNER, torch.bfloat16, fp8=True)
    for blocks, message in (
        ((down, up, down), r"gate\.q_OI: shape \(160, 136\), expected \(136, 160\)"),
        ((gate, BlockScaled(up.q_OI, up.scale[:1]), down), r"up\.scale: shape \(1, 2\), expected \(2, 2\)"),
        ((gate, up, BlockScaled(down.q_OI.float(), down.scale)), r"down: torch\.float32 with"),
        ((gate, up, BlockScaled(down.q_OI, down.scale.half())), r"float16 scales, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            ORACLE.set_expert_fp8(slots, 0, *blocks)
    with pytest.raises(ValueError, match="slot: 2, there are 2"):
        ORACLE.set_expert_fp8(slots, 2, gate, up, down)
    with pytest.raises(ValueError, match="int8, fp8"):
        ORACLE.empty_experts(1, HIDDEN, INNER, torch.bfloat16, int8=True, fp8=True)
