"""Prompts whose latents are multiplied up to keys and values of each head: as absorbed, and chosen by one count."""

from dataclasses import replace

import pytest
import torch

from afserve.kernels.devices import scratch
from afserve.kernels.latent import MlaLayer
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.triton import mla_prompts
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.config import AttentionTile
from afserve.kernels.triton.latent_prompts import LatentSizes, PromptPlans, plan, plannable
from afserve.kernels.triton.tiles import ALL, TileTable
from bench.cuda_cases import mla_prompt_case
from tests.kernels.triton.test_attention import dirty, fill, paged

V3 = LatentSizes(rank=512, nope=128, rope=64, value=128, queries=128)
TILE = AttentionTile(16, 16, 0, 4, 1)
TABLE = TileTable().replaced("mla prompt", ALL, TILE)


def test_what_multiplies_less_runs():
    assert not any(V3.go_up(1, context) for context in (1, 100, 10_000, 200_000))
    assert not any(V3.go_up(8, context) for context in (8, 4096, 100_000))  # a draft that is verified
    assert all(V3.go_up(256, context) for context in (256, 4096, scratch.LONGEST))
    assert V3.go_up(64, 64) and not V3.go_up(10, 10) and not V3.go_up(128, 100_000)
    assert not V3.go_up(2048, scratch.LONGEST + 1)


def test_the_count_is_of_products():
    """2 tokens that see 2 and 3 positions of 3: 5 x (2 x 4 + 1), and up-projections of 4 x (2 + 3) for each token."""
    tiny = LatentSizes(rank=4, nope=2, rope=1, value=3, queries=2)
    assert tiny.absorbed(2, 3) == 5 * 9 + 2 * 20
    assert tiny.multiplied_up(2, 3) == 5 * 6 + 3 * 20


def told(shape, device, block=8):
    batch, blocks, count = paged(shape, device, block=block)
    starts = [0]
    for queries, _ in shape:
        starts.append(starts[-1] + queries)
    batch = replace(batch, starts=tuple(starts), contexts=tuple(context for _, context in shape))
    return batch, blocks, count


def layer_of(ops, dtype, heads=3, rank=32, nope=16, rope=16, value=16):
    def weight(*shape):
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype).to(ops.device)

    up_k, up_v = weight(heads, rank, nope), weight(heads, value, rank)
    none = torch.zeros(1)
    linear = ops.pack_linear(torch.zeros(4, 4), None)
    return MlaLayer(
        none, linear, None, None, torch.zeros(rank), ops.pack_heads(up_k), ops.pack_heads(up_v), none, none, True,
        linear, none, None, None, None, None, heads, nope, rope, 1e-6, 1e-6, 0.2,
    )  # fmt: skip


def wide(layer, ops):
    up = [ops.pack_heads(packed.weight_AOI.double().cpu()) for packed in (layer.up_k, layer.up_v)]
    return replace(layer, up_k=up[0], up_v=up[1])


SHAPES = {  # (queries, context) of each sequence
    "one prompt": [(40, 40)],
    "behind a prefix": [(48, 66)],
    "with others": [(1, 9), (32, 32), (1, 50), (32, 44), (2, 30)],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "sizes", "together"),
    [
        (torch.bfloat16, {}, 1 << 16),
        (torch.bfloat16, {"heads": 5, "rank": 40, "nope": 20, "rope": 8, "value": 24}, 16),
        (torch.float32, {"rank": 64}, 1 << 16),
    ],
)
def test_the_same_as_absorbed(device, close, monkeypatch, name, dtype, sizes, together):
    """Also a head or a sequence at a time, with blocks that nobody holds full of NaN."""
    if together < 100:
        monkeypatch.setattr(scratch, "TOGETHER", together)
        monkeypatch.setattr(scratch, "PROMPTS", 1)
    calls = []
    attend = mla_prompts.attend_prompts
    monkeypatch.setattr(mla_prompts, "attend_prompts", lambda *a: calls.append(len(a[6])) or attend(*a))
    torch.manual_seed(4)
    ops, exact = TritonBackend(device, 2, TABLE), Reference()
    layer, shape = layer_of(ops, dtype, **sizes), SHAPES[name]
    batch, blocks, count = told(shape, device)
    cache = dirty(count, 8, layer.rank + layer.rope, dtype=dtype)
    fill(cache, blocks, shape, 1)
    q, turned = (torch.randn(batch.tokens, layer.heads, d).to(dtype) for d in (layer.nope, layer.rope))
    out = ops.attend_latent(q.to(device), turned.to(device), layer, cache.to(device), ops.bind_batch(batch))
    on_host, _, _ = told(shape, "cpu")
    on_host = replace(on_host, block_table_SB=batch.block_table_SB.cpu())
    truth = exact.attend_latent(q.double(), turned.double(), wide(layer, exact), cache.double(), on_host)
    close(out, truth, steps=8.0)
    assert calls, "nothing was multiplied up"
    if together < 100:
        assert len(calls) == layer.heads * (2 if name == "with others" else 1)


