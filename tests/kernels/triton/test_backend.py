"""The whole backend through the door, with its own tile tables, against the reference in float64."""

from types import SimpleNamespace

import pytest
import torch
import triton

from afserve.errors import ConfigError
from afserve.kernels.cache import LayerShape
from afserve.kernels.layer import GqaLayer
from afserve.kernels.ops import Ops
from afserve.kernels.packed import ExpertShape
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.routing import RouterRule, Scoring
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.tiles import TileTable
from tests.kernels.conftest import on_their_own
from tests.kernels.packing import pack_experts

EXACT = Ops(Reference(), torch.device("cpu"), 1)


@pytest.fixture
def ops(device):
    made = Ops(TritonBackend(device, multiprocessors=2), device, 1)
    with on_their_own(made):
        yield made


def on(device, *tensors):
    return [t.to(device) for t in tensors]


def batch_of(device, queries, context, block):
    position = torch.arange(context - queries, context)
    blocks = -(-context // block)
    tensors = (
        position,
        position,
        torch.tensor([0, queries]).int(),
        torch.tensor([context]).int(),
        torch.arange(blocks)[None].int(),
    )
    return PagedBatch(*(t.to(device) for t in tensors), queries, context)


@pytest.mark.parametrize("queries", [1, 3])
def test_gqa_layer(device, ops, close, queries):
    torch.manual_seed(0)
    context, block = 20, 8
    q, k, v = (torch.randn(queries, n, 16).bfloat16() for n in (4, 2, 2))
    k_cache, v_cache = (torch.randn(3, 2, block, 16).bfloat16() for _ in range(2))
    batch, cpu_batch = (batch_of(d, queries, context, block) for d in (device, "cpu"))
    angle = torch.rand(32, 8)
    moved = on(device, q, k, v, k_cache, v_cache, angle.cos(), angle.sin())
    q_d, k_d, v_d, k_cache_d, v_cache_d, cos, sin = moved
    turned = [ops.rope(x, cos, sin, batch.position_T, False) for x in (q_d, k_d)]
    ops.write_kv(turned[1], v_d, k_cache_d, v_cache_d, batch.kv_slot_T)
    got = ops.attend_gqa(turned[0], k_cache_d, v_cache_d, batch, 0.25, window=9)
    q, k = (EXACT.rope(x, angle.cos(), angle.sin(), cpu_batch.position_T, False) for x in (q, k))
    EXACT.write_kv(k, v, k_cache, v_cache, cpu_batch.kv_slot_T)
    wide = (x.double() for x in (q, k_cache, v_cache))
    close(got, EXACT.attend_gqa(*wide, cpu_batch, 0.25, window=9), steps=8.0)


def gqa_layer(ops, dtype, device, sinks=False):
    """A layer of 4 query and 2 key/value heads of 16, hidden 32, with head norms and a router of 6 experts."""
    torch.manual_seed(5)

    def weight(*shape):
        return (torch.randn(shape) / shape[-1] ** 0.5).bfloat16().to(dtype).to(device)

    angle = torch.rand(32, 8).to(device)
    return ops.prepare_gqa(
        GqaLayer(
            1 + weight(32), ops.pack_linear(weight(128, 32)), 1 + weight(16), 1 + weight(16), angle.cos(), angle.sin(),
            ops.pack_linear(weight(32, 64)), 1 + weight(32), weight(6, 32), None,
            RouterRule(2, Scoring.SOFTMAX, renormalise=True), 4, 2, 16, 1e-6, 0.25,
            sink_A=torch.tensor([-1.0, 0.0, 1.0, 2.0], device=device) if sinks else None,
        )
    )  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_gqa_half(device, ops, close, queries, sinks):
    x, k_cache, v_cache = torch.randn(queries, 32), torch.randn(3, 2, 8, 16), torch.randn(3, 2, 8, 16)
    x, k_cache, v_cache = (t.bfloat16() for t in (x, k_cache, v_cache))
    wide = [t.double() for t in (x, k_cache, v_cache)]
    true_layer = EXACT.bind_gqa(gqa_layer(EXACT, torch.float64, "cpu", sinks), *wide[1:])
    exact = EXACT.gqa_half(wide[0], true_layer, batch_of("cpu", queries, 20, 8))
    moved = [t.clone().to(device) for t in (x, k_cache, v_cache)]
    layer = ops.bind_gqa(gqa_layer(ops, torch.bfloat16, device, sinks), *moved[1:])
    half = ops.gqa_half(moved[0], layer, batch_of(device, queries, 20, 8))
    close(moved[0], wide[0], steps=8.0)
    close(moved[1], wide[1], steps=8.0)
    close(half.normed_TH, exact.normed_TH, steps=12.0)
    assert half.expert_TK.shape == (queries, 2) and half.weight_TK.dtype is torch.float32


def test_blocks_have_the_bytes_that_they_have_elsewhere(device, ops):
    """What these kernels write can go on in the reference's cache, and back."""
    shapes, places = [LayerShape(2, 16, 16), LayerShape(1, 24)], [2, 0, 1]
    k, v, latent = (torch.randn(24, *size).bfloat16() for size in ((2, 16), (2, 16), (24,)))
    sent = []
    for each, at in ((ops, device), (EXACT, "cpu")):
        cache, slot = each.open_cache(shapes, 3, 8, torch.bfloat16), torch.arange(24).to(at)
        each.write_kv(k.to(at), v.to(at), *cache.layers[0], slot)
        each.write_latent(latent.to(at), *cache.layers[1], slot)
        sent.append(cache.read(places))
        other = EXACT.open_cache(shapes, 3, 8, torch.bfloat16)
        other.write(places, sent[-1])
        cache.write(range(3), other.read(range(3)))
        assert torch.equal(cache.read(places), sent[-1])
    assert sent[0].device.type == "cpu" and torch.equal(*sent)


@pytest.mark.parametrize("queries", [1, 2])
def test_mla_layer(device, ops, close, queries):
    torch.manual_seed(1)
    context, block, rank = 20, 8, 16
    q, cache = torch.randn(queries, 3, 20).bfloat16(), torch.randn(3, block, 20).bfloat16()
    latent = torch.randn(queries, 20).bfloat16()
    batch, cpu_batch = (batch_of(d, queries, context, block) for d in (device, "cpu"))
    q_d, latent_d, cache_d = on(device, q, latent, cache)
    ops.write_latent(latent_d, cache_d, batch.kv_slot_T)
    got = ops.attend_mla(q_d, cache_d, rank, batch, 0.2)
    EXACT.write_latent(latent, cache, cpu_batch.kv_slot_T)
    close(got, EXACT.attend_mla(q.double(), cache.double(), rank, cpu_batch, 0.2))


def test_ffn_layer(device, ops, close):
    torch.manual_seed(2)
    experts, hidden, inner, rows = 4, 32, 24, 5
    x, norm, gate = (
        torch.randn(rows, hidden).bfloat16(),
        torch.rand(hidden).bfloat16(),
        torch.randn(experts, hidden),
    )
    gate_up, down = torch.randn(experts, 2 * inner, hidden) / 6, torch.randn(experts, hidden, inner) / 5
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    x_d, norm_d, gate_d = on(device, x, norm, gate)
    packed = pack_experts(ops, *on(device, gate_up, down))
    normed = ops.rms_norm(x_d, norm_d, 1e-6)
    expert_TK, weight_TK = ops.route(normed, gate_d, None, RouterRule(2, Scoring.SOFTMAX, renormalise=True))
    out = torch.ones_like(x_d)
    ops.expert_ffn(normed, expert_TK, weight_TK, packed, out, add=True)
    exact = pack_experts(EXACT, gate_up.double(), down.double())
    truth = torch.ones(rows, hidden, dtype=torch.float64)
    chosen = expert_TK.cpu(), weight_TK.cpu().double()
    EXACT.expert_ffn(normed.cpu().double(), *chosen, exact, truth, add=True)
    close(out, truth)
    pair = ops.pack_linear(gate_up[0].to(device)), ops.pack_linear(down[0].to(device))
    gate_x, up_x = (normed.cpu().double() @ gate_up[0].double().t()).chunk(2, -1)
    close(ops.mlp(normed, *pair), (gate_x * gate_x.sigmoid() * up_x) @ down[0].double().t(), steps=8.0)


def test_fp8_slots(device, fp8):
    """Powers of two survive the packing exactly; what is left is the rounding of the rows and of the activation."""
    torch.manual_seed(3)
    backend = TritonBackend(device, multiprocessors=2)
    shapes = ((40, 32), (32, 20))
    gate_up, down = (0.5 ** torch.randint(1, 5, shape) * torch.randn(shape).sign() for shape in shapes)
    packed = backend.empty_experts_fp8(ExpertShape(2, 32, 20, torch.bfloat16))
    backend.set_expert(packed, 1, gate_up, down)
    x = torch.randn(3, 32).bfloat16().to(device)
    out = torch.empty_like(x)
    slot, weight = torch.ones(3, 1, dtype=torch.int32, device=device), torch.ones(3, 1, device=device)
    backend.expert_ffn(x, slot, weight, packed, out, False)
    gate, up = (x.cpu().double() @ gate_up.double().t()).chunk(2, -1)
    truth = (gate * gate.sigmoid() * up) @ down.double().t()
    assert (out.cpu().double() - truth).norm() <= 0.06 * truth.norm()


def test_float32_queries_over_a_bfloat16_cache(device, ops, close):
    q, cache = torch.randn(1, 2, 20), torch.randn(3, 8, 20).bfloat16()
    batch, cpu_batch = (batch_of(d, 1, 20, 8) for d in (device, "cpu"))
    got = ops.attend_mla(q.to(device), cache.to(device), 16, batch, 0.2)
    exact = EXACT.attend_mla(q.bfloat16().double(), cache.double(), 16, cpu_batch, 0.2)
    assert got.dtype is torch.float32
    close(got.bfloat16(), exact)


def test_fp8_needs_a_chip_that_has_it(device):
    with pytest.raises(ConfigError, match="FP8"):
        TritonBackend(device, 2, has_fp8=False).empty_experts_fp8(ExpertShape(1, 128, 128, torch.bfloat16))


@pytest.fixture
def chip(monkeypatch):
    """chip(major, minor): what torch and Triton say of a device that need not be here."""

    def pretend(major, minor):
        properties = SimpleNamespace(major=major, minor=minor, name="a chip", multi_processor_count=40)
        utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 99 << 10})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))

    return pretend


