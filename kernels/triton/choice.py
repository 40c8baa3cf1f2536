"""Triton choice of rows (DeepSeek's indexer, `kernels/indexer.py`): scores of all keys, then each token's best.

Two launches. One scores: a token's heads against a tile of keys, so that a row's bits depend on nobody. The other
finds, by one program per token, the lowest score that is chosen, a byte after the other by counting, and writes slots
in the order of positions: of equal scores the earlier ones, and what is no number before all else.
Shapes: T tokens, J index heads, I index key, K chosen rows, N blocks, B tokens, C positions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.indexer import choose_rows as plainly
from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import cdiv, launched, power_of_two

KEYS, CHUNK = 64, 2048  # of one program, and of one step of a search; unmeasured
SCORES = 1 << 24  # held at a time
BINS = tl.constexpr(512)  # a byte's values, and one for what does not count


@launched(do_not_specialize=["first", "context"])
def _index_scores(
    q_ptr, weight_ptr, key_ptr, position_ptr, sequence_ptr, table_ptr, score_TC_ptr, first, context,
    q_token, q_head, block_stride, token_stride, table_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    token = (first + t).to(tl.int64)
    own = tl.load(position_ptr + token)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if tl.program_id(1) * TILE <= own:
        seen = c <= own
        sequence = tl.load(sequence_ptr + token)
        block = tl.load(table_ptr + sequence * table_stride + c // BLOCK, mask=seen, other=0).to(tl.int64)
        head, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        q_at = q_ptr + token * q_token + head[:, None] * q_head + column[None, :]
        q = tl.load(q_at, mask=(head[:, None] < HEADS) & (column[None, :] < SIZE), other=0.0)
        key_at = key_ptr + block * block_stride + (c % BLOCK) * token_stride
        key = tl.load(
            key_at[None, :] + column[:, None], mask=seen[None, :] & (column[:, None] < SIZE), other=0.0
        )
        each = tl.dot(q, key, input_precision="ieee")
        weight = tl.load(weight_ptr + token * HEADS + head, mask=head < HEADS, other=0.0)
        each = tl.where(each <= 0.0, 0.0, each)  # what is no number stays none
        score = tl.sum(tl.where(head[:, None] < HEADS, each * weight[:, None], 0.0), axis=0)
        tl.store(score_TC_ptr + t.to(tl.int64) * context + c, score, mask=seen)


@triton.jit
def _ranks(score_ptr, c, seen):
    """Higher for a higher score, and highest for what is no number. Both zeros are equal."""
    score = tl.load(score_ptr + c, mask=seen, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    rank = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
    number = (score <= 0.0) | (score > 0.0)
    return tl.where(number, rank, 0xFFFFFFFF).to(tl.uint32)


@launched(do_not_specialize=["first", "context", "most"])
def _best_rows(
    score_TC_ptr, position_ptr, sequence_ptr, table_ptr, slot_TK_ptr, first, context, most, table_stride,
    TOP: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    token = first + t
    count = (tl.load(position_ptr + token) + 1).to(tl.int32)
    row_ptr = table_ptr + tl.load(sequence_ptr + token) * table_stride
    score_ptr = score_TC_ptr + t * context
    bins, lane = tl.arange(0, BINS), tl.arange(0, STEP)
    least = tl.full((), 0, tl.uint32)  # bytes so far of the lowest rank that is chosen; a score's is not 0
    wanted = tl.minimum(count, TOP)  # of those that begin with these bytes
    if count > TOP:
        for byte in tl.static_range(4):
            counts = tl.zeros((BINS,), dtype=tl.int32)
            for start in range(0, count, STEP):
                rank = _ranks(score_ptr, start + lane, start + lane < count)
                inside = start + lane < count
                if byte > 0:
                    inside = inside & ((rank >> (32 - 8 * byte)) == least)
                digit = ((rank >> (24 - 8 * byte)) & 255).to(tl.int32)
                counts += tl.histogram(tl.where(inside, digit, 256), BINS)
            counts = tl.where(bins < 256, counts, 0)
            reached = tl.cumsum(counts, 0, reverse=True)  # that have this byte or a higher one
            found = tl.sum((reached >= wanted).to(tl.int32), axis=0) - 1
            wanted -= tl.sum(tl.where(bins > found, counts, 0), axis=0)
            least = (least << 8) | found.to(tl.uint32)
    placed, equals = 0, 0
    for start in range(0, count, STEP):
        c = start + lane
        rank = _ranks(score_ptr, c, c < count)
        equal = (c < count) & (rank == least)
        alike = tl.where(equal, 1, 0)
        chosen = (rank > least) | (equal & (equals + tl.cumsum(alike, 0) <= wanted))
        taken = (c < count) & chosen
        one = tl.where(taken, 1, 0)
        place = placed + tl.cumsum(one, 0) - 1
        block = tl.load(row_ptr + c // BLOCK, mask=taken, other=0)
        tl.store(slot_TK_ptr + token * most + place, block * BLOCK + c % BLOCK, mask=taken)
        placed += tl.sum(one, axis=0)
        equals += tl.sum(alike, axis=0)


def choose_rows(q_TJI: Tensor, weight_TJ: Tensor, index_NBI: Tensor, batch: PagedBatch, top: int) -> Tensor:
    """As `indexer.choose_rows`, which runs itself where keys are in 8 bits."""
    if index_NBI.dtype is not q_TJI.dtype:
        return plainly(q_TJI, weight_TJ, index_NBI, batch, top)
    (tokens, heads, size), context = q_TJI.shape, batch.max_context
    most, block_size, where = min(top, context), index_NBI.shape[1], q_TJI.device
    slot_TK = torch.zeros((tokens, most), dtype=torch.int32, device=where)
    if not tokens:
        return slot_TK
    q, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TJI, weight_TJ.float()))
    at_T = torch.arange(tokens, dtype=torch.int32, device=where)
    sequence_T = torch.searchsorted(batch.query_start_S1, at_T, right=True) - 1
    step, tile = max(1, min(tokens, SCORES // context)), KEYS * 2 // q.element_size()
    score_TC = torch.empty((step, context), dtype=torch.float32, device=where)
    table, position = batch.block_table_SB, batch.position_T
    for first in range(0, tokens, step):
        rows = min(step, tokens - first)
        _index_scores[(rows, cdiv(context, tile))](
            q, weight.contiguous(), index_NBI, position, sequence_T, table, score_TC, first, context,
            q.stride(0), q.stride(1), index_NBI.stride(0), index_NBI.stride(1), table.stride(0),
            HEADS=heads, SIZE=size, ROWS=max(16, power_of_two(heads)),
            COLUMNS=max(16, power_of_two(size)), BLOCK=block_size, TILE=tile,
            num_warps=2 * q.element_size(), **FUSED,
        )  # fmt: skip
        _best_rows[(rows,)](
            score_TC, position, sequence_T, table, slot_TK, first, context, most, table.stride(0),
            TOP=top, BLOCK=block_size, STEP=CHUNK, num_warps=16, **FUSED,
        )  # fmt: skip
    return slot_TK
