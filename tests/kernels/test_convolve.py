"""A short convolution over states in a paged cache: torch's own, and any cutting of a sequence against any other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.kernels.cache import StateShape
from afserve.kernels.delta import convolve_rows
from afserve.kernels.paged import HeldStates
from afserve.models.states import over_states
from tests.kernels.test_delta import BLOCK, BLOCKS, TRUTH, batch_of

CHANNELS, LONG = 7, 4 * BLOCK
CUTS = st.lists(st.integers(1, LONG), min_size=1, max_size=6)


def opened(taps, dtype=torch.float32):
    """States of every block; what nobody wrote is no number."""
    states = StateShape((taps - 1) * CHANNELS)
    return states, TRUTH.open_cache([states], BLOCKS, BLOCK, dtype).layers[0][0].fill_(float("nan"))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def computed(x_TC, conv_WC, states):
    def rows(row_R, cache_NBE, batch):
        given = x_TC if row_R is None else x_TC[row_R]
        return convolve_rows(given, conv_WC, states.of_blocks(cache_NBE), cache_NBE.shape[1], batch)

    return rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(taps=st.integers(2, 6), cuts=CUTS, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_chunks_of_two_sequences_are_one_convolution(dtype, taps, cuts, seed):
    """One has a chunk of the other's length at each step, or a single token; a state is left behind every block."""
    x_2TC, conv_WC = drawn(2, LONG, CHANNELS, seed=seed).to(dtype), drawn(taps, CHANNELS, seed=seed + 1)
    padded = torch.nn.functional.pad(x_2TC.float().transpose(1, 2), (taps - 1, 0))
    wanted = torch.nn.functional.conv1d(padded, conv_WC.T[:, None], groups=CHANNELS).transpose(1, 2)
    states, cache = opened(taps, dtype)
    tables, at, outs = ([0, 1, 2, 3], [4, 5, 6, 7]), [0, 0], ([], [])
    while min(at) < LONG:
        sizes = (cuts[len(outs[0]) % len(cuts)], 1 if seed % 2 else cuts[-1])
        ends = [min(LONG, first + size) for first, size in zip(at, sizes, strict=True)]
        chunks = [(at[n], ends[n], tables[n]) for n in range(2) if ends[n] > at[n]]
        rows = torch.cat([x_2TC[n, at[n] : ends[n]] for n in range(2)])
        found = computed(rows, conv_WC, states)(None, cache, batch_of(chunks))
        for n, part in enumerate(found.split([ends[n] - at[n] for n in range(2)])):
            outs[n].append(part)
        at = ends
    for n in range(2):
        torch.testing.assert_close(torch.cat(outs[n]), wanted[n], atol=1e-5, rtol=1e-5)
        kept = states.of_blocks(cache)[tables[n]].view(4, taps - 1, CHANNELS)
        assert all(
            torch.equal(kept[b], x_2TC[n, (b + 1) * BLOCK - taps + 1 : (b + 1) * BLOCK].float())
            for b in range(4)
        )


@given(
    there=st.integers(1, 20), drafted=st.integers(1, 9), counted=st.integers(0, 10), seed=st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_a_held_state_moves_on_by_what_counts(there, drafted, counted, seed):
    """One of two sequences has drafts; its outputs are those of single tokens, to the bit."""
    counted, taps = min(counted, drafted + 1), 4
    x_TC, conv_WC = drawn(2 * LONG, CHANNELS, seed=seed), drawn(taps, CHANNELS, seed=7)
    states, cache = opened(taps)
    tables = ([0, 1, 2, 3], [4, 5, 6, 7])

    def run(memory, first, end, n):
        rows = x_TC[n * LONG + first : n * LONG + end]
        return computed(rows, conv_WC, states)(None, memory, batch_of([(first, end, tables[n])]))

    for n in range(2):
        run(cache, 0, there, n)
    alone, end = cache.clone(), there + 1 + drafted
    wanted = torch.cat(
        [run(alone, t, t + 1, 0) for t in range(there, end)] + [run(alone, there, there + 1, 1)]
    )
    held, before = HeldStates((0,)), cache.clone()
    batch = replace(batch_of([(there, end, tables[0]), (there, there + 1, tables[1])]), held=held)
    rows = torch.cat((x_TC[there:end], x_TC[LONG + there : LONG + there + 1]))
    assert torch.equal(over_states(computed(rows, conv_WC, states), states, cache, batch), wanted)
    assert torch.equal(cache[:4].nan_to_num(), before[:4].nan_to_num()), "nothing moved yet"
    held.move_on([counted])
    for t in range(there, there + counted):
        run(before, t, t + 1, 0)
    assert torch.equal(cache[:4].nan_to_num(), before[:4].nan_to_num())
