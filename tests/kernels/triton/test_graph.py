"""Nothing waits for the device: no op reads a value back, and on a GPU a captured step replays with other routing.

A step over meta tensors, which have shapes and no values, cannot read one: what runs there has grids and buffers that
follow from shapes alone.
"""

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from afserve.kernels.ops import Ops
from afserve.kernels.packed import ExpertShape
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.routing import RouterRule, Scoring
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.launch import LaunchedKernel
from afserve.kernels.triton.tiles import TileTable
from tests.kernels.steps import (
    AT_LOAD,
    META,
    Called,
    Decode,
    NoReadBack,
    Seen,
    empty,
    every_op,
    inherited,
    meta_batch,
)


class Step:
    """One small MoE layer over fixed buffers, as an engine would capture it."""

    def __init__(self, device, rows=3, hidden=32, inner=16, experts=4):
        torch.manual_seed(0)
        self.ops = TritonBackend(device, multiprocessors=2, tiles=TileTable(64 << 10))
        self.packed = self.ops.empty_experts(ExpertShape(experts, hidden, inner, torch.bfloat16))
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


@pytest.fixture
def launches(monkeypatch):
    """(kernel, grid, precision of its products) of every launch, none of which runs."""
    seen = []

    def interpreted(self, *args, **options):
        seen.append((self.fn.__name__, self.grid, options.get("PRECISION")))

    def compiled(self, *args, grid, **options):
        seen.append((self.fn.__name__, grid, options.get("PRECISION")))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", interpreted)
    monkeypatch.setattr(JITFunction, "run", compiled)
    # nothing that was kept on a device is launched
    monkeypatch.setattr(LaunchedKernel, "__getitem__", JITFunction.__getitem__)
    return seen


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("queries", [1, 70])
def test_every_op_runs_without_a_value_to_read(launches, queries, fp8):
    ops = Called(TritonBackend(META, multiprocessors=132), META)
    every_op(ops, meta_batch(3, queries, 200), fp8=fp8)
    assert ops.left_out() <= AT_LOAD, "an op that this test does not know"
    assert {"_gate_up", "_down", "_decode", "_attend_latent", "_choose", "_rms_norm"} <= {
        name for name, *_ in launches
    }
    assert all(isinstance(n, int) and n > 0 for _, grid, _ in launches for n in grid)


def test_what_pytorch_does_is_a_choice(launches, monkeypatch):
    """Dense products, LayerNorm, the choice of tokens and the memory of caches and experts; all else is a kernel, or,
    as layers with states, a library's or the backend's to say. A latent half is single ops."""
    seen, ops = Seen(monkeypatch, Reference), Ops(TritonBackend(META, multiprocessors=132), META, 1)
    every_op(ops, meta_batch(3, 2, 200), fp8=False)
    assert ops.fallbacks() == ()
    assert seen.names == {
        "pack_linear", "pack_heads", "linear", "logits", "argmax", "layer_norm",
        "empty_cache", "empty_kv", "empty_experts",
        "bind_gqa", "bind_mla", "mla_half",
    }  # fmt: skip
    assert inherited(TritonBackend) == seen.names - {"empty_cache", "empty_experts", "bind_gqa", "linear"} | {
        "borrow_core", "expert_layers", "put_expert", "set_half", "stack_layers"
    }  # fmt: skip


def test_float32_is_multiplied_as_float32(launches):
    """TensorFloat-32 has ten bits of mantissa: no product of float32 rows may take it."""
    ops, batch, kind = TritonBackend(META, 132), meta_batch(2, 3, 40), torch.float32
    x, caches = empty(6, 32, dtype=kind), [empty(8, 2, 16, 16, dtype=kind) for _ in "kv"]
    experts = ops.empty_experts(ExpertShape(4, 32, 16, kind))
    ops.expert_ffn(x, empty(6, 2, dtype=torch.int32), empty(6, 2, dtype=kind), experts, x, False)
    ops.attend_gqa(empty(6, 4, 16, dtype=kind), *caches, batch, 0.2, None)
    ops.attend_mla(empty(6, 4, 24, dtype=kind), empty(8, 16, 24, dtype=kind), 16, batch, 0.2)
    said = {name: precision for name, _, precision in launches if precision is not None}
    assert said == dict.fromkeys(("_gate_up", "_down", "_decode", "_chunks", "_attend_latent"), "ieee")


MODELS = [("v3", False), ("v3", True), ("v2-groups", False), ("qwen3", False), ("mixtral-window", False)]


@pytest.mark.parametrize(("name", "scaled"), MODELS)
def test_a_models_decode_step_runs_without_a_value_to_read(launches, tiny_checkpoint, name, scaled):
    step = Decode(tiny_checkpoint(name), TritonBackend(META, 132), META, scaled)
    first = len(launches)
    assert step().shape == (3, step.spec.vocab_size)
    once = launches[first:]
    step()
    assert launches[first + len(once) :] == once  # the same launches every time: what a captured graph holds


@pytest.mark.parametrize(("name", "scaled"), [MODELS[1], MODELS[3]])
def test_the_step_that_is_captured_depends_on_its_inputs(device, tiny_checkpoint, name, scaled):
    step = Decode(tiny_checkpoint(name), TritonBackend(device, 132), device, scaled)
    before = step()
    step.token.copy_(torch.tensor([5, 77, 130]))
    assert torch.isfinite(before).all() and not torch.equal(before, step())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize(("name", "scaled"), MODELS)
def test_a_captured_decode_step_follows_its_inputs(device, tiny_checkpoint, name, scaled):
    if scaled and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this chip has no FP8 conversions (8.9 or newer)")
    step = Decode(tiny_checkpoint(name), TritonBackend(device, 132), device, scaled)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        step.token.copy_(torch.randint(200, (3,)))
        step.batch.context_S.copy_(torch.tensor([10 + seed, 18, 2 + seed]))
        graph.replay()
        assert torch.equal(captured, step())
