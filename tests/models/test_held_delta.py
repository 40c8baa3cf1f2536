"""Recurrent states of rows that are not confirmed yet: outputs and states have the bits of single tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.kernels.cache import StateShape
from afserve.kernels.paged import HeldStates
from afserve.models.states import over_states
from tests.kernels.test_delta import EVERY, backend, batch_of, joined, layer_of, opened, part, rows_of

SPAN = st.tuples(st.integers(1, 12), st.integers(0, 9), st.integers(0, 10))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY
@given(
    spans=st.lists(SPAN, min_size=1, max_size=5).filter(lambda spans: any(drafted for _, drafted, _ in spans))
)
@settings(max_examples=15, deadline=None)
def test_states_move_on_by_what_counts(name, dtype, spans):
    """Of each sequence so many tokens are there, one and so many drafts are computed, and so many of those count."""
    ops, layer = backend(name), layer_of()
    tables = [[4 * n + at for at in range(4)] for n in range(len(spans))]
    rows = [rows_of(24, seed, dtype) for seed in range(len(spans))]
    cache = opened(dtype)

    def singly(memory, n, first, end):
        ones = [(t, t + 1) for t in range(first, end)]
        return [ops.delta(part(rows[n], *one), layer, memory, batch_of([(*one, tables[n])])) for one in ones]

    for n, (there, _, _) in enumerate(spans):
        singly(cache, n, 0, there)
    before, alone = cache.clone(), cache.clone()
    outs = [torch.cat(singly(alone, n, there, there + 1 + more)) for n, (there, more, _) in enumerate(spans)]
    drafted = tuple(n for n, (_, more, _) in enumerate(spans) if more)
    held = HeldStates(drafted)
    batch = batch_of([(there, there + 1 + more, tables[n]) for n, (there, more, _) in enumerate(spans)])
    together = joined([part(rows[n], there, there + 1 + more) for n, (there, more, _) in enumerate(spans)])

    def computed(row_R, memory, part_of):
        return ops.delta(together if row_R is None else together.of(row_R), layer, memory, part_of)

    found = over_states(computed, StateShape(layer.shape.numbers), cache, replace(batch, held=held))
    assert torch.equal(found, torch.cat(outs))
    mine = [block for n in drafted for block in tables[n]]
    assert torch.equal(cache[mine].nan_to_num(), before[mine].nan_to_num()), "nothing moved yet"
    counts = [min(spans[n][2], spans[n][1] + 1) for n in drafted]
    held.move_on(counts)
    wanted = before
    for n, (there, more, _) in enumerate(spans):
        singly(wanted, n, there, there + (counts[drafted.index(n)] if more else 1))
    assert torch.equal(cache.nan_to_num(), wanted.nan_to_num())
