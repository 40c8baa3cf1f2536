"""Triton attention over a paged GQA cache: one query per sequence with split KV, and chunks of many queries.

A mixed batch takes both launches; each skips the other's sequences on the device. A key/value head's query heads are
the rows of one tile, so its cache is read once. Of a cache in 8 bits codes are multiplied, and scores and weights with
the scales of their rows. It knows nothing of rotary embedding or of how blocks are given out.
Shapes: T tokens, S sequences, A query heads, G key/value heads, D head size, N blocks, B block size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.formats.eight_bits import key_numbers
from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.config import FUSED, AttentionTile
from afserve.kernels.triton.eight import as_numbers, begins_at, scales_at, weighted_rows
from afserve.kernels.triton.launch import PreparedLaunch, launched, planned, power_of_two
from afserve.kernels.triton.split import LOG2E, LOWEST, join_parts, part_span, split_scratch

NO_WINDOW = 1 << 30
NO_TILE = tl.constexpr(1 << 30)  # start of a sequence that is not there


@triton.jit
def _attend_span(
    q, values, largest, total, position, begin, end, window, table_ptr, k_ptr, v_ptr, scale, size, v_size,
    k_block, k_offset, v_block, v_offset,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Add the keys of [begin, end) to a running softmax of rows at `position`; unmasked spans are seen by all rows."""
    d = tl.arange(0, SIZE)
    dv = tl.arange(0, V_SIZE)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < end
        block = tl.load(table_ptr + key // BLOCK, mask=exists, other=0).to(tl.int64)
        offset = key % BLOCK
        k_row = block * k_block + offset * k_offset
        if EIGHT:
            k_row = tl.multiple_of(k_row, [EIGHT])
        k_at = k_ptr + k_row[None, :] + d[:, None]
        v_at = v_ptr + (block * v_block + offset * v_offset)[:, None] + dv[None, :]
        k = tl.load(k_at, mask=exists[None, :] & (d < size)[:, None], other=0.0)
        if EIGHT:
            of_key, of_value = scales_at(k_ptr + k_row + size, exists)
            k = as_numbers(k, q.dtype)
            score = tl.dot(q, k, input_precision=PRECISION) * (of_key * scale)[None, :]
        else:
            score = tl.dot(q, k, input_precision=PRECISION) * scale
        if MASKED:
            seen = (
                exists[None, :]
                & (key[None, :] <= position[:, None])
                & (key[None, :] > position[:, None] - window)
            )
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        old = tl.exp2(largest - higher)
        v = tl.load(v_at, mask=exists[:, None] & (dv < v_size)[None, :], other=0.0)
        total = total * old + tl.sum(weight, axis=1)
        if EIGHT:
            weight, v = weighted_rows(weight, v, of_value, q.dtype)
        values = tl.dot(weight.to(v.dtype), v, values * old[:, None], input_precision=PRECISION)
        largest = higher
    return values, largest, total


@launched(do_not_specialize=["table_row", "parts"])
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, values_ptr, largest_ptr, sum_ptr, sink_ptr, query_start_ptr, context_ptr, table_ptr,
    scale, window, groups, repeat, size, v_size, q_token, q_head, table_row,
    k_block, k_group, k_offset, v_block, v_group, v_offset, parts,
    BLOCK: tl.constexpr, DIRECT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SHORTEST: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    part = tl.program_id(2)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    if tl.load(query_start_ptr + sequence + 1) - token != 1:
        return
    context = tl.load(context_ptr + sequence)
    first = tl.maximum(context - window, 0)
    begin, end = part_span(context - first, part, parts, SHORTEST, KEYS)
    r = tl.arange(0, ROWS)
    head = group * repeat + r
    used = r < repeat
    d = tl.arange(0, SIZE)
    dv = tl.arange(0, V_SIZE)
    q_at = q_ptr + token * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(q_at, mask=used[:, None] & (d < size)[None, :], other=0.0)
    values = tl.zeros((ROWS, V_SIZE), dtype=tl.float32)
    largest = tl.full((ROWS,), LOWEST, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    position = tl.full((ROWS,), 0, dtype=tl.int32) + context - 1
    values, largest, total = _attend_span(
        q, values, largest, total, position, first + begin, first + end, window, table_ptr + sequence * table_row,
        k_ptr + group.to(tl.int64) * k_group, v_ptr + group.to(tl.int64) * v_group, scale * LOG2E,
        size, v_size, k_block, k_offset, v_block, v_offset, BLOCK, True, KEYS, PRECISION, SIZE, V_SIZE, EIGHT,
    )  # fmt: skip
    heads = groups * repeat
    inside = used[:, None] & (dv < v_size)[None, :]
    if DIRECT:
        _finish(
            values, largest, total, sink_ptr, out_ptr, head, (token * heads + head) * v_size, used, inside, dv
        )
    else:
        at = (sequence * heads + head) * parts + part
        tl.store(sum_ptr + at, total, mask=used)
        tl.store(largest_ptr + at, largest, mask=used)
        tl.store(values_ptr + at[:, None] * v_size + dv[None, :], values, mask=inside & (total != 0)[:, None])


@triton.jit
def _finish(values, largest, total, sink_ptr, out_ptr, head, row_at, used, inside, dv):
    """Divide by the softmax's sum, the sink's share included, and store."""
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(largest, sink)
        values = values * tl.exp2(largest - higher)[:, None]
        total = total * tl.exp2(largest - higher) + tl.exp2(sink - higher)
    out = values / tl.where(total != 0, total, 1.0)[:, None]
    tl.store(out_ptr + row_at[:, None] + dv[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@launched(do_not_specialize=["sequences", "table_row"])
def _chunks(
    q_ptr, k_ptr, v_ptr, out_ptr, sink_ptr, query_start_ptr, context_ptr, table_ptr,
    scale, window, sequences, groups, repeat, size, v_size, q_token, q_head, table_row,
    k_block, k_group, k_offset, v_block, v_group, v_offset,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, SEQUENCES: tl.constexpr, QUERIES: tl.constexpr, REPEAT: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    s = tl.arange(0, SEQUENCES)
    start_S = tl.load(query_start_ptr + s, mask=s < sequences, other=NO_TILE)
    first_tile_S = start_S // QUERIES + s  # leaves room for every sequence's last, partly filled tile
    sequence = (tl.sum((first_tile_S <= tl.program_id(0)).to(tl.int32), axis=0) - 1).to(tl.int64)
    start = tl.load(query_start_ptr + sequence)
    count = tl.load(query_start_ptr + sequence + 1) - start
    first_query = (tl.program_id(0) - start // QUERIES - sequence.to(tl.int32)) * QUERIES
    if (first_query >= count) | (count == 1):  # single queries belong to _decode
        return
    r = tl.arange(0, QUERIES * REPEAT)
    query = first_query + r // REPEAT
    head = group * repeat + r % REPEAT
    used = (query < count) & (r % REPEAT < repeat)
    before = tl.load(context_ptr + sequence) - count
    position = before + query
    d = tl.arange(0, SIZE)
    dv = tl.arange(0, V_SIZE)
    token = (start + query).to(tl.int64)
    q_at = q_ptr + (token * q_token + head * q_head)[:, None] + d[None, :]
    q = tl.load(q_at, mask=used[:, None] & (d < size)[None, :], other=0.0)
    values = tl.zeros((QUERIES * REPEAT, V_SIZE), dtype=tl.float32)
    largest = tl.full((QUERIES * REPEAT,), LOWEST, dtype=tl.float32)
    total = tl.zeros((QUERIES * REPEAT,), dtype=tl.float32)
    table_ptr += sequence * table_row
    k_ptr += group * k_group
    v_ptr += group * v_group
    begin = tl.maximum(before + first_query - window + 1, 0)
    end = before + tl.minimum(first_query + QUERIES, count)
    if not WINDOWED:
        full = (before + first_query + 1) // KEYS * KEYS  # every row of the tile sees every key before this
        values, largest, total = _attend_span(
            q, values, largest, total, position, begin, full, window, table_ptr, k_ptr, v_ptr, scale * LOG2E,
            size, v_size, k_block, k_offset, v_block, v_offset, BLOCK, False, KEYS, PRECISION, SIZE, V_SIZE,
            EIGHT,
        )  # fmt: skip
        begin = full
    values, largest, total = _attend_span(
        q, values, largest, total, position, begin, end, window, table_ptr, k_ptr, v_ptr, scale * LOG2E,
        size, v_size, k_block, k_offset, v_block, v_offset, BLOCK, True, KEYS, PRECISION, SIZE, V_SIZE, EIGHT,
    )  # fmt: skip
    inside = used[:, None] & (dv < v_size)[None, :]
    row_at = (token * groups * repeat + head) * v_size
    _finish(values, largest, total, sink_ptr, out_ptr, head, row_at, used, inside, dv)


def attend_gqa(
    q_TAD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch, scale: float, window: int | None,
    sink_A: Tensor | None, decode: AttentionTile, chunk: AttentionTile, parts: int,
) -> Tensor:  # fmt: skip
    """Causal attention over the paged cache -> (T, A, D_v); the contract is `reference.attend_gqa`'s."""
    if q_TAD.stride(2) != 1:
        q_TAD = q_TAD.contiguous()
    assert k_NGBD.stride(3) == v_NGBD.stride(3) == batch.block_table_SB.stride(1) == 1, (
        "rows must be contiguous"
    )
    out = q_TAD.new_empty(q_TAD.shape[0], q_TAD.shape[1], v_NGBD.shape[3])
    if q_TAD.shape[0]:
        decode_gqa(q_TAD, k_NGBD, v_NGBD, batch, scale, window, sink_A, decode, parts, out)
        if batch.max_query > 1:
            chunks_gqa(q_TAD, k_NGBD, v_NGBD, batch, scale, window, sink_A, chunk, out)
    return out


def decode_gqa(
    q_TAD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch, scale: float, window: int | None,
    sink_A: Tensor | None, tile: AttentionTile, parts: int, out: Tensor,
) -> None:  # fmt: skip
    """Sequences of one query, each cut into at most `parts`."""
    scratch = split_scratch(batch.sequences, q_TAD.shape[1], parts, v_NGBD.shape[3], q_TAD.device)
    strides = q_TAD.stride()[:2], batch.block_table_SB.stride(0), k_NGBD.stride()[:3], v_NGBD.stride()[:3]
    decode = _decoding(
        batch.sequences, q_TAD.shape[1], _keys(k_NGBD), v_NGBD.shape[3], (q_TAD.dtype, begins_at(k_NGBD)), scale,
        window, tile, parts, strides,
    )  # fmt: skip
    batched = batch.query_start_S1, batch.context_S, batch.block_table_SB
    decode(q_TAD, k_NGBD, v_NGBD, out, *scratch, sink_A, *batched)
    join_parts(scratch, sink_A, batch.query_start_S1, out)


_Strides = tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]
_Kinds = tuple[torch.dtype, int]
"""Of queries; and EIGHT, `begins_at` of the cache."""


@planned
def _decoding(
    sequences: int, heads: int, keys: tuple[int, int, int], values: int, kinds: _Kinds, scale: float,
    window: int | None, tile: AttentionTile, parts: int, strides: _Strides,
) -> PreparedLaunch:  # fmt: skip
    groups, block, size = keys
    of_q, of_table, of_k, of_v = strides
    repeat = heads // groups
    return PreparedLaunch(
        _decode, (sequences, groups, parts),
        (scale, window or NO_WINDOW, groups, repeat, size, values, *of_q, of_table, *of_k, *of_v, parts),
        DIRECT=parts == 1, ROWS=max(16, power_of_two(repeat)), SHORTEST=tile.split,
        **_constants(tile, block, size, values, kinds),
    )  # fmt: skip


def chunks_gqa(
    q_TAD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch, scale: float, window: int | None,
    sink_A: Tensor | None, tile: AttentionTile, out: Tensor,
) -> None:  # fmt: skip
    """Sequences of several queries: one program per key/value head and tile of queries."""
    groups, block, size = _keys(k_NGBD)
    repeat = q_TAD.shape[1] // groups
    padded = power_of_two(repeat)
    queries = max(1, max(tile.queries, 16) // padded)
    _chunks[(q_TAD.shape[0] // queries + batch.sequences, groups)](
        q_TAD, k_NGBD, v_NGBD, out, sink_A, batch.query_start_S1, batch.context_S, batch.block_table_SB,
        scale, window or NO_WINDOW, batch.sequences, groups, repeat, size, v_NGBD.shape[3],
        *q_TAD.stride()[:2], batch.block_table_SB.stride(0), *k_NGBD.stride()[:3], *v_NGBD.stride()[:3],
        WINDOWED=window is not None, SEQUENCES=max(16, power_of_two(batch.sequences)),
        QUERIES=queries, REPEAT=padded,
        **_constants(tile, block, size, v_NGBD.shape[3], (q_TAD.dtype, begins_at(k_NGBD))),
    )  # fmt: skip


def _keys(k_NGBD: Tensor) -> tuple[int, int, int]:
    """Groups, tokens of a block, and numbers of a key."""
    _, groups, block, width = k_NGBD.shape
    return groups, block, key_numbers(width, k_NGBD.dtype)


def _constants(tile: AttentionTile, block: int, size: int, values: int, kinds: _Kinds) -> dict[str, Any]:
    return {
        "BLOCK": block, "KEYS": tile.keys, "PRECISION": "ieee" if kinds[0] is torch.float32 else "tf32",
        "SIZE": max(16, power_of_two(size)), "V_SIZE": max(16, power_of_two(values)), "EIGHT": kinds[1],
        "num_warps": tile.warps, "num_stages": tile.stages, **FUSED,
    }  # fmt: skip
