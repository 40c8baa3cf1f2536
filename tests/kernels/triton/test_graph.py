"""Nothing waits for the device: no op reads a value back, and on a GPU a captured step replays with other routing.

A step over meta tensors, which have shapes and no values, cannot read one: what runs there has grids and buffers that
follow from shapes alone.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from afserve.config import ModelSource
from afserve.engine.build import spec_of
from afserve.kernels.layer import GqaLayer
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.routing import RouterRule, Scoring
from afserve.kernels.triton_backend import TritonBackend
from afserve.kernels.triton_tiles import TileTable
from afserve.models.decoder import AttentionModel
from afserve.models.experts import ExpertBank
from afserve.models.registry import NAMINGS
from afserve.models.weights import DummyCheckpoint

READS_BACK = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "equal")


class NoReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in READS_BACK), f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))


class Step:
    """One small MoE layer over fixed buffers, as an engine would capture it."""

    def __init__(self, device, rows=3, hidden=32, inner=16, experts=4):
        torch.manual_seed(0)
        self.ops = TritonBackend(device, multiprocessors=2, tiles=TileTable(64 << 10))
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


META = torch.device("meta")
AT_LOAD = {  # called once, before anything is captured
    "pack_linear", "pack_experts", "pack_heads", "empty_experts", "set_expert", "set_expert_fp8", "prepare_gqa",
    "empty_cache", "empty_kv", "bind_cache", "explain",
}  # fmt: skip


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
    return seen


class Called(Ops):
    """Remembers which ops were called."""

    def __init__(self, backend, device):
        super().__init__(backend, device, 1)
        self.names = set()

    def __getattribute__(self, name):
        if not name.startswith("_") and name != "names":
            self.names.add(name)
        return super().__getattribute__(name)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


def meta_batch(sequences, queries, context, block=16):
    tokens = sequences * queries
    at = empty(tokens, dtype=torch.int64)
    starts, contexts, table = (
        empty(*s, dtype=torch.int32)
        for s in ((sequences + 1,), (sequences,), (sequences, -(-context // block)))
    )
    return PagedBatch(at, at, starts, contexts, table, queries, context)


def every_op(ops, queries, fp8):
    """All ops but those of loading, on three sequences."""
    batch, hidden, rule = meta_batch(3, queries, 200), 64, RouterRule(2, Scoring.SOFTMAX, renormalise=True)
    tokens = batch.tokens
    x, norm, angle = empty(tokens, hidden), empty(hidden), empty(256, 8, dtype=torch.float32)
    head = ops.pack_linear(empty(100, hidden))
    q, kv, latent = empty(tokens, 4, 16), empty(tokens, 2, 16), empty(40, 16, 24)
    caches = empty(40, 2, 16, 16), empty(40, 2, 16, 16)
    gate_up, down = ops.pack_linear(empty(96, hidden)), ops.pack_linear(empty(hidden, 48))
    layer = ops.prepare_gqa(
        GqaLayer(
            norm, ops.pack_linear(empty(128, hidden)), empty(16), empty(16), angle, angle,
            ops.pack_linear(empty(hidden, 64)), norm, empty(8, hidden), None, rule, 4, 2, 16, 1e-6, 0.25,
        )
    )  # fmt: skip
    experts = ops.empty_experts(8, hidden, 48, torch.bfloat16, fp8=fp8)
    ops.rms_norm(x, norm, 1e-6)
    ops.add_rms_norm(x, x, norm, 1e-6)
    ops.add_sums(x, x.float())
    ops.mlp(x, gate_up, down)
    ops.argmax(ops.logits(ops.linear(x, ops.pack_linear(empty(hidden, hidden))), head))
    ops.head_top_k(x, head, 5)
    ops.linear_heads(q, ops.pack_heads(empty(4, 20, 16)))
    ops.rope(q, angle, angle, batch.position_T, True)
    ops.write_kv(kv, kv, *caches, batch.kv_slot_T)
    ops.write_latent(empty(tokens, 24), latent, batch.kv_slot_T)
    ops.attend_gqa(q, *caches, batch, 0.25, window=32)
    ops.attend_mla(empty(tokens, 4, 24), latent, 16, batch, 0.2)
    half = ops.gqa_half(x, layer, *caches, batch)
    expert_TK, weight_TK = ops.route(half.normed_TH, empty(8, hidden), empty(8, dtype=torch.float32), rule)
    ops.expert_ffn(x, expert_TK, weight_TK, experts, x, add=True)
    _ = ops.holds_fp8, ops.backend_name, ops.device, ops.threads


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("queries", [1, 70])
def test_every_op_runs_without_a_value_to_read(launches, queries, fp8):
    ops = Called(TritonBackend(META, multiprocessors=132), META)
    every_op(ops, queries, fp8)
    public = {name for name in vars(Ops) if not name.startswith("_")}
    assert public - ops.names <= AT_LOAD, "an op that this test does not know"
    assert {"_gate_up", "_down", "_decode", "_attend_latent", "_choose", "_rms_norm"} <= {
        name for name, *_ in launches
    }
    assert all(isinstance(n, int) and n > 0 for _, grid, _ in launches for n in grid)


def test_float32_is_multiplied_as_float32(launches):
    """TensorFloat-32 has ten bits of mantissa: no product of float32 rows may take it."""
    ops, batch, kind = TritonBackend(META, 132), meta_batch(2, 3, 40), torch.float32
    x, caches = empty(6, 32, dtype=kind), [empty(8, 2, 16, 16, dtype=kind) for _ in "kv"]
    experts = ops.empty_experts(4, 32, 16, kind)
    ops.expert_ffn(x, empty(6, 2, dtype=torch.int32), empty(6, 2, dtype=kind), experts, x, False)
    ops.attend_gqa(empty(6, 4, 16, dtype=kind), *caches, batch, 0.2, None)
    ops.attend_mla(empty(6, 4, 24, dtype=kind), empty(8, 16, 24, dtype=kind), 16, batch, 0.2)
    said = {name: precision for name, _, precision in launches if precision is not None}
    assert said == dict.fromkeys(("_gate_up", "_down", "_decode", "_chunks", "_attend_latent"), "ieee")


def test_meta_tensors_catch_what_reads_a_value():
    """The reference's loop over slots does; so the tests above and below have teeth."""
    x, slot, weight = empty(2, 8), empty(2, 1, dtype=torch.int32), empty(2, 1)
    experts = Reference().empty_experts(2, 8, 4, torch.bfloat16)
    with pytest.raises((NotImplementedError, RuntimeError)):
        Reference().expert_ffn(x, slot, weight, experts, x, False)


