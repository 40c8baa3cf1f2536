"""Nothing waits for the device: no op reads a value back, and on a GPU a captured step replays with other routing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring
from afserve.kernels.triton_backend import TritonBackend

READS_BACK = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "equal")


class NoReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in READS_BACK), f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))


class Step:
    """One small MoE layer over fixed buffers, as an engine would capture it."""

    def __init__(self, device, rows=3, hidden=32, inner=16, experts=4):
        torch.manual_seed(0)
        self.ops = TritonBackend(device, multiprocessors=2, shared=64 << 10)
        self.packed = self.ops.empty_experts(experts, hidden, inner, torch.bfloat16)
        for slot in range(experts):
            self.ops.set_expert(
                self.packed, slot, torch.randn(2 * inner, hidden) / 6, torch.randn(hidden, inner) / 4
            )
        self.gate = torch.randn(experts, hidden, device=device)
        self.norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self.x = torch.randn(rows, hidden, device=device).bfloat16()
        self.cache = [torch.randn(4, 1, 8, 32, device=device).bfloat16() for _ in "kv"]
        at = torch.arange(rows, device=device)
        starts, contexts = (
            torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 1, rows], [9, 17])
        )
        table = torch.tensor([[0, 1, 1], [2, 3, 0]], dtype=torch.int32, device=device)
        self.batch = PagedBatch(at, at, starts, contexts, table, rows - 1, 24)

    def __call__(self):
        attended = self.ops.attend_gqa(self.x[:, None], *self.cache, self.batch, 0.2, None)[:, 0]
        normed = self.ops.add_rms_norm(attended.contiguous(), self.x, self.norm, 1e-6)
        rule = RouterRule(2, Scoring.SOFTMAX, renormalise=True)
        expert_TK, weight_TK = self.ops.route(normed, self.gate, None, rule)
        out = torch.empty_like(self.x)
        self.ops.expert_ffn(normed, expert_TK, weight_TK, self.packed, out, False)
        return out


def test_no_op_reads_a_value_back(device):
    step = Step(device)
    with NoReadBack():
        step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_a_captured_step_follows_its_inputs(device):
    step = Step(device)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        step.x.copy_(torch.randn(step.x.shape))
        step.batch.context_S.copy_(torch.tensor([seed + 1, 20 - seed]))
        graph.replay()
        assert torch.equal(captured, step())
