"""Which rows a token attends: against a plain search over all scores, alone and in a batch, ties and spoiled scores."""

from collections.abc import Iterator

import pytest
import torch

from afserve.kernels.indexer import as_rows, chosen_batch
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.paged import PagedBatch
from tests.kernels.conftest import SETS, native, on_their_own

pytestmark = pytest.mark.by_day(2)

SIZE, HEADS, DIM = 8, 5, 12


def batch_of(sequences: list[tuple[int, int]], blocks: list[list[int]], size: int = SIZE) -> PagedBatch:
    """(new tokens, context) of each, over these blocks."""
    positions, slots, starts = [], [], [0]
    for (new, context), table in zip(sequences, blocks, strict=True):
        at = range(context - new, context)
        positions += at
        slots += [table[p // size] * size + p % size for p in at]
        starts.append(starts[-1] + new)
    widest = max(map(len, blocks))
    table = torch.tensor([row + [0] * (widest - len(row)) for row in blocks], dtype=torch.int32)
    contexts = [context for _, context in sequences]
    return PagedBatch(
        torch.tensor(positions), torch.tensor(slots), torch.tensor(starts, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32), table, max(new for new, _ in sequences), max(contexts),
    )  # fmt: skip


def made(seed: int, tokens: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, weight = torch.randn(tokens, HEADS, DIM, generator=g), torch.randn(tokens, HEADS, generator=g)
    return q, weight, torch.randn(blocks, SIZE, DIM, generator=g)


def searched(
    q: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, slots: list[int], top: int
) -> list[int]:
    """One token's slots, in float64."""
    score = ((q.double() @ key.double().T).relu() * weight.double()[:, None]).sum(0).tolist()
    best = sorted(range(len(score)), key=lambda at: (-score[at], at))[:top]
    return [slots[at] for at in sorted(best)]


@pytest.fixture(params=[*SETS, "torch"])
def either(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """Of the native library every instruction set that runs here, or the reference."""
    made = open_ops("cpu", 1, "torch") if request.param == "torch" else native(request.param, 1)
    with on_their_own(made):
        yield made


@pytest.mark.parametrize("top", [1, 7, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_rows_are_chosen(either: Ops, seed: int, top: int) -> None:
    sequences, blocks = [(5, 21), (1, 1), (9, 9), (1, 30)], [[4, 0, 7], [2], [1, 9], [3, 5, 6, 8]]
    batch = batch_of(sequences, blocks)
    q, weight, index = made(seed, batch.tokens, 10)
    slot = either.choose_rows(q, weight, index, batch, top)
    rows = chosen_batch(batch, slot, top)
    token = 0
    for (new, context), table in zip(sequences, blocks, strict=True):
        slots = [table[p // SIZE] * SIZE + p % SIZE for p in range(context)]
        for position in range(context - new, context):
            seen = slots[: position + 1]
            wanted = searched(q[token], weight[token], index.flatten(0, 1)[seen], seen, top)
            assert slot[token, : len(wanted)].tolist() == wanted
            assert int(rows.context_S[token]) == len(wanted)
            token += 1


def test_of_equal_scores_the_earlier_position_is_chosen(either: Ops) -> None:
    ops, batch = either, batch_of([(1, 20)], [[0, 1, 2]])
    q, weight, index = torch.ones(1, HEADS, DIM), torch.ones(1, HEADS), -torch.ones(3, SIZE, DIM)
    assert ops.choose_rows(q, weight, index, batch, 3).tolist() == [[0, 1, 2]], "all scores are 0"
    index[1, 3] = index[2, 2] = index[2, 3] = 1.0
    assert ops.choose_rows(q, weight, index, batch, 2).tolist() == [[11, 18]]
    assert ops.choose_rows(q, weight, index, batch, 5).tolist() == [[0, 1, 11, 18, 19]]
    assert ops.choose_rows(q, -weight, index, batch, 17).tolist() == [[*range(11), *range(12, 18)]]


def test_a_score_that_is_no_number_is_seen(either: Ops) -> None:
    ops, batch = either, batch_of([(1, 20)], [[0, 1, 2]])
    q, weight, index = made(1, 1, 3)
    index[1, 5, 2] = float("nan")
    assert 13 in ops.choose_rows(q, weight, index, batch, 2)[0].tolist()
    assert len({*ops.choose_rows(q * float("nan"), weight, index, batch, 4)[0].tolist()}) == 4


def test_nobody_in_the_batch_changes_what_a_token_attends(either: Ops) -> None:
    ops, table = either, [[4, 0, 7], [2, 1, 9]]
    q, weight, index = made(5, 26, 10)
    both = ops.choose_rows(q, weight, index, batch_of([(13, 23), (13, 19)], table), 6)
    for token in range(13):
        for first, context, blocks in ((0, 11, table[0]), (13, 7, table[1])):
            alone = batch_of([(1, context + token)], [blocks])
            row = first + token
            one = ops.choose_rows(q[row : row + 1], weight[row : row + 1], index, alone, 6)
            assert torch.equal(one[0], both[row, : one.shape[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim", "top", "size"),
    [(3, 40, 100, 8), (64, 128, 50, 16), (20, 64, 9, 16), (160, 33, 1, 8), (5, 32, 1500, 32)],
)
def test_long_contexts_and_many_heads(
    pair: tuple[Ops, Ops], truth: Ops, dtype: torch.dtype, heads: int, dim: int, top: int, size: int
) -> None:
    """Over several spans of keys and tiles of tokens, on one thread and on three, and a token by itself. Sixteen keys
    of a block may be scored as they lie, and a sample may say where the best rows begin."""
    g = torch.Generator().manual_seed(heads)
    sequences = [(5, 2300), (1, 1025), (3, 64), (1, 7)]
    blocks, first = [], 0
    for _, context in sequences:
        blocks.append([*range(first, first := first - (-context // size))])
    batch = batch_of(sequences, blocks, size)
    q = torch.randn(batch.tokens, heads, dim, generator=g).to(dtype)
    weight = torch.randn(batch.tokens, heads, generator=g)
    index = torch.randn(first, size, dim, generator=g).to(dtype)
    found = [ops.choose_rows(q, weight, index, batch, top) for ops in (*pair, truth)]
    counts = chosen_batch(batch, found[0], top).context_S.tolist()
    assert torch.equal(found[0], found[1])
    for token, count in enumerate(counts):
        assert torch.equal(found[0][token, :count], found[2][token, :count])
    alone = batch_of([(1, 2298)], blocks[:1], size)
    one = pair[0].choose_rows(q[2:3], weight[2:3], index, alone, top)
    assert torch.equal(one[0], found[0][2])


@pytest.mark.parametrize("high", [range(0, 4096, 4), range(1, 4096, 4), range(0, 80, 4)])
def test_a_sample_may_mislead(ops: Ops, high: range) -> None:
    """Of 4,096 scores it sees each fourth: here all that are high, none, and too few for all that are wanted."""
    index, top = torch.zeros(256, 16, 32), 30
    index.view(4096, 32)[torch.tensor(high), 0] = 1.0
    batch = batch_of([(1, 4096)], [[*range(256)]], 16)
    slot = ops.choose_rows(torch.ones(1, 1, 32), torch.ones(1, 1), index, batch, top)
    low = [position for position in range(4096) if position not in high]
    assert slot[0].tolist() == sorted([*high, *low][:top])


def test_queries_may_lie_apart_and_blocks_have_to_be_there(ops: Ops) -> None:
    batch = batch_of([(2, 20)], [[0, 1, 2]])
    q, weight, index = made(3, 2, 3)
    wide = torch.zeros(2, HEADS, 2 * DIM)
    wide[:, :, ::2] = q
    apart = torch.zeros(2, HEADS + 1, DIM + 1)
    apart[:, 1:, 1:] = q
    plain = ops.choose_rows(q, weight, index, batch, 4)
    for laid in (wide[:, :, ::2], apart[:, 1:, 1:]):
        assert torch.equal(ops.choose_rows(laid, weight, index, batch, 4), plain)
    for top in (4, 30):
        with pytest.raises(IndexError, match=r"block_table_SB: a block id is not in 0 .. 2"):
            ops.choose_rows(q, weight, index, batch_of([(2, 20)], [[0, 1, 3]]), top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [3, 16, 20])
def test_attention_to_all_rows_has_the_bits_of_attention_without_a_choice(
    ops: Ops, dtype: torch.dtype, heads: int
) -> None:
    """So a step in which no token sees more than `top` may leave the choice out."""
    g, rank, rope = torch.Generator().manual_seed(heads), 64, 32
    sequences = [(40, 700), (1, 1100), (9, 9)]
    blocks, first = [], 0
    for _, context in sequences:
        blocks.append([*range(first, first := first - (-context // SIZE))])
    batch = batch_of(sequences, blocks)
    cache = torch.randn(first, SIZE, rank + rope, generator=g).to(dtype)
    q = torch.randn(batch.tokens, heads, rank + rope, generator=g).to(dtype)
    slot = ops.choose_rows(
        q[..., :DIM], torch.ones(len(q), heads), cache[..., :DIM].contiguous(), batch, 1100
    )
    chosen = chosen_batch(batch, slot, 1100)
    seen = ops.attend_mla(q, as_rows(cache), rank, chosen, 0.1)
    assert torch.equal(seen, ops.attend_mla(q, cache, rank, batch, 0.1))
