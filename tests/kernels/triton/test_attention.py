"""Paged attention, GQA and absorbed MLA, against float64 softmax over each sequence's own keys."""

from dataclasses import replace

import pytest
import torch

from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.attention import attend_gqa
from afserve.kernels.triton.config import AttentionTile
from afserve.kernels.triton.mla import attend_mla
from afserve.kernels.triton.split import parts_for

pytestmark = pytest.mark.by_day(1)

TILE = AttentionTile(16, 16, 16, 4, 1)
SHAPES = {  # (queries, context) of each sequence
    "decode": [(1, 1), (1, 17), (1, 70), (1, 32)],
    "chunks": [(3, 3), (9, 25), (2, 40)],
    "mixed": [(1, 9), (9, 9), (1, 50), (1, 1)],
    "one token": [(1, 1)],
    "nothing": [],
}
BLOCK = 8


def paged(shape, device, spare=3, block=BLOCK):
    """A batch over shuffled blocks, and the block ids of each sequence. Table entries past a context are invalid."""
    needed = [-(-context // block) for _, context in shape]
    ids = torch.randperm(sum(needed) + spare).int().split([*needed, spare])
    table = torch.full((len(shape), max(needed, default=0) + 1), 1 << 20, dtype=torch.int32)
    for s, blocks in enumerate(ids[:-1]):
        table[s, : len(blocks)] = blocks
    queries = torch.tensor([0] + [q for q, _ in shape], dtype=torch.int32)
    spans = [range(context - q, context) for q, context in shape]
    position = torch.tensor([p for span in spans for p in span], dtype=torch.int64)
    slots = [int(table[s, p // block]) * block + p % block for s, span in enumerate(spans) for p in span]
    batch = PagedBatch(
        position.to(device),
        torch.tensor(slots, dtype=torch.int64).to(device),
        queries.cumsum(0).int().to(device),
        torch.tensor([context for _, context in shape], dtype=torch.int32).to(device),
        table.to(device),
        max((q for q, _ in shape), default=0),
        max((context for _, context in shape), default=0),
    )
    return batch, [blocks.long() for blocks in ids[:-1]], sum(needed) + spare


def softmax_truth(q_QAD, k_CAD, v_CAD, scale, window, sink_A):
    queries, context = q_QAD.shape[0], k_CAD.shape[0]
    scores = torch.einsum("qad,cad->aqc", q_QAD.double(), k_CAD.double()) * scale
    query, key = torch.arange(context - queries, context)[:, None], torch.arange(context)[None]
    seen = (key <= query) & (key > query - (window or context + 1))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink_A is not None:
        scores = torch.cat((scores, sink_A.double()[:, None, None].expand(-1, queries, 1)), -1)
    return torch.einsum("aqc,cad->qad", scores.softmax(-1)[..., :context], v_CAD.double())


def gqa_truth(q, k, v, shape, blocks, scale, window=None, sink=None):
    out, start = [], 0
    repeat = q.shape[1] // k.shape[1]
    for (queries, context), ids in zip(shape, blocks, strict=True):
        keys, values = (
            x[ids].transpose(1, 2).flatten(0, 1)[:context].repeat_interleave(repeat, 1) for x in (k, v)
        )
        out.append(softmax_truth(q[start : start + queries], keys, values, scale, window, sink))
        start += queries
    return torch.cat(out) if out else torch.zeros(0, q.shape[1], v.shape[3], dtype=torch.float64)


def dirty(*shape, dtype):
    """A cache whose unused places hold NaN."""
    return torch.full(shape, float("nan"), dtype=dtype)


def fill(cache, blocks, shape, axis):
    """Random rows in every place of a context, NaN elsewhere."""
    for (_, context), ids in zip(shape, blocks, strict=True):
        for p in range(context):
            block = cache.shape[axis]
            place = cache[ids[p // block]]
            row = place[:, p % block] if axis == 2 else place[p % block]
            row.copy_(torch.randn(row.shape))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "size", "v_size", "window", "sinks", "parts"),
    [
        (torch.bfloat16, 4, 2, 16, 16, None, False, 3),
        (torch.float16, 3, 1, 24, 20, None, True, 1),
        (torch.bfloat16, 6, 2, 16, 16, 11, True, 3),
        (torch.float32, 2, 2, 8, 8, 1, False, 1),
        (torch.float32, 2, 1, 16, 16, 300, False, 2),
    ],
)
def test_gqa(device, close, name, dtype, heads, groups, size, v_size, window, sinks, parts):
    torch.manual_seed(0)
    shape = SHAPES[name]
    batch, blocks, count = paged(shape, device)
    k, v = (dirty(count, groups, BLOCK, d, dtype=dtype) for d in (size, v_size))
    for cache in (k, v):
        fill(cache, blocks, shape, 2)
    q = torch.randn(batch.tokens, heads, size).to(dtype)
    sink = torch.randn(heads) if sinks else None
    moved = None if sink is None else sink.to(device)
    out = attend_gqa(q.to(device), k.to(device), v.to(device), batch, 0.3, window, moved, TILE, TILE, parts)
    close(out, gqa_truth(q, k, v, shape, blocks, 0.3, window, sink))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "heads", "rank", "rope", "parts"),
    [
        (torch.bfloat16, 18, 16, 16, 1),
        (torch.float16, 3, 40, 8, 3),
        (torch.float32, 1, 16, 4, 2),
        (torch.bfloat16, 66, 16, 16, 3),
    ],
)
@pytest.mark.parametrize("block", [BLOCK, 32], ids=["steps over blocks", "steps inside blocks"])
def test_mla(device, close, name, dtype, heads, rank, rope, parts, block):
    torch.manual_seed(1)
    shape = SHAPES[name]
    batch, blocks, count = paged(shape, device, block=block)
    cache = dirty(count, block, rank + rope, dtype=dtype)
    fill(cache, blocks, shape, 1)
    q = torch.randn(batch.tokens, heads, rank + rope).to(dtype)
    tile = TILE if heads < 64 else replace(TILE, queries=64)
    out = attend_mla(*q.to(device).split((rank, rope), 2), cache.to(device), batch, 0.2, tile, parts)
    heads_cache = cache[:, None]  # one key/value head that all query heads share
    close(out, gqa_truth(q, heads_cache, heads_cache[..., :rank], shape, blocks, 0.2))


def test_a_wide_q_needs_no_copy(device, close):
    shape = SHAPES["mixed"]
    batch, blocks, count = paged(shape, device)
    k, v = (dirty(count, 2, BLOCK, 16, dtype=torch.bfloat16) for _ in range(2))
    for cache in (k, v):
        fill(cache, blocks, shape, 2)
    wide = torch.randn(batch.tokens, 8 * 16).bfloat16()
    view = wide.to(device)[:, :64].view(-1, 4, 16)
    out = attend_gqa(view, k.to(device), v.to(device), batch, 0.25, None, None, TILE, TILE, 2)
    close(out, gqa_truth(wide[:, :64].view(-1, 4, 16), k, v, shape, blocks, 0.25))


def test_a_sequence_does_not_depend_on_the_batch(device):
    shape = [(1, 70), (1, 20), (1, 64)]
    batch, blocks, count = paged(shape, device)
    k, v = (dirty(count, 1, BLOCK, 16, dtype=torch.bfloat16) for _ in range(2))
    for cache in (k, v):
        fill(cache, blocks, shape, 2)
    q, k, v = torch.randn(3, 4, 16).bfloat16().to(device), k.to(device), v.to(device)
    together = attend_gqa(q, k, v, batch, 0.25, None, None, TILE, TILE, 3)
    for s in range(3):
        start = torch.tensor([0, 1], dtype=torch.int32, device=device)
        one = PagedBatch(
            batch.position_T[s : s + 1], batch.kv_slot_T[s : s + 1], start,
            batch.context_S[s : s + 1], batch.block_table_SB[s : s + 1], 1, 70,
        )  # fmt: skip
        alone = attend_gqa(q[s : s + 1], k, v, one, 0.25, None, None, TILE, TILE, 3)
        assert torch.equal(alone[0], together[s])


def test_parts_fill_the_chip_and_stay_long_enough():
    assert parts_for(programs=8, keys=8192, shortest=256, multiprocessors=132) == 32
    assert parts_for(programs=64, keys=8192, shortest=256, multiprocessors=132) == 5
    assert parts_for(programs=1024, keys=8192, shortest=256, multiprocessors=132) == 1
    assert parts_for(programs=0, keys=0, shortest=256, multiprocessors=132) == 1
