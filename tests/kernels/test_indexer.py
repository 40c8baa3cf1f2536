"""Which rows a token attends: against a plain search over all scores, alone and in a batch, ties and spoiled scores."""

import pytest
import torch

from afserve.kernels.indexer import chosen_batch
from afserve.kernels.ops import open_ops
from afserve.kernels.paged import PagedBatch

SIZE, HEADS, DIM = 8, 5, 12


def batch_of(sequences: list[tuple[int, int]], blocks: list[list[int]]) -> PagedBatch:
    """(new tokens, context) of each, over these blocks."""
    positions, slots, starts = [], [], [0]
    for (new, context), table in zip(sequences, blocks, strict=True):
        at = range(context - new, context)
        positions += at
        slots += [table[p // SIZE] * SIZE + p % SIZE for p in at]
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


@pytest.mark.parametrize("top", [1, 7, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_rows_are_chosen(seed: int, top: int) -> None:
    ops = open_ops("cpu", 1)
    sequences, blocks = [(5, 21), (1, 1), (9, 9), (1, 30)], [[4, 0, 7], [2], [1, 9], [3, 5, 6, 8]]
    batch = batch_of(sequences, blocks)
    q, weight, index = made(seed, batch.tokens, 10)
    slot = ops.choose_rows(q, weight, index, batch, top)
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


def test_of_equal_scores_the_earlier_position_is_chosen() -> None:
    ops, batch = open_ops("cpu", 1), batch_of([(1, 20)], [[0, 1, 2]])
    q, weight, index = torch.ones(1, HEADS, DIM), torch.ones(1, HEADS), -torch.ones(3, SIZE, DIM)
    assert ops.choose_rows(q, weight, index, batch, 3).tolist() == [[0, 1, 2]], "all scores are 0"
    index[1, 3] = index[2, 2] = index[2, 3] = 1.0
    assert ops.choose_rows(q, weight, index, batch, 2).tolist() == [[11, 18]]
    assert ops.choose_rows(q, weight, index, batch, 5).tolist() == [[0, 1, 11, 18, 19]]
    assert ops.choose_rows(q, -weight, index, batch, 17).tolist() == [[*range(11), *range(12, 18)]]


def test_a_score_that_is_no_number_is_seen() -> None:
    ops, batch = open_ops("cpu", 1), batch_of([(1, 20)], [[0, 1, 2]])
    q, weight, index = made(1, 1, 3)
    index[1, 5, 2] = float("nan")
    assert 13 in ops.choose_rows(q, weight, index, batch, 2)[0].tolist()
    assert len({*ops.choose_rows(q * float("nan"), weight, index, batch, 4)[0].tolist()}) == 4


def test_nobody_in_the_batch_changes_what_a_token_attends() -> None:
    ops, table = open_ops("cpu", 1), [[4, 0, 7], [2, 1, 9]]
    q, weight, index = made(5, 26, 10)
    both = ops.choose_rows(q, weight, index, batch_of([(13, 23), (13, 19)], table), 6)
    for token in range(13):
        for first, context, blocks in ((0, 11, table[0]), (13, 7, table[1])):
            alone = batch_of([(1, context + token)], [blocks])
            row = first + token
            one = ops.choose_rows(q[row : row + 1], weight[row : row + 1], index, alone, 6)
            assert torch.equal(one[0], both[row, : one.shape[1]])
