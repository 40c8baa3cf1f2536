"""Triton kernels that move states by prompts, in chunks of 64 tokens: four launches for all prompts of a step.

PyTorch takes some thirty for every chunk (`kernels/delta.py`). Rows are convolved, and the decays of each chunk added
up. Then each chunk is weighed by itself: which of its tokens see which, and what they replace of each other (the WY
form: a triangle is inverted from blocks of 1 to blocks of 64, two products a step). At last one program for some
columns of a head's matrix goes from chunk to chunk. Products are of the rows' dtype, sums and states of float32. Where
each key channel forgets by itself, two tokens meet at the middle of the block that the inverse joins them in: both fade
to it, so that no number grows. A chunk lies in one block of the cache, and those that end one leave the state there.

Shapes: T tokens, S sequences, C channels, W taps, G key heads, V value heads, K key size, D value size, E decays of a
token, X numbers of a token's head between launches: the chunk's tokens that it sees (64), then, where values are
replaced, its negative share of the old state (K) and its own (D), then, where channels forget, query and key (2 K).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.delta import NORM_EPS, DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.paged import PagedBatch
from afserve.kernels.states.rules import LONGEST
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned, power_of_two

_LEAST = 16  # of each side of a product
_PART = 32  # key channels of a product where each forgets by itself: registers hold no more
_COLUMNS = 32  # of a head's matrix: more programs, each of which reads all keys
_WINDOW = 256  # channels of a program


@triton.jit
def _sequence(start_ptr, context_ptr, sequence):
    """Its first row, the position of that one, and the position behind the last."""
    row, context = tl.load(start_ptr + sequence).to(tl.int64), tl.load(context_ptr + sequence)
    return row, context - (tl.load(start_ptr + sequence + 1) - row).to(tl.int32), context


@triton.jit
def _number(position, block_size, CHUNK: tl.constexpr):
    """Of the chunk that has it, counted from position 0."""
    return position // block_size * tl.cdiv(block_size, CHUNK) + position % block_size // CHUNK


@triton.jit
def _chunk(row, first, context, chunk, block_size, CHUNK: tl.constexpr):
    """The row and the position of its first token, and how many it has: none, if it lies behind the last."""
    of_block = tl.cdiv(block_size, CHUNK)
    number = _number(first, block_size, CHUNK) + chunk
    block = number // of_block
    begin = block * block_size + number % of_block * CHUNK
    end = tl.minimum(tl.minimum(begin + CHUNK, (block + 1) * block_size), context)
    begin = tl.maximum(begin, first)
    return row + begin - first, begin, end - begin


@launched(do_not_specialize=["table_stride", "first_sequence"])
def _mix(
    x_ptr, conv_ptr, bias_ptr, decay_ptr, state_ptr, table_ptr, start_ptr, context_ptr, mixed_ptr, total_ptr,
    first_sequence, channels, decays, size, groups, x_stride, table_stride, state_stride, window, block_size, eps,
    scale, BEFORE: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`size` channels of a chunk: a head's query or key, or some of the values; behind these the sums of decays."""
    sequence, tile = first_sequence + tl.program_id(1), tl.program_id(2)
    first_row, first, context = _sequence(start_ptr, context_ptr, sequence)
    row, position, count = _chunk(first_row, first, context, tl.program_id(0), block_size, CHUNK)
    if count <= 0:
        return
    r, c = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    used = (r < count)[:, None]
    tiles = tl.cdiv(channels, size)
    if tile >= tiles:
        column = (tile - tiles) * size + c
        inside = used & ((c < size) & (column < decays))[None, :]
        at = row * decays + r[:, None] * decays + column[None, :]
        tl.store(
            total_ptr + at, tl.cumsum(tl.load(decay_ptr + at, mask=inside, other=0.0), axis=0), mask=inside
        )
        return
    column = tile * size + c
    inside = (c < size) & (column < channels)
    total = tl.zeros([CHUNK, COLUMNS], dtype=tl.float32)
    seen = (position - first + r)[:, None]  # rows of this step before each
    for tap in tl.static_range(BEFORE + 1):
        back = BEFORE - tap
        x_at = x_ptr + row * x_stride + (r - back)[:, None] * x_stride + column[None, :]
        x = tl.load(x_at, mask=used & (seen >= back) & inside[None, :], other=0.0)
        taps = tl.load(conv_ptr + tap * channels + column, mask=inside, other=0.0)
        total += x.to(tl.float32) * taps[None, :]
    if (position - first < BEFORE) & (first > 0):
        block = tl.load(table_ptr + sequence * table_stride + (first - 1) // block_size).to(tl.int64)
        old_ptr = state_ptr + block * state_stride + window + column[None, :]
        for tap in tl.static_range(BEFORE):
            slot = seen + tap  # eldest first
            old = tl.load(old_ptr + slot * channels, mask=used & (slot < BEFORE) & inside[None, :], other=0.0)
            total += old * tl.load(conv_ptr + tap * channels + column, mask=inside, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    mixed = total / (1.0 + tl.exp(-total))
    if UNIT & (tile < 2 * groups):
        mixed *= tl.rsqrt(tl.sum(mixed * mixed, axis=1) + eps)[:, None] * tl.where(tile < groups, scale, 1.0)
    at = row * channels + r[:, None] * channels + column[None, :]
    tl.store(mixed_ptr + at, mixed.to(mixed_ptr.dtype.element_ty), mask=used & inside[None, :])


@launched(do_not_specialize=["table_stride", "first_sequence"])
def _keep_windows(
    x_ptr, state_ptr, table_ptr, start_ptr, context_ptr, first_sequence, channels, x_stride, table_stride,
    state_stride, window, block_size, BEFORE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last inputs before the end of each block, from those before them on."""
    sequence = first_sequence + tl.program_id(0)
    row, position, context = _sequence(start_ptr, context_ptr, sequence)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    table_ptr += sequence * table_stride
    state_ptr += window + column
    old = tl.load(table_ptr + tl.maximum(position - 1, 0) // block_size).to(tl.int64) * state_stride
    for block in range(position // block_size, (context - 1) // block_size + 1):
        count = tl.minimum((block + 1) * block_size, context) - position
        now = tl.load(table_ptr + block).to(tl.int64) * state_stride
        for tap in tl.static_range(BEFORE):
            at = count + tap - BEFORE  # rows behind `position`; before it, a place of the old window
            fresh = column < tl.where(at >= 0, channels, 0)
            x = tl.load(x_ptr + (row + at) * x_stride + column, mask=fresh, other=0.0)
            kept = column < tl.where((at < 0) & (position > 0), channels, 0)
            seen = tl.load(state_ptr + old + (tap + count) * channels, mask=kept, other=0.0)
            # places are read before those in front of them are written
            tl.store(state_ptr + now + tap * channels, x.to(tl.float32) + seen, mask=column < channels)
        row += count
        position += count
        old = now


@triton.jit
def _meet(
    q_at, k_at, total_at, there_at, i, middle, count, key, kind: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys, and queries, by keys, all faded to the middles."""
    linked = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    seen = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for start in range(0, KEYS, PART):
        c = start + tl.arange(0, PART)[None, :]
        inside = (i < count) & (c < key)
        there = tl.load(there_at + c, mask=(middle < count) & (c < key), other=0.0)
        fade = tl.exp(-tl.abs(tl.load(total_at + c, mask=inside, other=0.0) - there))
        k_faded = (tl.load(k_at + c, mask=inside, other=0.0) * fade).to(kind)
        q_faded = (tl.load(q_at + c, mask=inside, other=0.0) * fade).to(kind)
        linked = tl.dot(k_faded, tl.trans(k_faded), linked, input_precision=PRECISION)
        seen = tl.dot(q_faded, tl.trans(k_faded), seen, input_precision=PRECISION)
    return linked, seen


@launched(do_not_specialize=["first_sequence"])
def _weigh(
    mixed_ptr, total_ptr, beta_ptr, start_ptr, context_ptr, part_ptr, first_sequence, heads, groups, key, value,
    channels, width, block_size, KEYS: tl.constexpr, VALUES: tl.constexpr, CHANNEL: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of one head, by itself. Rows behind its last are zeros."""
    head = tl.program_id(2)
    first_row, first, context = _sequence(start_ptr, context_ptr, first_sequence + tl.program_id(1))
    row, _, count = _chunk(first_row, first, context, tl.program_id(0), block_size, CHUNK)
    if count <= 0:
        return
    kind = part_ptr.dtype.element_ty
    r, k, d = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, VALUES)
    i, j, used = r[:, None], r[None, :], r < count
    in_key, in_value = used[:, None] & (k < key)[None, :], used[:, None] & (d < value)[None, :]
    total_ptr += (row * heads + head) * (key if CHANNEL else 1)
    part_at = part_ptr + (row * heads + head) * width + i * (heads * width)
    mixed_at = mixed_ptr + row * channels + i * channels
    q_at = mixed_at + head // (heads // groups) * key
    k_at = q_at + groups * key
    total_at = total_ptr + i * (heads * key)
    beta = tl.load(beta_ptr + row * heads + head + r * heads, mask=used, other=0.0)[:, None]
    q = tl.load(q_at + k[None, :], mask=in_key, other=0.0)
    keys = tl.load(k_at + k[None, :], mask=in_key, other=0.0)
    if CHANNEL:
        itself = tl.sum(q.to(tl.float32) * keys.to(tl.float32), axis=1)[:, None]
        within = tl.where(i == j, itself, 0.0)
    else:
        total = tl.load(total_ptr + r * heads, mask=used, other=0.0)
        between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        within = tl.where(i >= j, tl.dot(q, tl.trans(keys), input_precision=PRECISION) * between, 0.0)
        if UNIT:
            linked = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * between * beta
    if UNIT:
        inverse = tl.where(i == j, 1.0, 0.0)
        for level in range(LEVELS):
            pair = ((i ^ j) >> level == 1) & (i > j)  # rows of a block's second half, columns of its first
            if CHANNEL:
                middle = (i >> (level + 1) << (level + 1)) + (1 << level)
                there_at = total_ptr + middle * (heads * key)
                linked, seen = _meet(
                    q_at, k_at, total_at, there_at, i, middle, count, key, kind, KEYS, CHUNK, PART, PRECISION
                )
                within += tl.where(pair, seen, 0.0)
                linked *= beta
            change = tl.dot(inverse, tl.where(pair, linked, 0.0), input_precision=PRECISION)
            inverse -= tl.dot(change, inverse, input_precision=PRECISION)
        share = inverse * tl.trans(beta)
        v = tl.load(mixed_at + 2 * groups * key + head * value + d[None, :], mask=in_value, other=0.0)
        own = tl.dot(share.to(kind), v, input_precision=PRECISION)
        tl.store(part_at + CHUNK + key + d[None, :], own.to(kind), mask=in_value)
        if CHANNEL:
            keys = tl.load(k_at + k[None, :], mask=in_key, other=0.0)
            total = tl.load(total_at + k[None, :], mask=in_key, other=0.0)
            old = tl.dot(share.to(kind), (keys * tl.exp(total)).to(kind), input_precision=PRECISION)
        else:
            old = tl.dot((share * tl.exp(total)[None, :]).to(kind), keys, input_precision=PRECISION)
        tl.store(part_at + CHUNK + k[None, :], (-old).to(kind), mask=in_key)
    if CHANNEL:
        faded_at = part_at + CHUNK + key + value + k[None, :]
        last = tl.load(total_ptr + (count - 1) * (heads * key) + k, mask=k < key, other=0.0)
        tl.store(faded_at + key, (keys * tl.exp(last[None, :] - total)).to(kind), mask=in_key)
        q = tl.load(q_at + k[None, :], mask=in_key, other=0.0)
        tl.store(faded_at, (q * tl.exp(total)).to(kind), mask=in_key)
    tl.store(part_at + j, within.to(kind), mask=used[:, None])


@launched(do_not_specialize=["table_stride", "first_sequence"])
def _pass_on(
    mixed_ptr, part_ptr, total_ptr, beta_ptr, skip_ptr, state_ptr, table_ptr, start_ptr, context_ptr, out_ptr,
    first_sequence, heads, groups, key, value, channels, width, table_stride, state_stride, block_size,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHANNEL: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's matrix, through all chunks of a sequence."""
    sequence, head = first_sequence + tl.program_id(2), tl.program_id(1)
    first_row, first, context = _sequence(start_ptr, context_ptr, sequence)
    kind = part_ptr.dtype.element_ty
    r, k, d = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    table_ptr += sequence * table_stride
    state_ptr += head.to(tl.int64) * key * value + k[:, None] * value + d[None, :]
    inside = (k < key)[:, None] & (d < value)[None, :]
    before = tl.load(table_ptr + tl.maximum(first - 1, 0) // block_size).to(tl.int64)
    there = (k < key)[:, None] & (d < tl.where(first > 0, value, 0))[None, :]
    state = tl.load(state_ptr + before * state_stride, mask=there, other=0.0)
    for chunk in range(_number(context - 1, block_size, CHUNK) - _number(first, block_size, CHUNK) + 1):
        row, position, count = _chunk(first_row, first, context, chunk, block_size, CHUNK)
        used = r < count
        in_key, in_value = used[:, None] & (k < key)[None, :], used[:, None] & (d < value)[None, :]
        of_head = row * heads + head
        mixed_at = mixed_ptr + row * channels + r[:, None] * channels
        part_at = part_ptr + of_head * width + r[:, None] * (heads * width)
        if CHANNEL:
            q_at = part_at + CHUNK + key + value + k[None, :]
            k_at = q_at + key
            last_at = total_ptr + (of_head + (count - 1) * heads) * key + k
            left = tl.exp(tl.load(last_at, mask=k < key, other=0.0))[:, None]
        else:
            q_at = mixed_at + head // (heads // groups) * key + k[None, :]
            k_at = q_at + groups * key
            total = tl.load(total_ptr + of_head + r * heads, mask=used, other=0.0)
            end = tl.load(total_ptr + of_head + (count - 1) * heads)
            left = tl.exp(end)
        q = tl.load(q_at, mask=in_key, other=0.0)
        keys = tl.load(k_at, mask=in_key, other=0.0)
        within = tl.load(part_at + r[None, :], mask=used[:, None], other=0.0)
        near = state.to(kind)
        if UNIT:
            old = tl.load(part_at + CHUNK + k[None, :], mask=in_key, other=0.0)
            own = tl.load(part_at + CHUNK + key + d[None, :], mask=in_value, other=0.0)
            added = tl.dot(old, near, own.to(tl.float32), input_precision=PRECISION)
        if not UNIT or skip_ptr is not None:
            v = tl.load(mixed_at + 2 * groups * key + head * value + d[None, :], mask=in_value, other=0.0)
            if not UNIT:
                added = v * tl.load(beta_ptr + of_head + r * heads, mask=used, other=0.0)[:, None]
        read = tl.dot(q, near, input_precision=PRECISION)
        if not CHANNEL:
            read *= tl.exp(total)[:, None]
        read = tl.dot(within, added.to(kind), read, input_precision=PRECISION)
        if skip_ptr is not None:
            read += tl.load(skip_ptr + head) * v
        tl.store(out_ptr + of_head * value + r[:, None] * (heads * value) + d[None, :], read, mask=in_value)
        if not CHANNEL:
            added *= tl.exp(end - total)[:, None]
        state = tl.dot(tl.trans(keys), added.to(kind), state * left, input_precision=PRECISION)
        position += count
        if (position % block_size == 0) | (position == context):
            now = tl.load(table_ptr + (position - 1) // block_size).to(tl.int64)
            tl.store(state_ptr + now * state_stride, state, mask=inside)


def move_prompts(
    rows: DeltaRows, layer: DeltaLayer, state_NF: Tensor, batch: PagedBatch, first: int,
    spans: Sequence[tuple[int, int]], block_size: int, out_TVD: Tensor,
) -> None:  # fmt: skip
    """Fills the rows of sequences `first`, `first` + 1 ... of a batch, whose states are moved. `spans` has the position
    of each one's first token, and that behind its last."""
    x_TC, starts, of_block = rows.mixed_TC, (batch.query_start_S1, batch.context_S), cdiv(block_size, LONGEST)
    ends = ((at, to - 1) for at, to in spans)
    numbers = ([at // block_size * of_block + at % block_size // LONGEST for at in both] for both in ends)
    counts = len(spans), 1 + max(last - begin for begin, last in numbers)
    strides = x_TC.stride(0), batch.block_table_SB.stride(0), state_NF.stride(0)
    width, (mix, keep, weigh, pass_on) = _prompting(layer.shape, counts, strides, block_size, x_TC.dtype)
    mixed_TC, total_TE = x_TC.new_empty(x_TC.shape), torch.empty_like(rows.decay_TE)
    part_TVX = x_TC.new_empty(len(x_TC), layer.shape.value_heads, width)
    states = state_NF, batch.block_table_SB, *starts
    mix(x_TC, layer.conv_WC, layer.bias_C, rows.decay_TE, *states, mixed_TC, total_TE, free=first)
    keep(x_TC, *states, free=first)
    weigh(mixed_TC, total_TE, rows.beta_TV, *starts, part_TVX, free=first)
    pass_on(mixed_TC, part_TVX, total_TE, rows.beta_TV, layer.skip_V, *states, out_TVD, free=first)


@planned
def _prompting(
    shape: DeltaShape, counts: tuple[int, int], strides: tuple[int, int, int], block_size: int, kind: torch.dtype,
) -> tuple[int, tuple[PreparedLaunch, PreparedLaunch, PreparedLaunch, PreparedLaunch]]:  # fmt: skip
    (sequences, chunks), (x_stride, *tables) = counts, strides
    channels, heads, key, value = shape.channels, shape.value_heads, shape.key, shape.value
    (keys, values), single = (max(_LEAST, power_of_two(n)) for n in (key, value)), kind is torch.float32
    width = LONGEST + {"head": key + value, "channel": 3 * key + value, "sum": 0}[shape.rule]
    heights = heads, shape.key_heads, key, value, channels, width
    windows = x_stride, *tables, shape.matrix, block_size
    unit = {"UNIT": shape.rule != "sum", "CHUNK": LONGEST, "num_warps": 8, **FUSED}
    rule: dict[str, object] = {"KEYS": keys, "CHANNEL": shape.rule == "channel", **unit}
    rule["PRECISION"] = "ieee" if single else "tf32"
    return width, (
        PreparedLaunch(
            _mix, (chunks, sequences, cdiv(channels, key) + cdiv(shape.decays, key)),
            (0, channels, shape.decays, key, shape.key_heads, *windows, NORM_EPS, key**-0.5), 0,
            BEFORE=shape.taps - 1, COLUMNS=power_of_two(key), **unit,
        ),
        PreparedLaunch(
            _keep_windows, (sequences, cdiv(channels, _WINDOW)), (0, channels, *windows), 0,
            BEFORE=shape.taps - 1, COLUMNS=_WINDOW, **FUSED,
        ),
        PreparedLaunch(
            _weigh, (chunks, sequences, heads), (0, *heights, block_size), 0,
            VALUES=values, LEVELS=LONGEST.bit_length() - 1, PART=min(keys, _PART), num_stages=1, **rule,
        ),
        PreparedLaunch(
            _pass_on, (cdiv(value, _COLUMNS), heads, sequences), (0, *heights, *tables, block_size), 0,
            VALUES=min(_COLUMNS, values), num_stages=1 if single else 2, **rule,
        ),
    )  # fmt: skip
