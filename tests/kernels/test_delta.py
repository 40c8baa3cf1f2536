"""Rules that move states: whole segments against single tokens, and any cutting of a sequence against any other."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.kernels.cache import StateShape
from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.states.rules import LONGEST, Rule, segment, step
from tests.kernels.conftest import SETS, native

SHAPE = DeltaShape(key_heads=2, value_heads=4, key=12, value=20, taps=4)
BLOCK, BLOCKS = 8, 24
TRUTH = open_ops("cpu", 1, "torch")
EVERY = pytest.mark.parametrize("name", ["torch", *SETS])
RULES = pytest.mark.parametrize("rule", ["head", "channel", "sum"])


@functools.cache
def backend(name: str) -> Ops:
    """The reference, or an instruction set of the native library with two threads."""
    return TRUTH if name == "torch" else native(name, 2)


def rows_of(
    tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32, shape: DeltaShape = SHAPE
) -> DeltaRows:
    g = torch.Generator().manual_seed(seed)
    return DeltaRows(
        torch.randn(tokens, shape.channels, generator=g).to(dtype),
        -torch.rand(tokens, shape.decays, generator=g) * 0.2,
        torch.rand(tokens, shape.value_heads, generator=g),
    )


def layer_of(seed: int = 5, shape: DeltaShape = SHAPE) -> DeltaLayer:
    """That of a sum has all that a layer may have."""
    g = torch.Generator().manual_seed(seed)
    taps = torch.randn(shape.taps, shape.channels, generator=g)
    if shape.rule != "sum":
        return DeltaLayer(shape, taps)
    more = torch.randn(shape.channels, generator=g), torch.randn(shape.value_heads, generator=g)
    return DeltaLayer(shape, taps * 0.3, *more)


def shape_of(rule: Rule) -> DeltaShape:
    return replace(SHAPE, rule=rule)


def part(rows: DeltaRows, start: int, end: int) -> DeltaRows:
    return DeltaRows(rows.mixed_TC[start:end], rows.decay_TE[start:end], rows.beta_TV[start:end])


def joined(parts: list[DeltaRows]) -> DeltaRows:
    return DeltaRows(
        *(torch.cat(x) for x in zip(*((p.mixed_TC, p.decay_TE, p.beta_TV) for p in parts), strict=True))
    )


def batch_of(chunks: list[tuple[int, int, list[int]]]) -> PagedBatch:
    """(start, end, blocks) of each sequence."""
    counts = [end - start for start, end, _ in chunks]
    starts = [sum(counts[:n]) for n in range(len(counts) + 1)]
    width = max(len(blocks) for *_, blocks in chunks)
    table = torch.tensor(
        [[*blocks, *[0] * (width - len(blocks))] for *_, blocks in chunks], dtype=torch.int32
    )
    position = torch.cat([torch.arange(start, end) for start, end, _ in chunks])
    return PagedBatch(
        position, position, torch.tensor(starts).int(), torch.tensor([end for _, end, _ in chunks]).int(), table,
        max(counts), max(end for _, end, _ in chunks), tuple(starts), tuple(end for _, end, _ in chunks),
    )  # fmt: skip


def opened(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States of every block; what nobody wrote is no number."""
    cache = TRUTH.open_cache([StateShape(SHAPE.numbers)], BLOCKS, BLOCK, dtype).layers[0][0]
    return cache.fill_(float("nan"))


