"""Paged attention of the native library against float64, at awkward contexts, and its invariance."""

import pytest
import torch
from torch import Tensor

from afserve.kernels import tiled
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch

pytestmark = pytest.mark.by_day(2)

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


def in_tiles(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same caches as tiles; here in torch, in the library by `put_token`."""
    keys = torch.empty(tiled.key_shape(*k.shape, k.dtype), dtype=k.dtype)
    values = torch.empty(tiled.value_shape(*v.shape, v.dtype), dtype=v.dtype)
    for cache, rows in ((keys, k), (values, v)):
        view = tiled.by_token(cache)
        view.copy_(rows.reshape(view.shape))
    return keys, values


def unseen_is_nan(cache: Tensor, batch: PagedBatch) -> None:
    """NaN wherever no context reaches in the blocks that are used."""
    for s, context in enumerate(batch.context_S.tolist()):
        block, offset = divmod(context, cache.shape[2])
        if offset:
            cache[batch.block_table_SB[s, block].long(), :, offset:] = float("nan")


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sink_A: Tensor | None = None,
) -> Tensor:
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
        score = score.masked_fill(hidden, float("-inf"))
        if sink_A is not None:
            score = torch.cat((score, sink_A.double()[:, None, None].expand(-1, score.shape[1], 1)), -1)
        weight = score.softmax(-1)[..., :context]
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
@pytest.mark.parametrize(
    ("heads", "groups", "size", "window", "block"),
    [
        (8, 2, 64, None, 16),
        (3, 3, 48, 50, 32),
        (4, 1, 80, 700, 16),
        (16, 2, 128, 7, 16),
        (2, 1, 272, None, 64),
        (12, 2, 64, 90, 32),
        (8, 1, 64, None, 16),
    ],
)
def test_tiles_are_close_to_float64(
    ops: Ops,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    heads: int,
    groups: int,
    size: int,
    window: int | None,
    block: int,
) -> None:
    """Nothing outside a context is ever in a result, were it NaN."""
    batch, blocks = paged(lengths, block)
    k = filled((blocks, groups, block, size), dtype, 1, batch.block_table_SB)
    v = filled((blocks, groups, block, size), dtype, 2, batch.block_table_SB)
    q = torch.randn(batch.tokens, heads, size, generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted = exact(q, k, v, batch, size**-0.5, window)
    unseen_is_nan(k, batch)
    unseen_is_nan(v, batch)
    out = ops.attend_gqa(q, *in_tiles(k, v), batch, size**-0.5, window)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize("step", [0.02, 0.5, -0.5])
def test_scores_may_rise_and_fall_along_a_context(
    ops: Ops, dtype: torch.dtype, heads: int, step: float
) -> None:
    """Sums are scaled anew whenever weights outgrow them, by a little or by more than a float holds."""
    batch, blocks = paged([(1, 700), (3, 90)], 16)
    k, v = torch.zeros(blocks, 2, 16, 64), torch.randn(blocks, 2, 16, 64)
    for s, context in enumerate(batch.context_S.tolist()):
        for p in range(context):
            k[batch.block_table_SB[s, p // 16], :, p % 16, 0] = p * step
    k, v = k.to(dtype), v.to(dtype)
    q = torch.zeros(batch.tokens, heads, 64, dtype=dtype)
    q[..., 0] = torch.arange(1, heads + 1)
    out = ops.attend_gqa(q, *in_tiles(k, v), batch, 1.0)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), exact(q, k, v, batch, 1.0, None), atol=tolerance, rtol=1e-2)


def test_a_cache_that_moved_is_read_where_it_is(ops: Ops) -> None:
    batch, blocks = paged([(1, 40)], 16)
    k, v = ops.empty_kv(blocks, 1, 16, (32, 32), torch.float32)
    q = torch.ones(1, 2, 32)
    assert not ops.attend_gqa(q, k, v, batch, 1.0).any()
    v.data = torch.ones_like(v)
    torch.testing.assert_close(ops.attend_gqa(q, k, v, batch, 1.0), torch.ones(1, 2, 32))


def test_a_scale_of_nothing_is_refused(ops: Ops) -> None:
    batch, blocks = paged([(1, 40)], 16)
    k, v = ops.empty_kv(blocks, 1, 16, (32, 32), torch.float32)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"scale: .* is not above 0"):
            ops.attend_gqa(torch.zeros(1, 2, 32), k, v, batch, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block", "size"), [(16, 64), (32, 80)])
def test_tiles_are_written_where_they_are_read(ops: Ops, dtype: torch.dtype, block: int, size: int) -> None:
    batch, blocks = paged([(5, 5), (1, 130), (16, 70)], block)
    keys, values = ops.empty_kv(blocks, 2, block, (size, size), dtype)
    assert (keys.dim(), values.dim()) == (tiled.KEYS, tiled.VALUES)
    k, v = torch.randn(2, batch.tokens, 2, size).to(dtype)
    ops.write_kv(k, v, keys, values, batch.kv_slot_T)
    rows = [torch.zeros(blocks, 2, block, size, dtype=dtype) for _ in "kv"]
    for cache, new in zip(rows, (k, v), strict=True):
        cache[batch.kv_slot_T // block, :, batch.kv_slot_T % block] = new
    assert torch.equal(tiled.as_rows(keys), rows[0])
    assert torch.equal(tiled.as_rows(values), rows[1])
    assert all(torch.equal(a, b) for a, b in zip(in_tiles(*rows), (keys, values), strict=True))


def test_a_cache_that_is_half_tiles_is_refused(ops: Ops) -> None:
    batch, blocks = paged([(1, 40)], 16)
    keys, values = ops.empty_kv(blocks, 1, 16, (32, 32), torch.float32)
    rows = torch.zeros(blocks, 1, 16, 32)
    for pair in ((keys, rows), (rows, values), (values, keys)):
        with pytest.raises(ValueError, match="in tiles"):
            ops.attend_gqa(torch.zeros(1, 2, 32), *pair, batch, 1.0)
    assert [cache.dim() for cache in ops.empty_kv(3, 1, 8, (32, 32), torch.float32)] == [tiled.ROWS] * 2


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
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("window", [None, 90])
def test_sinks_take_weight_and_give_no_value(
    ops: Ops, lengths: list[tuple[int, int]], dtype: torch.dtype, tiles: bool, window: int | None
) -> None:
    """Also those that take nearly all of it, or none."""
    batch, blocks = paged(lengths, 16)
    k = filled((blocks, 2, 16, 64), dtype, 1, batch.block_table_SB)
    v = filled((blocks, 2, 16, 64), dtype, 2, batch.block_table_SB)
    q = torch.randn(batch.tokens, 8, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    sink = torch.tensor([0.0, 1.5, -2.0, 6.0, -1e30, 1e30, float("-inf"), float("nan")])
    out = ops.attend_gqa(q, *(in_tiles(k, v) if tiles else (k, v)), batch, 0.125, window, sink)
    wanted = exact(q, k, v, batch, 0.125, window, sink)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("loud", [1, 40])
def test_a_token_gets_the_same_bits_in_a_prefill_alone_and_with_threads(
    pair: tuple[Ops, Ops], dtype: torch.dtype, window: int | None, tiles: bool, loud: int
) -> None:
    """Also where queries are so long that a row's highest score rises far again and again along its context."""
    one, many = pair
    batch, blocks = paged([(600, 600), (1, 30)], 16)
    k = filled((blocks, 2, 16, 64), dtype, 1, batch.block_table_SB)
    v = filled((blocks, 2, 16, 64), dtype, 2, batch.block_table_SB)
    k, v = in_tiles(k, v) if tiles else (k, v)
    q = (loud * torch.randn(601, 8, 64, generator=torch.Generator().manual_seed(3))).to(dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [False, True])
def test_many_splits_are_close_to_float64(ops: Ops, dtype: torch.dtype, tiles: bool) -> None:
    """18 splits of 512 keys, some of which weigh nothing beside others."""
    batch, blocks = paged([(2, 8800)], 16)
    k = filled((blocks, 1, 16, 32), dtype, 1, batch.block_table_SB)
    v = filled((blocks, 1, 16, 32), dtype, 2, batch.block_table_SB)
    q = (4 * torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(3))).to(dtype)
    wanted = exact(q, k, v, batch, 0.5, None)
    k, v = in_tiles(k, v) if tiles else (k, v)
    out = ops.attend_gqa(q, k, v, batch, 0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=1e-2)


def test_a_block_that_does_not_exist_is_refused(ops: Ops) -> None:
    batch, blocks = paged([(1, 40)], 16)
    batch.block_table_SB[0, 1] = blocks
    cache = torch.zeros(blocks, 1, 16, 32)
    with pytest.raises(IndexError, match="block_table_SB"):
        ops.attend_gqa(torch.zeros(1, 2, 32), cache, cache, batch, 1.0)
