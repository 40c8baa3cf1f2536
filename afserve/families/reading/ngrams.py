"""N-gram embeddings (arXiv 2601.21204): which rows of a look-up table a token gets, from the ids of tokens alone.

Of head (n, j), n = 2 .. order, the row is (sum over k < n of id(t - k) V^k) mod M, with V the vocabulary's size and M
the rows of the head's table. Ids from before the text, or behind which an n-gram begins anew, count as 0. So whoever
knows the tokens knows the rows, and asks for them before a layer wants them. No torch.

Shapes: T tokens, N heads.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from afserve.config_json import ConfigFields
from afserve.spec_parts import TableSpec

Ids = NDArray[np.int64]
_NONE = -1


def ngram_table(fields: ConfigFields) -> TableSpec:
    """As LongCat-Flash-Lite's config.json says it."""
    vocab, hidden = fields.integer("vocab_size"), fields.integer("hidden_size")
    order, splits = fields.integer("emb_neighbor_num"), fields.integer("emb_split_num")
    width = hidden // (splits * (order - 1))
    if not width:
        raise fields.refuse("emb_split_num", f"has more heads than the {hidden} of hidden_size")
    base = int(fields.number("ngram_vocab_size_ratio") * vocab)
    return TableSpec(vocab, base, width, order, splits, fields.token_ids("eos_token_id", vocab))


def row_numbers(table: TableSpec, texts: Sequence[tuple[Sequence[int], int]]) -> Ids:
    """Numbers of rows, (T, N). Of each text the last `count` tokens are asked for; those before them, of which the last
    order - 1 count, are what came before in the same text."""
    before = table.order - 1
    ids: list[int] = []
    asked: list[int] = []
    for tokens, count in texts:
        known = tokens[max(0, len(tokens) - count - before) :]
        ids += [_NONE] * (before + count - len(known))
        asked += range(len(ids) + len(known) - count, len(ids) + len(known))
        ids += known
    id_I, asked_T = np.array(ids, np.int64), np.array(asked, np.int64)
    window_TO = np.zeros((len(asked), table.order), np.int64)
    window_TO[:, 0] = id_I[asked_T]
    inside_T = np.ones(len(asked), bool)
    for back in range(1, table.order):
        id_T = id_I[asked_T - back]
        inside_T &= (id_T != _NONE) & ~np.isin(id_T, table.ends)
        window_TO[:, back] = np.where(inside_T, id_T, 0)
    power_ON, rows_N, start_N = _constants(table)
    numbers_TN: Ids = window_TO @ power_ON % rows_N + start_N
    return numbers_TN


@lru_cache(maxsize=8)
def _constants(table: TableSpec) -> tuple[Ids, Ids, Ids]:
    """What ids are multiplied by, the rows of each head's table, and where it starts."""
    starts = table.starts
    rows = [after - start for start, after in pairwise(starts)]
    power_ON = np.zeros((table.order, table.heads), np.int64)
    for head, size in enumerate(rows):
        for back in range(2 + head // table.splits):
            power_ON[back, head] = pow(table.vocab, back, size)
    return power_ON, np.array(rows, np.int64), np.array(starts[:-1], np.int64)
