"""Triton rotary embedding and writes into the paged caches, fused: one launch norms and turns heads and stores them.

Pairs are (2i, 2i+1) if interleaved, else (i, i + half); the result is in half-split order either way, and columns
past the rotary size are copied. A negative kv slot stores nothing (padding of a captured graph). A cache in 8 bits gets
codes of what one in the rows' dtype would get, and scales behind them (`formats/eight_bits.py`).
Shapes: T tokens, A query heads, G key/value heads, D head size, C latent row, N blocks, B block size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.formats.eight_bits import SCALES, is_eight
from afserve.kernels.latent import MlaLayer
from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.eight import WORD, codes_of, magnitude, put_scale, row_scale
from afserve.kernels.triton.launch import PreparedLaunch, launched, planned, power_of_two


@triton.jit
def _normed(x, factor, weight_ptr, at, inside, kind: tl.constexpr):
    """RMSNorm's last two steps with the reference's roundings: to `kind` before the weight and after it."""
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return ((x * factor).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, scale_ptr, norm_ptr, cos_ptr, sin_ptr, heads, x_head, out_head, half, size, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate `heads` rows of one token, normed first if there is a norm; REST columns are not turned. With
    `scale_ptr`, where the first head's scale goes, they are kept as codes."""
    kind: tl.constexpr = x_ptr.dtype.element_ty
    kept_kind: tl.constexpr = out_ptr.dtype.element_ty
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    turned = i < half
    inside = (h < heads) & turned
    at = 2 * i if INTERLEAVED else i
    step = 1 if INTERLEAVED else half
    first = tl.load(x_ptr + h * x_head + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + h * x_head + at + step, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)
    if REST > 0:
        d = 2 * half + tl.arange(0, REST)[None, :]
        kept = (h < heads) & (d < size)
        rest = tl.load(x_ptr + h * x_head + d, mask=kept, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    if norm_ptr is not None:
        factor = tl.rsqrt(squares / size + eps)[:, None]
        first = _normed(first, factor, norm_ptr, at, turned, kind)
        second = _normed(second, factor, norm_ptr, at + step, turned, kind)
        if REST > 0:
            rest = _normed(rest, factor, norm_ptr, d, d < size, kind)
    cos = tl.load(cos_ptr + i, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + i, mask=turned, other=0.0).to(tl.float32)
    to = out_ptr + h * out_head + i
    if scale_ptr is None:
        tl.store(to, (first * cos - second * sin).to(kept_kind), mask=inside)
        tl.store(to + half, (second * cos + first * sin).to(kept_kind), mask=inside)
    else:
        below = (first * cos - second * sin).to(kind).to(tl.float32)
        above = (second * cos + first * sin).to(kind).to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(below), magnitude(above)), axis=1)
        if REST > 0:
            largest = tl.maximum(largest, tl.max(magnitude(rest), axis=1))
        scale = row_scale(largest, kept_kind)[:, None]
        put_scale(scale_ptr + h * out_head, scale, h < heads)
        tl.store(to, codes_of(below, scale, kept_kind), mask=inside)
        tl.store(to + half, codes_of(above, scale, kept_kind), mask=inside)
        if REST > 0:
            rest = codes_of(rest, scale, kept_kind)
    if REST > 0:
        tl.store(out_ptr + h * out_head + d, rest.to(kept_kind), mask=kept)


@triton.jit
def _copy_heads(
    x_ptr, out_ptr, scale_ptr, heads, x_head, out_head, scale_head, size, HEADS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    kept_kind: tl.constexpr = out_ptr.dtype.element_ty
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, SIZE)[None, :]
    inside = (h < heads) & (d < size)
    x = tl.load(x_ptr + h * x_head + d, mask=inside, other=0.0)
    if scale_ptr is not None:
        x = x.to(tl.float32)
        scale = row_scale(tl.max(magnitude(x), axis=1), kept_kind)[:, None]
        put_scale(scale_ptr + h * scale_head, scale, h < heads)
        x = codes_of(x, scale, kept_kind)
    tl.store(out_ptr + h * out_head + d, x.to(kept_kind), mask=inside)


