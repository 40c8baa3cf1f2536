"""Triton kernels that move the states of single tokens in place: a convolution's window, then each head's matrix.

What PyTorch does in some forty launches of one decode step (`kernels/delta.py`). All of it is float32. Rows behind a
recorded step's own repeat its first row, whose state would be moved again: their programs move none, and read zeros.

Shapes: T tokens, one of each sequence, C channels, W taps, G key heads, V value heads, K key size, D value size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.delta import NORM_EPS, DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned, power_of_two

_CHANNELS = 256  # of a program
_NUMBERS = 4096  # of a program's part of a matrix


@triton.jit
def _blocks(table_ptr, position_ptr, table_stride, block_size):
    """Of this program's row: its position, the blocks of the token before it and of its own, and whether that is no
    repetition of the first row."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row)
    first = tl.load(position_ptr)
    now = tl.load(table_ptr + row * table_stride + position // block_size)
    moves = (row == 0) | (position != first) | (now != tl.load(table_ptr + first // block_size))
    before = tl.load(table_ptr + row * table_stride + tl.maximum(position - 1, 0) // block_size)
    return position, before.to(tl.int64), now.to(tl.int64), moves


@launched(do_not_specialize=["table_stride"])
def _convolve(
    x_ptr, conv_ptr, bias_ptr, state_ptr, table_ptr, position_ptr, out_ptr, channels, x_stride, table_stride,
    state_stride, first, block_size, BEFORE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Windows begin `first` numbers behind their states, eldest inputs first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    position, before, now, moves = _blocks(table_ptr, position_ptr, table_stride, block_size)
    kept = column < tl.where((position > 0) & moves, channels, 0)
    moved = column < tl.where(moves, channels, 0)
    old = state_ptr + before * state_stride + first + column
    new = state_ptr + now * state_stride + first + column
    total = tl.zeros([CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(BEFORE):
        seen = tl.load(old + tap * channels, mask=kept, other=0.0)
        total += seen * tl.load(conv_ptr + tap * channels + column, mask=inside, other=0.0)
        if tap > 0:
            tl.store(new + (tap - 1) * channels, seen, mask=moved)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    total += x * tl.load(conv_ptr + BEFORE * channels + column, mask=inside, other=0.0)
    if BEFORE > 0:
        tl.store(new + (BEFORE - 1) * channels, x, mask=moved)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * channels + column, total / (1.0 + tl.exp(-total)), mask=inside)


@launched(do_not_specialize=["table_stride"])
def _move(
    mixed_ptr, decay_ptr, beta_ptr, skip_ptr, state_ptr, table_ptr, position_ptr, out_ptr, heads, groups, key, value,
    table_stride, state_stride, block_size, eps, scale, KEYS: tl.constexpr, VALUES: tl.constexpr, CHANNEL: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's matrix. CHANNEL: it forgets by key channel; UNIT: keys have length 1, and what the
    state says for a key is replaced, where a value is added else."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, before, now, moves = _blocks(table_ptr, position_ptr, table_stride, block_size)
    k, d = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = k < key, d < value
    mixed = mixed_ptr + row * (2 * groups * key + heads * value)
    group = head // (heads // groups) * key
    query = tl.load(mixed + group + k, mask=in_key, other=0.0)
    keys = tl.load(mixed + groups * key + group + k, mask=in_key, other=0.0)
    values = tl.load(mixed + 2 * groups * key + head * value + d, mask=in_value, other=0.0)
    if UNIT:
        query = query * tl.rsqrt(tl.sum(query * query, axis=0) + eps) * scale
        keys = keys * tl.rsqrt(tl.sum(keys * keys, axis=0) + eps)
    at = head.to(tl.int64) * key * value + k[:, None] * value + d[None, :]
    inside = in_key[:, None] & (d < tl.where(moves, value, 0))[None, :]
    kept = in_key[:, None] & (d < tl.where((position > 0) & moves, value, 0))[None, :]
    state = tl.load(state_ptr + before * state_stride + at, mask=kept, other=0.0)
    if CHANNEL:
        state *= tl.exp(tl.load(decay_ptr + (row * heads + head) * key + k, mask=in_key, other=0.0))[:, None]
    else:
        state *= tl.exp(tl.load(decay_ptr + row * heads + head))
    added = values
    if UNIT:
        added -= tl.sum(state * keys[:, None], axis=0)
    added *= tl.load(beta_ptr + row * heads + head)
    state += keys[:, None] * added[None, :]
    tl.store(state_ptr + now * state_stride + at, state, mask=inside)
    read = tl.sum(state * query[:, None], axis=0)
    if skip_ptr is not None:
        read += tl.load(skip_ptr + head) * values
    tl.store(out_ptr + (row * heads + head) * value + d, read, mask=in_value)


def move_rows(
    rows: DeltaRows,
    layer: DeltaLayer,
    state_NF: Tensor,
    table_TB: Tensor,
    position_T: Tensor,
    block_size: int,
) -> Tensor:
    """(T, V, D) float32: what each of T tokens, one of a sequence each, reads of its state, which is moved."""
    shape, x_TC = layer.shape, rows.mixed_TC
    tokens, strides = len(x_TC), (table_TB.stride(0), state_NF.stride(0))
    mixed_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    out_TVD = mixed_TC.new_empty(tokens, shape.value_heads, shape.value)
    convolve, move = _moving(shape, tokens, x_TC.stride(0), strides, block_size)
    where = state_NF, table_TB, position_T
    convolve(x_TC, layer.conv_WC, layer.bias_C, *where, mixed_TC)
    move(mixed_TC, rows.decay_TE, rows.beta_TV, layer.skip_V, *where, out_TVD)
    return out_TVD


@planned
def _moving(
    shape: DeltaShape, tokens: int, x_stride: int, strides: tuple[int, int], block_size: int
) -> tuple[PreparedLaunch, PreparedLaunch]:
    keys = power_of_two(shape.key)
    values = min(power_of_two(shape.value), max(1, _NUMBERS // keys))
    channels, heads = shape.channels, shape.value_heads
    sizes = heads, shape.key_heads, shape.key, shape.value
    return (
        PreparedLaunch(
            _convolve, (tokens, cdiv(channels, _CHANNELS)), (channels, x_stride, *strides, shape.matrix, block_size),
            BEFORE=shape.taps - 1, CHANNELS=_CHANNELS, **FUSED,
        ),
        PreparedLaunch(
            _move, (tokens, heads, cdiv(shape.value, values)),
            (*sizes, *strides, block_size, NORM_EPS, shape.key**-0.5),
            KEYS=keys, VALUES=values, CHANNEL=shape.rule == "channel", UNIT=shape.rule != "sum", **FUSED,
        ),
    )  # fmt: skip
