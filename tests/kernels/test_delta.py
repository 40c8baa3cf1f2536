"""The gated delta rule: whole segments against single tokens, and any cutting of a sequence against any other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.kernels.cache import StateShape
from afserve.kernels.delta import LONGEST, DeltaLayer, DeltaRows, DeltaShape, segment, step
from afserve.kernels.ops import open_ops
from afserve.kernels.paged import PagedBatch

SHAPE = DeltaShape(key_heads=2, value_heads=4, key=12, value=20, taps=4)
BLOCK, BLOCKS = 8, 24
OPS = open_ops("cpu", 1, "torch")


def rows_of(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> DeltaRows:
    g = torch.Generator().manual_seed(seed)
    return DeltaRows(
        torch.randn(tokens, SHAPE.channels, generator=g).to(dtype),
        -torch.rand(tokens, SHAPE.value_heads, generator=g) * 0.2,
        torch.rand(tokens, SHAPE.value_heads, generator=g),
    )


def layer_of(seed: int = 5) -> DeltaLayer:
    g = torch.Generator().manual_seed(seed)
    return DeltaLayer(SHAPE, torch.randn(SHAPE.taps, SHAPE.channels, generator=g))


def part(rows: DeltaRows, start: int, end: int) -> DeltaRows:
    return DeltaRows(rows.mixed_TC[start:end], rows.decay_TV[start:end], rows.beta_TV[start:end])


def joined(parts: list[DeltaRows]) -> DeltaRows:
    return DeltaRows(*(torch.cat(x) for x in zip(*((p.mixed_TC, p.decay_TV, p.beta_TV) for p in parts), strict=True)))


def batch_of(chunks: list[tuple[int, int, list[int]]]) -> PagedBatch:
    """(start, end, blocks) of each sequence."""
    counts = [end - start for start, end, _ in chunks]
    starts = [sum(counts[:n]) for n in range(len(counts) + 1)]
    width = max(len(blocks) for *_, blocks in chunks)
    table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for *_, blocks in chunks], dtype=torch.int32)
    position = torch.cat([torch.arange(start, end) for start, end, _ in chunks])
    return PagedBatch(
        position, position, torch.tensor(starts).int(), torch.tensor([end for _, end, _ in chunks]).int(), table,
        max(counts), max(end for _, end, _ in chunks), tuple(starts), tuple(end for _, end, _ in chunks),
    )  # fmt: skip


def opened(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States of every block; what nobody wrote is no number."""
    cache = OPS.open_cache([StateShape(SHAPE.numbers)], BLOCKS, BLOCK, dtype).layers[0][0]
    return cache.fill_(float("nan"))


