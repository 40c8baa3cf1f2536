"""The CUDA bench's cases at tiny sizes: each runs, and computes what its torch peer computes."""

import pytest
import torch

from afserve.kernels.triton_backend import TritonBackend
from bench.cuda_cases import candidate_tiles, expert_case, gqa_case, mla_case, small_cases
from bench.cuda_clock import Case, Limits


@pytest.fixture
def ops(device):
    return TritonBackend(device, multiprocessors=2)


def test_experts_and_their_peer(device):
    torch.manual_seed(0)
    case = expert_case(device, False, 3, 16, hidden=64, inner=32)
    out = case.run()
    assert torch.allclose(out[: 3 * 16].float(), case.peer().float(), atol=0.05)
    assert case.flops == 2 * 48 * 3 * 64 * 32


def test_fp8_experts_run(device, fp8):
    case = expert_case(device, True, 2, 1, hidden=256, inner=128)
    assert torch.isfinite(case.run()[0]).all() and case.peer is None and case.rate == "fp8"


@pytest.mark.parametrize(("queries", "context"), [(1, 20), (12, 12)])
def test_gqa_and_its_peer(ops, queries, context):
    torch.manual_seed(1)
    case = gqa_case(ops, 2, queries, context, heads=4, groups=2, size=16, block=8)
    peer = case.peer().transpose(1, 2).flatten(0, 1)
    assert torch.allclose(case.run().float(), peer.float(), atol=0.03)


def test_other_cases_run(ops, fp8):
    mla_case(ops, 2, 20, 3, rank=16, rope=8, block=8).run()
    for case in small_cases(ops, 2, hidden=64, experts=32):
        assert case.bytes > 0
        case.run()


def test_the_slower_limit_binds():
    limits = Limits(copy=100.0, bf16=1000.0, fp8=2000.0)
    assert limits.seconds(Case("op", "", lambda: None, bytes=500, flops=1000)) == 5.0
    assert limits.seconds(Case("op", "", lambda: None, bytes=50, flops=4000)) == 4.0
    assert limits.seconds(Case("op", "", lambda: None, bytes=50, flops=4000, rate="fp8")) == 2.0


def test_candidate_tiles_keep_scale_blocks_whole():
    assert all(t.gate_up.depth == t.gate_up.columns == 128 for t in candidate_tiles("fp8", 32))
    assert {t.rows for t in candidate_tiles("16-bit", 1)} == {16, 64}
