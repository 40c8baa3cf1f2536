"""Paged attention of the native library against float64, at awkward contexts, and its invariance."""

import pytest
import torch
from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch

DTYPES = [torch.float32, torch.bfloat16]
# (new tokens, context) of each sequence: decodes, prefills, chunks in the middle, over the 512-key split.
BATCHES = [
    [(1, 1)],
    [(1, 64), (1, 65), (1, 17)],
    [(5, 5), (1, 130), (16, 70)],
    [(1, 511), (1, 512), (1, 513), (3, 514)],
    [(40, 1100)],
    [],
]


def paged(lengths: list[tuple[int, int]], block: int, seed: int = 0) -> tuple[PagedBatch, int]:
    g = torch.Generator().manual_seed(seed)
    counts = [-(-context // block) for _, context in lengths]
    total = sum(counts) + 3
    order = torch.randperm(total, generator=g).int()
    table = torch.full((len(lengths), max(counts, default=0) + 1), -7, dtype=torch.int32)
    position, slot, used = [], [], 0
    for s, (new, context) in enumerate(lengths):
        table[s, : counts[s]] = order[used : used + counts[s]]
        used += counts[s]
        for p in range(context - new, context):
            position.append(p)
            slot.append(int(table[s, p // block]) * block + p % block)
    starts = [0]
    for new, _ in lengths:
        starts.append(starts[-1] + new)
    batch = PagedBatch(
        torch.tensor(position, dtype=torch.int64),
        torch.tensor(slot, dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([c for _, c in lengths], dtype=torch.int32),
        table,
        max((n for n, _ in lengths), default=0),
        max((c for _, c in lengths), default=0),
    )
    return batch, total


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int, used: Tensor) -> Tensor:
    """A cache whose blocks are noise where the table points and NaN elsewhere."""
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    free = torch.ones(shape[0], dtype=torch.bool)
    free[used[used >= 0].long()] = False
    cache[free] = float("nan")
    return cache


def exact(q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, scale: float, window: int | None) -> Tensor:
    out = torch.empty((*q.shape[:2], v.shape[3]), dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    starts = batch.query_start_S1.tolist()
    for s, context in enumerate(batch.context_S.tolist()):
        blocks = batch.block_table_SB[s, : -(-context // k.shape[2])].long()
        keys = k[blocks].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(share, 0)
        values = v[blocks].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(share, 0)
        t = slice(starts[s], starts[s + 1])
        age = batch.position_T[t, None] - torch.arange(context)  # of every key, as each token sees it
        hidden = (age < 0) | (age >= (context if window is None else window))
        score = torch.einsum("tad,acd->atc", q[t].double(), keys) * scale
        weight = score.masked_fill(hidden, float("-inf")).softmax(-1)
        out[t] = torch.einsum("atc,acd->tad", weight, values)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize(
    ("heads", "groups", "size", "window"), [(8, 2, 64, None), (3, 3, 40, 50), (4, 1, 100, 700)]
)
def test_gqa_is_close_to_float64(
    ops: Ops,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    heads: int,
    groups: int,
    size: int,
    window: int | None,
) -> None:
    batch, blocks = paged(lengths, 16)
    k = filled((blocks, groups, 16, size), dtype, 1, batch.block_table_SB)
    v = filled((blocks, groups, 16, size), dtype, 2, batch.block_table_SB)
    q = torch.randn(batch.tokens, heads, size, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = ops.attend_gqa(q, k, v, batch, size**-0.5, window)
    wanted = exact(q, k, v, batch, size**-0.5, window)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(8, 64, 16), (70, 96, 8)])
def test_mla_is_close_to_float64(
    ops: Ops, lengths: list[tuple[int, int]], dtype: torch.dtype, heads: int, rank: int, rope: int
) -> None:
    batch, blocks = paged(lengths, 8)
    cache = filled((blocks, 8, rank + rope), dtype, 1, batch.block_table_SB)
    q = torch.randn(batch.tokens, heads, rank + rope, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = ops.attend_mla(q, cache, rank, batch, 0.1)
    keys = cache[:, None]
    wanted = exact(q, keys, keys[..., :rank], batch, 0.1, None)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_gets_the_same_bits_in_a_prefill_alone_and_with_threads(
    pair: tuple[Ops, Ops], dtype: torch.dtype, window: int | None
) -> None:
    one, many = pair
    batch, blocks = paged([(600, 600), (1, 30)], 16)
    k = filled((blocks, 2, 16, 64), dtype, 1, batch.block_table_SB)
    v = filled((blocks, 2, 16, 64), dtype, 2, batch.block_table_SB)
    q = torch.randn(601, 8, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    whole = many.attend_gqa(q, k, v, batch, 0.125, window)
    for p in (0, 1, 63, 64, 130, 511, 512, 599):
        alone = PagedBatch(
            batch.position_T[p : p + 1],
            batch.kv_slot_T[p : p + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([p + 1], dtype=torch.int32),
            batch.block_table_SB[:1],
            1,
            p + 1,
        )
        assert torch.equal(one.attend_gqa(q[p : p + 1], k, v, alone, 0.125, window), whole[p : p + 1])


def test_a_block_that_does_not_exist_is_refused(ops: Ops) -> None:
    batch, blocks = paged([(1, 40)], 16)
    batch.block_table_SB[0, 1] = blocks
    cache = torch.zeros(blocks, 1, 16, 32)
    with pytest.raises(IndexError, match="block_table_SB"):
        ops.attend_gqa(torch.zeros(1, 2, 32), cache, cache, batch, 1.0)