def test_rows_that_are_absorbed_keep_their_bits(device):
    """A decoding token has the bits that it has without a prompt beside it."""
    torch.manual_seed(5)
    shape = [(1, 30), (40, 40), (1, 7)]
    ops = TritonBackend(device, 2, TABLE, parts=1)
    layer = layer_of(ops, torch.bfloat16)
    batch, blocks, count = told(shape, device)
    cache = dirty(count, 8, layer.rank + layer.rope, dtype=torch.bfloat16)
    fill(cache, blocks, shape, 1)
    cache = cache.to(device)
    q, turned = (torch.randn(42, layer.heads, d).bfloat16().to(device) for d in (layer.nope, layer.rope))
    found = PromptPlans().of(batch, LatentSizes.of(layer, TILE.queries), 8)
    assert found.absorbed.row_R.tolist() == [0, 41] and [len(p.row_M) for p in found.prompts] == [40]
    together = ops.attend_latent(q, turned, layer, cache, batch)
    rows = torch.tensor([0, 41], device=device)
    table = batch.block_table_SB[[0, 2]]
    starts, contexts = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 1, 2], [30, 7]))
    alone = PagedBatch(batch.position_T[rows], batch.kv_slot_T[rows], starts, contexts, table, 1, 30)
    assert torch.equal(together[rows], ops.attend_latent(q[rows], turned[rows], layer, cache, alone))


def test_a_batch_whose_lengths_nobody_said_is_absorbed():
    batch, _, _ = told([(40, 40)], "cpu")
    assert plannable(batch)
    assert not plannable(replace(batch, starts=(), contexts=()))
    assert not plannable(replace(batch, singly=True)) and not plannable(told([(1, 9)], "cpu")[0])


def test_a_plan_is_made_once_for_all_layers_of_a_step(device):
    ops = TritonBackend(device, 2, TABLE)
    batch = ops.bind_batch(told([(40, 40), (1, 9)], device)[0])
    sizes = LatentSizes.of(layer_of(ops, torch.bfloat16), 16)
    assert batch.handle.of(batch, sizes, 8) is batch.handle.of(batch, sizes, 8)
    assert ops.bind_batch(told([(1, 9)], device)[0]).handle is None


def test_a_plan_waits_for_no_device(monkeypatch):
    """`torch.tensor` on a GPU copies from pages, and waits until all that was launched before is done."""
    batch, _, _ = told([(1, 9), (300, 1000), (2, 30)], "cpu")
    monkeypatch.setattr(torch, "tensor", None)
    found = plan(batch, V3, 8)
    assert found.absorbed.row_R.tolist() == [0, 301, 302]
    assert found.absorbed.batch.query_start_S1.tolist() == [0, 1, 3]
    assert found.absorbed.batch.context_S.tolist() == [9, 30]


def test_a_long_prompt_is_cut_into_tiles_the_longest_first():
    found = plan(told([(300, 1000)], "cpu")[0], V3, 8)
    assert found.absorbed is None
    (prompts,) = found.prompts
    assert prompts.tile_N4.tolist() == [[256, 44, 956, 0], [128, 128, 828, 0], [0, 128, 700, 0]]
    assert prompts.heads_together(V3, 2) == (256 << 20) // (1000 * 256 * 2)


def test_what_the_bench_times_is_a_whole_prompt(device):
    case = mla_prompt_case(TritonBackend(device, 2, TABLE), 40, 2, LatentSizes(64, 16, 16, 16, 0))
    assert case.flops == 2 * 2 * (40 * 41 // 2) * 48
    case.run()
    with pytest.raises(AssertionError, match="2 tokens are absorbed"):
        mla_prompt_case(TritonBackend(device, 2, TABLE), 2, 2, LatentSizes(64, 16, 16, 16, 0))
