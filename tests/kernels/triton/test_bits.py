"""Experts in int4 groups and in int8 on the Triton backend, against float64 with the values that the codes have."""

import pytest
import torch

from afserve.kernels.grouped import Groups, int4_rounded, int8_rounded, int8_rows, whole_rows
from afserve.kernels.ops import Ops
from afserve.kernels.triton.backend import TritonBackend
from tests.kernels.conftest import on_their_own
from tests.kernels.triton.test_experts import ffn_truth, routing

KEPT = [None, Groups(32), Groups(64, wide=True), Groups(128)]


@pytest.fixture
def ops(device):
    made = Ops(TritonBackend(device, multiprocessors=2), device, 1)
    with on_their_own(made):
        yield made


def experts(ops, slots, hidden, inner, dtype, groups):
    torch.manual_seed(0)
    up = (torch.randn(slots, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(slots, hidden, inner) / inner**0.5).to(dtype)
    packed = ops.empty_experts(slots, hidden, inner, dtype, int8=groups is None, int4=groups)
    for slot in range(slots):
        ops.set_expert(packed, slot, up[slot].to(ops.device), down[slot].to(ops.device))
    rounded = int8_rounded if groups is None else lambda w: int4_rounded(w, groups.size)
    return packed, *(torch.stack([rounded(w) for w in weight]) for weight in (up, down))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("groups", KEPT)
@pytest.mark.parametrize(
    ("dtype", "hidden", "inner"),
    [(torch.bfloat16, 296, 96), (torch.float16, 40, 24), (torch.float32, 72, 40)],
)
def test_experts_compute_with_the_rounded_weights(device, ops, close, groups, dtype, hidden, inner):
    packed, up, down = experts(ops, 4, hidden, inner, dtype, groups)
    slot_RK = routing("mixed", slots=4, choices=2)
    x, weight = torch.randn(len(slot_RK), hidden).to(dtype), torch.rand(slot_RK.shape)
    out = torch.empty(x.shape, dtype=dtype, device=device)
    ops.expert_ffn(*(t.to(device) for t in (x, slot_RK, weight)), packed, out)
    close(out, ffn_truth(x, slot_RK, weight, up, down))


@pytest.mark.parametrize("groups", [None, Groups(32)])
def test_a_weight_that_is_not_finite_spoils_its_expert_only(device, ops, groups):
    packed, _, _ = experts(ops, 2, 64, 32, torch.bfloat16, groups)
    up, down = torch.randn(64, 64).bfloat16(), torch.randn(64, 32).bfloat16()
    up[5, 7] = torch.nan
    ops.set_expert(packed, 1, up.to(device), down.to(device))
    x, out = torch.randn(2, 64).bfloat16().to(device), torch.empty(2, 64, device=device)
    slot = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    ops.expert_ffn(x, slot, torch.ones(2, 1, device=device), packed, out)
    assert out.isfinite().all(1).tolist() == [True, False]


def test_int8_codes_are_those_that_the_cpu_keeps():
    weight = torch.randn(9, 70)
    assert torch.equal(int8_rows(weight, whole_rows(70)).dequantised(), int8_rounded(weight))