class Decode:
    """A whole decode step over fixed buffers: embedding, every attention half, router, experts, head."""

    def __init__(self, folder, device, fp8):
        source, self.spec = DummyCheckpoint(device=device), spec_of(ModelSource(str(folder), "tiny"))
        if fp8:
            self.spec = replace(self.spec, fp8_block=(128, 128))
        ops, naming = Ops(TritonBackend(device, 132), device, 1), NAMINGS[self.spec.family]
        self.model = AttentionModel(self.spec, source, naming, ops, torch.bfloat16, 64)
        self.bank = ExpertBank(self.spec, self.spec.experts, ops, source, naming, torch.bfloat16)
        held = [(layer, e, e) for layer in range(self.spec.moe_layers) for e in range(self.spec.experts)]
        self.bank.load(held, lambda done: None)
        a, shape = self.spec.attention, (8, 8)
        if a.kind == "mla":
            self.caches = [(torch.zeros(*shape, a.kv_lora_rank + a.rope_dim, device=device).bfloat16(),)]
        else:
            self.caches = [
                tuple(torch.zeros(8, a.kv_heads, 8, a.head_dim, device=device).bfloat16() for _ in "kv")
            ]
        self.caches = [tuple(c.clone() for c in self.caches[0]) for _ in range(self.spec.layers)]
        self.token = torch.zeros(3, dtype=torch.int64, device=device)
        lengths = torch.tensor([9, 17, 1], device=device)
        table = torch.arange(9, device=device).view(3, 3) % 8
        at = lengths - 1
        self.batch = PagedBatch(
            at, table.gather(1, at[:, None] // 8)[:, 0] * 8 + at % 8, torch.arange(4, device=device).int(),
            lengths.int(), table.int(), 1, 24,
        )  # fmt: skip

    def __call__(self):
        x = self.model.embed(self.token)
        for layer, cache in zip(self.model.layers, self.caches, strict=True):
            half = layer.attend(x, cache, self.batch)
            local = layer.local_ffn(half.normed_TH)
            if local is not None:
                x += local
            if half.expert_TK is not None:
                routed = torch.empty(x.shape, device=x.device)
                self.bank.forward(layer.moe_number, half.normed_TH, half.expert_TK, half.weight_TK, routed)
                x += routed.to(x.dtype)
        return self.model.logits(x)


MODELS = [("v3", False), ("v3", True), ("v2-groups", False), ("qwen3", False), ("mixtral-window", False)]


@pytest.mark.parametrize(("name", "scaled"), MODELS)
def test_a_models_decode_step_runs_without_a_value_to_read(launches, tiny_checkpoint, name, scaled):
    step = Decode(tiny_checkpoint(name), META, scaled)
    first = len(launches)
    assert step().shape == (3, step.spec.vocab_size)
    once = launches[first:]
    step()
    assert launches[first + len(once) :] == once  # the same launches every time: what a captured graph holds


@pytest.mark.parametrize(("name", "scaled"), [MODELS[1], MODELS[3]])
def test_the_step_that_is_captured_depends_on_its_inputs(device, tiny_checkpoint, name, scaled):
    step = Decode(tiny_checkpoint(name), device, scaled)
    before = step()
    step.token.copy_(torch.tensor([5, 77, 130]))
    assert torch.isfinite(before).all() and not torch.equal(before, step())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize(("name", "scaled"), MODELS)
def test_a_captured_decode_step_follows_its_inputs(device, tiny_checkpoint, name, scaled):
    if scaled and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this chip has no FP8 conversions (8.9 or newer)")
    step = Decode(tiny_checkpoint(name), device, scaled)
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