@given(
    st.integers(1, LONGEST), st.integers(1, 3), st.integers(1, 17), st.integers(1, 17), st.floats(0.0, 30.0),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_segment_is_as_many_steps(tokens, heads, key, value, decay, seed):
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(drawn(heads, tokens, key), dim=-1) for _ in "qk")
    v, state = drawn(heads, tokens, value), drawn(heads, key, value)
    decays, beta = -drawn(heads, tokens).abs() * decay, drawn(heads, tokens).sigmoid()
    out, left = segment(q, k, v, decays, beta, state)
    for t in range(tokens):
        wanted, state = step(
            q[None, :, t], k[None, :, t], v[None, :, t], decays[None, :, t], beta[None, :, t], state[None]
        )
        state = state[0]
        torch.testing.assert_close(out[:, t], wanted[0], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(left, state, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("taps", [2, 4])
def test_against_transformers(taps):
    """Convolution, lengths of heads and rule, as Qwen3-Next's own code does them from one prompt and a token."""
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        causal_conv1d_fn,
        torch_chunk_gated_delta_rule,
    )

    shape = DeltaShape(SHAPE.key_heads, SHAPE.value_heads, SHAPE.key, SHAPE.value, taps)
    layer, rows, tokens = DeltaLayer(shape, layer_of().conv_WC[:taps]), rows_of(21), 21
    mixed = causal_conv1d_fn(rows.mixed_TC.T[None], layer.conv_WC.T, activation="silu")[0].T
    q, k, v = mixed.split(shape.widths, 1)
    wanted, _ = torch_chunk_gated_delta_rule(
        q.view(1, tokens, -1, shape.key), k.view(1, tokens, -1, shape.key), v.view(1, tokens, -1, shape.value),
        g=rows.decay_TV[None], beta=rows.beta_TV[None], use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    cache = OPS.open_cache([StateShape(shape.numbers)], 3, BLOCK, torch.float32).layers[0][0]
    first = OPS.delta(part(rows, 0, tokens - 1), layer, cache, batch_of([(0, tokens - 1, [2, 0, 1])]))
    last = OPS.delta(part(rows, tokens - 1, tokens), layer, cache, batch_of([(tokens - 1, tokens, [2, 0, 1])]))
    torch.testing.assert_close(torch.cat((first, last)), wanted[0], atol=2e-6, rtol=1e-5)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40, deadline=None)
def test_any_cutting_reads_and_leaves_the_same(counts, dtype):
    """Chunks of any sizes against one token after the other: every output, and the state of every block that is
    reached. A second sequence stands beside it in each batch."""
    tokens = min(sum(counts), 8 * BLOCK)
    mine, other = list(range(3, 3 + 8)), list(range(12, 12 + 8))
    rows, layer = rows_of(tokens, dtype=dtype), layer_of()
    cut, single = opened(dtype), opened(dtype)
    outs, at = [], 0
    for count in counts:
        end = min(at + count, tokens)
        if end > at:
            here = part(rows, at, end)
            both = OPS.delta(joined([here, here]), layer, cut, batch_of([(at, end, mine), (at, end, other)]))
            torch.testing.assert_close(both[: end - at], both[end - at :], atol=0, rtol=0)
            outs.append(both[: end - at])
        at = end
    wanted = [
        OPS.delta(part(rows, t, t + 1), layer, single, batch_of([(t, t + 1, mine)])) for t in range(tokens)
    ]
    torch.testing.assert_close(torch.cat(outs), torch.cat(wanted), atol=1e-5, rtol=1e-4)
    shape, reached = StateShape(SHAPE.numbers), -(-tokens // BLOCK)
    states, alone = shape.of_blocks(cut), shape.of_blocks(single)
    torch.testing.assert_close(states[mine[:reached]], alone[mine[:reached]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states[other[:reached]], states[mine[:reached]], atol=0, rtol=0)
    untouched = [block for block in range(BLOCKS) if block not in (*mine[:reached], *other[:reached])]
    assert states[untouched].isnan().all()


def test_a_batch_of_everything():
    """Tokens that are decoded, at the beginning of a block and inside of one, prompts, and a prompt of one token."""
    layer, cache, lengths = layer_of(), opened(), [8, 13, 0, 0, 3]
    tables = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    rows = [rows_of(24, seed) for seed in range(5)]
    for n, length in enumerate(lengths):
        if length:
            OPS.delta(part(rows[n], 0, length), layer, cache, batch_of([(0, length, tables[n])]))
    alone = cache.clone()
    spans = [(at, at + more) for at, more in zip(lengths, (1, 1, 11, 1, 9), strict=True)]
    chunks = [(start, end, tables[n]) for n, (start, end) in enumerate(spans)]
    parts = [part(rows[n], start, end) for n, (start, end) in enumerate(spans)]
    together = OPS.delta(joined(parts), layer, cache, batch_of(chunks))
    one_by_one = [OPS.delta(p, layer, alone, batch_of([c])) for p, c in zip(parts, chunks, strict=True)]
    torch.testing.assert_close(together, torch.cat(one_by_one), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cache, alone, atol=1e-6, rtol=1e-5, equal_nan=True)


def test_what_does_not_fit_is_refused():
    layer, rows, batch = layer_of(), rows_of(3), batch_of([(0, 3, [1])])
    small = OPS.open_cache([StateShape(SHAPE.numbers // 2)], 2, BLOCK, torch.float32).layers[0][0]
    with pytest.raises(ValueError, match="cache_NBE: last dimension"):
        OPS.delta(rows, layer, small, batch)
    with pytest.raises(ValueError, match="mixed_TC: shape"):
        OPS.delta(part(rows, 0, 2), layer, opened(), batch)