@RULES
@given(
    st.integers(1, LONGEST),
    st.integers(1, 3),
    st.integers(1, 17),
    st.integers(1, 17),
    st.floats(0.0, 30.0),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_segment_is_as_many_steps(rule, tokens, heads, key, value, decay, seed):
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(drawn(heads, tokens, key), dim=-1) for _ in "qk")
    v, state = drawn(heads, tokens, value), drawn(heads, key, value)
    decays = -drawn(heads, tokens, key if rule == "channel" else 1).abs() * decay
    beta = drawn(heads, tokens).sigmoid()
    out, left = segment(q, k, v, decays, beta, state, rule)
    for t in range(tokens):
        wanted, state = step(
            q[None, :, t],
            k[None, :, t],
            v[None, :, t],
            decays[None, :, t],
            beta[None, :, t],
            state[None],
            rule,
        )
        state = state[0]
        torch.testing.assert_close(out[:, t], wanted[0], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(left, state, atol=1e-9, rtol=1e-9)


@pytest.mark.by_day(1)
@EVERY
@pytest.mark.parametrize("taps", [2, 4])
def test_against_transformers(name, taps):
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
        g=rows.decay_TE[None], beta=rows.beta_TV[None], use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    ops = backend(name)
    cache = ops.open_cache([StateShape(shape.numbers)], 3, BLOCK, torch.float32).layers[0][0]
    first = ops.delta(part(rows, 0, tokens - 1), layer, cache, batch_of([(0, tokens - 1, [2, 0, 1])]))
    last = ops.delta(
        part(rows, tokens - 1, tokens), layer, cache, batch_of([(tokens - 1, tokens, [2, 0, 1])])
    )
    torch.testing.assert_close(torch.cat((first, last)), wanted[0], atol=2e-6, rtol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.slow
@RULES
@EVERY
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    block=st.sampled_from([1, 2, 3, 8, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=10, deadline=None)
def test_any_cutting_reads_and_leaves_the_same(name, rule, counts, block, dtype):
    """Chunks of any sizes against the reference's single tokens: every output, and the state of every block that is
    reached. A second sequence stands beside it in each batch. The native library gives the same bits for all."""
    ops, tokens = backend(name), min(sum(counts), 40)
    most = -(-40 // block)
    mine, other = list(range(1, 1 + most)), list(range(1 + most, 1 + 2 * most))
    of_rule = shape_of(rule)
    rows, layer = rows_of(tokens, dtype=dtype, shape=of_rule), layer_of(shape=of_rule)
    shape = StateShape(SHAPE.numbers)

    def opened():
        cache = ops.open_cache([shape], 2 + 2 * most, block, dtype).layers[0][0]
        return cache.fill_(float("nan"))

    def singly(ops):
        cache = opened()
        each = [(t, t + 1) for t in range(tokens)]
        outs = [ops.delta(part(rows, *at), layer, cache, batch_of([(*at, mine)])) for at in each]
        return torch.cat(outs), shape.of_blocks(cache)

    cut, outs, at = opened(), [], 0
    for count in counts:
        end = min(at + count, tokens)
        if end > at:
            here = part(rows, at, end)
            both = ops.delta(joined([here, here]), layer, cut, batch_of([(at, end, mine), (at, end, other)]))
            assert torch.equal(both[: end - at], both[end - at :])
            outs.append(both[: end - at])
        at = end
    states, reached = shape.of_blocks(cut), -(-tokens // block)
    wanted, alone = singly(TRUTH)
    torch.testing.assert_close(torch.cat(outs), wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states[mine[:reached]], alone[mine[:reached]], atol=1e-5, rtol=1e-4)
    assert torch.equal(states[other[:reached]], states[mine[:reached]])
    assert states[[0, -1, *mine[reached:], *other[reached:]]].isnan().all()
    if name != "torch":
        same, left = singly(ops)
        assert torch.equal(torch.cat(outs), same) and torch.equal(
            states[mine[:reached]], left[mine[:reached]]
        )


@pytest.mark.slow
@EVERY
def test_a_batch_of_everything(name):
    """Tokens that are decoded, at the beginning of a block and inside of one, prompts, and a prompt of one token."""
    ops, layer, cache, lengths = backend(name), layer_of(), opened(), [8, 13, 0, 0, 3]
    tables = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    rows = [rows_of(24, seed) for seed in range(5)]
    for n, length in enumerate(lengths):
        if length:
            ops.delta(part(rows[n], 0, length), layer, cache, batch_of([(0, length, tables[n])]))
    alone = cache.clone()
    spans = [(at, at + more) for at, more in zip(lengths, (1, 1, 11, 1, 9), strict=True)]
    chunks = [(start, end, tables[n]) for n, (start, end) in enumerate(spans)]
    parts = [part(rows[n], start, end) for n, (start, end) in enumerate(spans)]
    together = ops.delta(joined(parts), layer, cache, batch_of(chunks))
    one_by_one = [TRUTH.delta(p, layer, alone, batch_of([c])) for p, c in zip(parts, chunks, strict=True)]
    torch.testing.assert_close(together, torch.cat(one_by_one), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache, alone, atol=1e-5, rtol=1e-4, equal_nan=True)


@RULES
def test_heads_wider_than_a_task(rule):
    """More columns than 64, no multiple of it, with as many keys as no vector has."""
    shape, tokens = DeltaShape(1, 2, 7, 150, 3, rule), 30
    layer, rows = layer_of(3, shape), rows_of(tokens, 3, shape=shape)
    outs = []
    for ops in (TRUTH, native("", 2)):
        cache = ops.open_cache([StateShape(shape.numbers)], 5, BLOCK, torch.float32).layers[0][0]
        outs.append((ops.delta(rows, layer, cache, batch_of([(0, tokens, [4, 0, 3, 1])])), cache))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-4)


@EVERY
def test_a_row_that_is_not_finite_stays_with_its_sequence(name):
    ops, layer = backend(name), layer_of()
    rows, spoiled = rows_of(9), rows_of(9)
    spoiled.mixed_TC[4, 3] = float("nan")
    tables, caches = ([1, 2], [3, 4]), [opened(), opened()]
    outs = [
        ops.delta(joined([rows, other]), layer, cache, batch_of([(0, 9, tables[0]), (0, 9, tables[1])]))
        for other, cache in zip((rows, spoiled), caches, strict=True)
    ]
    assert torch.equal(outs[0][:9], outs[1][:9]) and outs[1][9 + 4 :].isnan().any()
    assert torch.equal(outs[0][9 : 9 + 4], outs[1][9 : 9 + 4]) or name == "torch"
    assert torch.equal(caches[0][tables[0]], caches[1][tables[0]])


def test_a_block_that_the_cache_has_not():
    ops = native("", 1)
    with pytest.raises(IndexError, match="block_table_SB: 24, the cache has 24 blocks"):
        ops.delta(rows_of(3), layer_of(), opened(), batch_of([(0, 3, [BLOCKS])]))


def test_what_does_not_fit_is_refused():
    layer, rows, batch = layer_of(), rows_of(3), batch_of([(0, 3, [1])])
    small = TRUTH.open_cache([StateShape(SHAPE.numbers // 2)], 2, BLOCK, torch.float32).layers[0][0]
    with pytest.raises(ValueError, match="cache_NBE: last dimension"):
        TRUTH.delta(rows, layer, small, batch)
    with pytest.raises(ValueError, match="mixed_TC: shape"):
        TRUTH.delta(part(rows, 0, 2), layer, opened(), batch)