def test_an_old_chip_is_refused(chip):
    chip(7, 5)
    with pytest.raises(ConfigError, match=r"compute capability 7\.5.*8\.0"):
        TritonBackend.open(torch.device("cuda", 0))


def test_a_chip_is_asked_what_it_has(chip):
    chip(8, 6)
    backend = TritonBackend.open(torch.device("cuda", 1))
    assert backend.device == torch.device("cuda", 1) and "not measured" in backend.explain()
    assert backend.tiles.shared == 99 << 10 and not backend.holds_fp8(torch.bfloat16)


def test_no_rows(device, ops):
    packed = ops.empty_experts(2, 16, 16, torch.bfloat16)
    x = torch.empty(0, 16, dtype=torch.bfloat16, device=device)
    ops.expert_ffn(
        x, torch.empty(0, 2, dtype=torch.int32, device=device), torch.empty(0, 2, device=device), packed, x
    )
    assert ops.rms_norm(x, torch.ones(16, device=device).bfloat16(), 1e-6).shape == (0, 16)


def test_a_fixed_number_of_parts_is_used(device):
    assert TritonBackend(device, 132).context_parts(1, 8192, 256) == 32
    assert TritonBackend(device, 132, parts=4).context_parts(1000, 8192, 256) == 4


def test_choices_of_other_nodes_make_no_larger_tiles(device, ops, close, monkeypatch):
    """Rows come with all that they chose; a slot gets its share of those that are spread over the model's experts."""
    seen, look_up = [], TileTable().expert_tiles

    def looked_up(kind, rows):
        seen.append(rows)
        return look_up(kind, rows)

    monkeypatch.setattr(ops._backend, "_expert_tiles", looked_up)
    packed = ops.empty_experts(4, 32, 16, torch.bfloat16)
    for slot in range(4):
        gate_up, down = torch.randn(32, 32).bfloat16() / 6, torch.randn(32, 16).bfloat16() / 4
        ops.set_expert(packed, slot, gate_up, down)
    x = torch.randn(80, 32).bfloat16().to(device)
    slot_RK = torch.full((80, 2), -1, dtype=torch.int32)
    slot_RK[:, 0] = torch.arange(80) % 4
    weight_RK, sums = torch.rand(80, 2).to(device), []
    for packed.among in (0, 16):
        sums.append(torch.zeros(80, 32, device=device))
        ops.expert_ffn(x, slot_RK.to(device), weight_RK, packed, sums[-1])
    assert seen == [40, 10]
    close(sums[0].bfloat16(), sums[1].double())