@launched
def _rope(
    x_ptr, out_ptr, cos_ptr, sin_ptr, position_ptr, heads, x_token, x_head, half, size,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(position_ptr + token).to(tl.int64) * half
    _turn_heads(
        x_ptr + token * x_token, out_ptr + token * heads * size, None, None, cos_ptr + angle, sin_ptr + angle,
        heads, x_head, size, half, size, 0.0, HEADS, HALF, REST, INTERLEAVED,
    )  # fmt: skip


@launched
def _rope_write_kv(
    q_ptr, k_ptr, v_ptr, out_ptr, k_cache_ptr, v_cache_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr,
    slot_ptr, eps, heads, groups, half, size, v_size, block_size, q_token, q_head, k_token, k_head, v_token, v_head,
    k_block, k_group, k_offset, v_block, v_group, v_offset,
    TURN: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, INTERLEAVED: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # 0 keys, 1 values, 2 queries
    slot = tl.load(slot_ptr + token).to(tl.int64)
    block = slot // block_size
    offset = slot % block_size
    if TURN:
        angle = tl.load(position_ptr + token).to(tl.int64) * half
    if part == 2:
        if TURN:
            _turn_heads(
                q_ptr + token * q_token, out_ptr + token * heads * size, None, q_norm_ptr, cos_ptr + angle,
                sin_ptr + angle, heads, q_head, size, half, size, eps, HEADS, HALF, REST, INTERLEAVED,
            )  # fmt: skip
    elif slot >= 0:
        to = k_cache_ptr + block * k_block + offset * k_offset
        k_scale = to + size if EIGHT else None
        v_scale = to + size + WORD if EIGHT else None
        if part == 1:
            to = v_cache_ptr + block * v_block + offset * v_offset
            _copy_heads(
                v_ptr + token * v_token, to, v_scale, groups, v_head, v_group, k_group, v_size, GROUPS, VALUES
            )
        elif TURN:
            _turn_heads(
                k_ptr + token * k_token, to, k_scale, k_norm_ptr, cos_ptr + angle, sin_ptr + angle,
                groups, k_head, k_group, half, size, eps, GROUPS, HALF, REST, INTERLEAVED,
            )  # fmt: skip
        else:
            _copy_heads(
                k_ptr + token * k_token, to, k_scale, groups, k_head, k_group, k_group, size, GROUPS, KEYS
            )


@triton.jit
def _norm_row(x_ptr, out_ptr, scale_ptr, norm_ptr, size, eps, SIZE: tl.constexpr):
    """One row normed, or copied where there is no norm; as codes with `scale_ptr`."""
    kept_kind: tl.constexpr = out_ptr.dtype.element_ty
    d = tl.arange(0, SIZE)
    x = tl.load(x_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x = _normed(
            x, tl.rsqrt(tl.sum(x * x, axis=0) / size + eps), norm_ptr, d, d < size, x_ptr.dtype.element_ty
        )
    if scale_ptr is not None:
        scale = row_scale(tl.max(magnitude(x), axis=0), kept_kind)
        put_scale(scale_ptr, scale, True)
        x = codes_of(x, scale, kept_kind)
    tl.store(out_ptr + d, x.to(kept_kind), mask=d < size)


@launched
def _keep_latents(
    made_ptr, q_ptr, cache_ptr, q_norm_ptr, norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, eps, query, rank, half,
    rope, block_size, made_token, cache_block, cache_offset,
    QUERY: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """One token's latent to its slot, and its key behind it; by a second program its query."""
    token = tl.program_id(0).to(tl.int64)
    made_ptr += token * made_token
    if q_norm_ptr is not None:  # noqa: SIM102, for the other is known when it runs
        if tl.program_id(1) == 1:
            _norm_row(made_ptr, q_ptr + token * query, None, q_norm_ptr, query, eps, QUERY)
            return
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        to = cache_ptr + slot // block_size * cache_block + slot % block_size * cache_offset
        of_latent = to + rank + rope if EIGHT else None
        of_rope = to + rank + rope + WORD if EIGHT else None
        _norm_row(made_ptr + query, to, of_latent, norm_ptr, rank, eps, RANK)
        if HALF > 0:
            angle = tl.load(position_ptr + token).to(tl.int64) * half
            _turn_heads(
                made_ptr + query + rank, to + rank, of_rope, None, cos_ptr + angle, sin_ptr + angle, 1, 0, 0, half,
                rope, 0.0, 1, HALF, REST, INTERLEAVED,
            )  # fmt: skip
        elif EIGHT:
            _norm_row(made_ptr + query + rank, to + rank, of_rope, None, rope, 0.0, REST)


def rope(x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool) -> Tensor:
    """x_TAD turned by its positions; columns past twice cos_PD's are copied."""
    x_TAD, cos_PD, sin_PD = _packed_last(x_TAD), cos_PD.contiguous(), sin_PD.contiguous()
    shape = x_TAD.shape
    out_TAD = x_TAD.new_empty(*shape)
    if 0 not in shape:
        turn = _turning(shape, x_TAD.stride(), cos_PD.shape[1], interleaved)
        turn(x_TAD, out_TAD, cos_PD, sin_PD, position_T)
    return out_TAD


@planned
def _turning(shape: tuple[int, ...], stride: tuple[int, ...], half: int, interleaved: bool) -> PreparedLaunch:
    tokens, heads, size = shape
    return PreparedLaunch(
        _rope, (tokens,), (heads, *stride[:2], half, size), HEADS=power_of_two(heads), HALF=power_of_two(half),
        REST=_rest(size, half), INTERLEAVED=interleaved, **FUSED,
    )  # fmt: skip


def rope_write_kv(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor,
    k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor, interleaved: bool,
    q_norm_D: Tensor | None = None, k_norm_D: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Turned queries; the turned keys and the values go to their cache slots in the same launch. Queries and keys are
    normed per head first where a norm is given."""
    q_TAD = _packed_last(q_TAD)
    out_TAD = q_TAD.new_empty(*q_TAD.shape)
    turn = _Turn(cos_PD.contiguous(), sin_PD.contiguous(), position_T, q_norm_D, k_norm_D, eps, interleaved)
    _launch_kv(q_TAD, k_TGD, v_TGD, out_TAD, turn, k_NGBD, v_NGBD, kv_slot_T)
    return out_TAD


def write_kv(k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor) -> None:
    """Keys and values as they are to slots block * B + offset."""
    _launch_kv(k_TGD, k_TGD, v_TGD, k_TGD, None, k_NGBD, v_NGBD, kv_slot_T)


class _Turn(NamedTuple):
    """How a launch turns (and norms) what it is given."""

    cos_PD: Tensor
    sin_PD: Tensor
    position_T: Tensor
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    interleaved: bool


def _launch_kv(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_TAD: Tensor, turn: _Turn | None,
    k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor,
) -> None:  # fmt: skip
    k_TGD, v_TGD = _packed_last(k_TGD), _packed_last(v_TGD)
    assert k_NGBD.stride(3) == v_NGBD.stride(3) == 1, "cache rows must be contiguous"
    norms = (turn.q_norm_D, turn.k_norm_D) if turn else (None, None)
    angles = (turn.cos_PD, turn.sin_PD, turn.position_T) if turn else (None, None, None)
    if k_TGD.shape[0]:
        how = (turn.eps, turn.cos_PD.shape[1], turn.interleaved) if turn else None
        strides = q_TAD.stride(), k_TGD.stride(), v_TGD.stride(), k_NGBD.stride(), v_NGBD.stride()
        eight = is_eight(k_NGBD.dtype)
        write = _writing(how, q_TAD.shape[1], k_TGD.shape, v_TGD.shape[2], k_NGBD.shape[2], eight, strides)
        write(q_TAD, k_TGD, v_TGD, out_TAD, k_NGBD, v_NGBD, *norms, *angles, kv_slot_T)


@planned
def _writing(
    turn: tuple[float, int, bool] | None, heads: int, shape: tuple[int, ...], values: int, block_size: int,
    eight: bool, strides: tuple[tuple[int, ...], ...],
) -> PreparedLaunch:  # fmt: skip
    tokens, groups, size = shape
    eps, half, interleaved = turn or (0.0, size // 2, False)
    return PreparedLaunch(
        _rope_write_kv, (tokens, 3 if turn else 2),
        (eps, heads, groups, half, size, values, block_size, *(n for stride in strides for n in stride[:-1])),
        TURN=turn is not None, HEADS=power_of_two(heads), GROUPS=power_of_two(groups),
        HALF=power_of_two(half), REST=_rest(size, half), VALUES=power_of_two(values),
        KEYS=power_of_two(size), INTERLEAVED=interleaved, EIGHT=eight, **FUSED,
    )  # fmt: skip


def write_latent(latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor, rank: int) -> None:
    """Whole latent rows (`rank` numbers of compressed KV, then the turned key) to slots block * B + offset."""
    whole = rank if is_eight(cache_NBC.dtype) else latent_TC.shape[1]
    _launch_latents(_packed_last(latent_TC), None, cache_NBC, None, None, kv_slot_T, whole)


def keep_latents(made_TD: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch) -> Tensor:
    """`Reference.keep_latents`, one launch."""
    made_TD = _packed_last(made_TD)
    if layer.q_norm_R is None:
        query = made_TD[:, : layer.query]
    else:
        query = made_TD.new_empty(made_TD.shape[0], layer.query)
    _launch_latents(made_TD, query, cache_NBC, layer, batch.position_T, batch.kv_slot_T, layer.rank)
    return query


def _launch_latents(
    made_TD: Tensor, query: Tensor | None, cache_NBC: Tensor, layer: MlaLayer | None, position_T: Tensor | None,
    kv_slot_T: Tensor, rank: int,
) -> None:  # fmt: skip
    assert cache_NBC.stride(2) == 1, "cache rows must be contiguous"
    tokens, width = made_TD.shape[0], 0 if query is None else query.shape[1]
    q_norm = norm = cos = sin = None
    eight = is_eight(cache_NBC.dtype)
    how = 0.0, 0, cache_NBC.shape[2] - SCALES * eight - rank, False
    if layer is not None:
        q_norm, norm, cos, sin = layer.q_norm_R, layer.latent_norm_C, layer.cos_PD, layer.sin_PD
        half = cos.shape[1] if layer.rope else 0
        how = layer.latent_eps, half, layer.rope, layer.interleaved
    if tokens:
        strides = made_TD.stride(0), *cache_NBC.stride()[:2]
        grid = tokens, 1 if q_norm is None else 2
        keep = _keeping(grid, width, rank, how, cache_NBC.shape[1], eight, strides)
        keep(made_TD, query, cache_NBC, q_norm, norm, cos, sin, position_T, kv_slot_T)


@planned
def _keeping(
    grid: tuple[int, int], width: int, rank: int, how: tuple[float, int, int, bool], block_size: int, eight: bool,
    strides: tuple[int, ...],
) -> PreparedLaunch:  # fmt: skip
    eps, half, rope, interleaved = how
    rest = power_of_two(rope) if eight and not half else _rest(rope, half)
    return PreparedLaunch(
        _keep_latents, grid, (eps, width, rank, half, rope, block_size, *strides), QUERY=power_of_two(width),
        RANK=power_of_two(rank), HALF=power_of_two(half) if half else 0, REST=rest,
        INTERLEAVED=interleaved, EIGHT=eight, **FUSED,
    )  # fmt: skip


def _packed_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rest(size: int, half: int) -> int:
    return power_of_two(size - 2 * half) if size > 2 * half else 0
