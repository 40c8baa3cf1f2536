"""Triton attention in MLA's absorbed form over the paged latent cache, decode and chunks alike, with split KV.

Queries are already in latent space, so every head of a token reads the same rows: a tile of heads is the matrix
product's rows, each latent tile serves as keys and as values, and chunks need no second kernel. Of a cache in 8 bits
codes are multiplied, and scores and weights with the scales of their rows.
Shapes: T tokens, A heads, C = rank + rope, L rank, N blocks, B block size (DeepSeek-V2, arXiv 2405.04434, 2.1).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.config import FUSED, AttentionTile
from afserve.kernels.triton.eight import as_numbers, begins_at, scales_at, weighted_rows
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned, power_of_two
from afserve.kernels.triton.split import LOG2E, LOWEST, join_parts, part_span, split_scratch

NO_TOKEN = tl.constexpr(1 << 30)  # end of a sequence that is not there


@triton.jit
def _step(
    q, q_rope, cache_ptr, table_ptr, start, end, values, largest, total, scale, rank, rope, cache_block, cache_offset,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """(values, largest, total) with KEYS more positions, or as many as there are."""
    key = start + tl.arange(0, KEYS)
    c = tl.arange(0, RANK)[None, :]
    e = tl.arange(0, ROPE)[None, :]
    exists = key < end
    if WHOLE:  # all of them lie in one block: one entry of the table
        first = cache_ptr + tl.load(table_ptr + start // BLOCK).to(tl.int64) * cache_block
        row_at = (start % BLOCK + tl.arange(0, KEYS)) * cache_offset
    else:
        first = cache_ptr
        block = tl.load(table_ptr + key // BLOCK, mask=exists, other=0).to(tl.int64)
        row_at = block * cache_block + key % BLOCK * cache_offset
    if EIGHT:
        row_at = tl.multiple_of(row_at, [EIGHT])
        of_latent, of_rope = scales_at(first + row_at + (rank + rope), exists)
    row_at = row_at[:, None]
    latent = tl.load(first + row_at + c, mask=exists[:, None] & (c < rank), other=0.0)
    turned = tl.load(first + row_at + rank + e, mask=exists[:, None] & (e < rope), other=0.0)
    if EIGHT:
        keys, turned = as_numbers(latent, q.dtype), as_numbers(turned, q.dtype)
        score = tl.dot(q_rope, tl.trans(turned), input_precision=PRECISION) * of_rope[None, :]
        score += tl.dot(q, tl.trans(keys), input_precision=PRECISION) * of_latent[None, :]
        score *= scale * LOG2E
    elif q.shape[0] >= 64:
        # Always so, which the compiler does not know. It gives every row of a product whose result it sees multiplied
        # again to one warp, and eight warps would compute the scores of 64 rows twice. It does not see behind a branch.
        if start < end:
            of_rope = tl.dot(q_rope, tl.trans(turned), input_precision=PRECISION)
            score = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        else:
            of_rope = tl.dot(q_rope, tl.trans(turned), input_precision=PRECISION)
            score = of_rope
        score = (score + of_rope) * (scale * LOG2E)
    else:
        score = tl.dot(q_rope, tl.trans(turned), input_precision=PRECISION)
        score = tl.dot(q, tl.trans(latent), score, input_precision=PRECISION) * (scale * LOG2E)
    score = tl.where(exists[None, :], score, float("-inf"))
    higher = tl.maximum(largest, tl.max(score, axis=1))
    weight = tl.exp2(score - higher[:, None])
    old = tl.exp2(largest - higher)
    total = total * old + tl.sum(weight, axis=1)
    if EIGHT:
        weight, latent = weighted_rows(weight, latent, of_latent, q.dtype)
    values = tl.dot(weight.to(latent.dtype), latent, values * old[:, None], input_precision=PRECISION)
    return values, higher, total


@triton.jit
def _uniform(number):
    """The same, which the assembler then knows to be one for all lanes, so that it stays out of their registers."""
    return tl.sum(tl.gather(tl.full((32,), number, tl.int32), tl.zeros((1,), tl.int32), 0), axis=0)


@launched(do_not_specialize=["sequences", "table_row", "parts"])
def _attend_latent(
    q_ptr, q_rope_ptr, cache_ptr, out_ptr, values_ptr, largest_ptr, sum_ptr, query_start_ptr, context_ptr, table_ptr,
    scale, sequences, heads, rank, rope, q_token, q_head, rope_token, rope_head, table_row, cache_block, cache_offset,
    parts,
    SEQUENCES: tl.constexpr, ONE_EACH: tl.constexpr, DIRECT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr, KEYS: tl.constexpr, SHORTEST: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    part = tl.program_id(2)
    if ONE_EACH:
        sequence = token
        visible = tl.load(context_ptr + sequence)
    else:
        s = tl.arange(0, SEQUENCES)
        end_S = tl.load(query_start_ptr + s + 1, mask=s < sequences, other=NO_TOKEN)
        sequence = tl.sum((end_S <= token).to(tl.int32), axis=0)
        if ROWS >= 64:
            sequence = _uniform(sequence)
        visible = tl.load(context_ptr + sequence) - (tl.load(query_start_ptr + sequence + 1) - 1 - token)
    begin, end = part_span(visible, part, parts, SHORTEST, KEYS)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    used = head < heads
    c, e = tl.arange(0, RANK), tl.arange(0, ROPE)
    q_at = q_ptr + token.to(tl.int64) * q_token + (head * q_head)[:, None]
    q = tl.load(q_at + c[None, :], mask=used[:, None] & (c < rank)[None, :], other=0.0)
    q_at = q_rope_ptr + token.to(tl.int64) * rope_token + (head * rope_head)[:, None]
    q_rope = tl.load(q_at + e[None, :], mask=used[:, None] & (e < rope)[None, :], other=0.0)
    values = tl.zeros((ROWS, RANK), dtype=tl.float32)
    largest = tl.full((ROWS,), LOWEST, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    table_ptr += sequence.to(tl.int64) * table_row
    for start in range(begin, end, KEYS):
        values, largest, total = _step(
            q, q_rope, cache_ptr, table_ptr, start, end, values, largest, total, scale, rank, rope, cache_block,
            cache_offset, BLOCK, WHOLE, KEYS, PRECISION, RANK, ROPE, EIGHT,
        )  # fmt: skip
    inside = used[:, None] & (c < rank)[None, :]
    row = token.to(tl.int64) * heads + head
    if DIRECT:
        out = values / tl.where(total != 0, total, 1.0)[:, None]
        tl.store(out_ptr + (row * rank)[:, None] + c[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        at = row * parts + part
        tl.store(sum_ptr + at, total, mask=used)
        tl.store(largest_ptr + at, largest, mask=used)
        tl.store(values_ptr + (at * rank)[:, None] + c[None, :], values, mask=inside & (total != 0)[:, None])


def attend_mla(
    q_TAC: Tensor, q_rope_TAE: Tensor, cache_NBC: Tensor, batch: PagedBatch, scale: float, tile: AttentionTile,
    parts: int,
) -> Tensor:  # fmt: skip
    """(T, A, rank): causal attention of every new token over its latent rows, in at most `parts` per token."""
    q_TAC, q_rope_TAE = (q if q.stride(2) == 1 else q.contiguous() for q in (q_TAC, q_rope_TAE))
    assert cache_NBC.stride(2) == batch.block_table_SB.stride(1) == 1, "rows must be contiguous"
    shape = tokens, heads, rank = q_TAC.shape
    out = q_TAC.new_empty(*shape)
    if not tokens:
        return out
    scratch = split_scratch(tokens, heads, parts, rank, q_TAC.device)
    table_SB = batch.block_table_SB
    strides = q_TAC.stride()[:2], q_rope_TAE.stride()[:2], table_SB.stride(0), cache_NBC.stride()[:2]
    attend = _attending(
        shape, q_rope_TAE.shape[2], cache_NBC.shape[1], (q_TAC.dtype, begins_at(cache_NBC)), batch.sequences,
        batch.max_query == 1, scale, tile, parts, strides,
    )  # fmt: skip
    attend(q_TAC, q_rope_TAE, cache_NBC, out, *scratch, batch.query_start_S1, batch.context_S, table_SB)
    join_parts(scratch, None, None, out)
    return out


@planned
def _attending(
    shape: tuple[int, int, int], own_rope: int, block: int, kinds: tuple[torch.dtype, int], sequences: int,
    single: bool, scale: float, tile: AttentionTile, parts: int,
    strides: tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]],
) -> PreparedLaunch:  # fmt: skip
    (tokens, heads, rank), (of_q, of_rope, of_table, of_cache) = shape, strides
    width, rope = (max(16, power_of_two(size)) for size in (rank, own_rope))
    one_each = single and tokens == sequences
    return PreparedLaunch(
        _attend_latent, (tokens, cdiv(heads, tile.queries), parts),
        (scale, sequences, heads, rank, own_rope, *of_q, *of_rope, of_table, *of_cache, parts),
        SEQUENCES=1 if one_each else max(16, power_of_two(sequences)), DIRECT=parts == 1, BLOCK=block,
        ONE_EACH=one_each, ROWS=tile.queries, KEYS=tile.keys, WHOLE=block % tile.keys == 0,
        SHORTEST=tile.split, PRECISION="ieee" if kinds[0] is torch.float32 else "tf32", EIGHT=kinds[1],
        RANK=width, ROPE=rope, num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip
