"""The choice of rows against a plain search in float64, in batches, of equal scores and of what is no number."""

from dataclasses import replace

import pytest
import torch

from afserve.kernels.triton import choice
from tests.kernels.test_indexer import batch_of, searched

BLOCKS = [[4, 0, 7], [1, 9], [3, 5]]


def chosen(q, weight, index, batch, top, device):
    names = ("position_T", "kv_slot_T", "query_start_S1", "context_S", "block_table_SB")
    there = replace(batch, **{name: getattr(batch, name).to(device) for name in names})
    return choice.choose_rows(*(x.to(device) for x in (q, weight, index)), there, top).cpu()


@pytest.mark.parametrize(
    ("heads", "dim", "top", "dtype"), [(5, 12, 7, torch.float32), (20, 40, 64, torch.bfloat16)]
)
def test_the_best_rows_are_chosen(device, monkeypatch, heads, dim, top, dtype):
    """Over several tiles of keys, steps of a search and groups of tokens; alone a token has the same ones."""
    for name, size in (("KEYS", 32), ("CHUNK", 16), ("SCORES", 50)):
        monkeypatch.setattr(choice, name, size)
    g, sequences = torch.Generator().manual_seed(top), [(2, 21), (1, 9), (1, 3)]
    batch = batch_of(sequences, BLOCKS)
    q, index = (torch.randn(n, m, dim, generator=g).to(dtype) for n, m in ((batch.tokens, heads), (10, 8)))
    weight = torch.randn(batch.tokens, heads, generator=g)
    slot, token = chosen(q, weight, index, batch, top, device), 0
    for (new, context), table in zip(sequences, BLOCKS, strict=True):
        slots = [table[p // 8] * 8 + p % 8 for p in range(context)]
        for position in range(context - new, context):
            seen = slots[: position + 1]
            wanted = searched(q[token], weight[token], index.flatten(0, 1)[seen], seen, top)
            assert slot[token, : len(wanted)].tolist() == wanted
            token += 1
    one = chosen(q[:1], weight[:1], index, batch_of([(1, 20)], BLOCKS[:1]), top, device)[0]
    assert one.tolist() == slot[0, : len(one)].tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes NaNs with numpy
def test_equal_scores_and_what_is_no_number(device):
    """The earlier position of equal scores, both zeros among them; NaN before all, infinity behind it."""
    batch, q, weight = batch_of([(1, 20)], [[0, 1, 2]]), torch.zeros(1, 1, 16), torch.ones(1, 1)
    q[0, 0, 0], index = 1.0, torch.zeros(3, 8, 16)
    scores = index.view(24, 16)[:, 0]
    assert chosen(q, weight, index, batch, 3, device).tolist() == [[0, 1, 2]]
    assert chosen(q, -weight, index, batch, 17, device).tolist() == [[*range(17)]]
    scores[[3, 9, 12, 15]] = torch.tensor([2.0, 2.0, 5.0, 2.0])
    assert chosen(q, weight, index, batch, 3, device).tolist() == [[3, 9, 12]]
    low = {*range(20)} - {9, 12, 15}  # sixteen of 0, and the first of those of -2
    assert chosen(q, -weight, index, batch, 17, device).tolist() == [sorted(low)]
    scores[17], scores[5] = torch.nan, torch.inf
    assert chosen(q, weight, index, batch, 1, device).tolist() == [[17]]
    assert chosen(q, weight, index, batch, 3, device).tolist() == [[5, 12, 17]]
