"""Triton rotary embedding and writes into the paged caches, fused: one launch turns queries and keys and stores.

Pairs are (2i, 2i+1) if interleaved, else (i, i + half); the result is in half-split order either way, and columns
past the rotary size are copied. A negative kv slot stores nothing (padding of a captured graph).
Shapes: T tokens, A query heads, G key/value heads, D head size, C latent row = rank + rope, N blocks, B block size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from afserve.kernels.triton_config import FUSED


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, heads, x_head, out_head, half, size,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate `heads` rows of one token; REST is the (padded) number of columns that are only copied."""
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (h < heads) & (i < half)
    cos = tl.load(cos_ptr + i, mask=i < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + i, mask=i < half, other=0.0).to(tl.float32)
    at = x_ptr + h * x_head + (2 * i if INTERLEAVED else i)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + (1 if INTERLEAVED else half), mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    to = out_ptr + h * out_head + i
    tl.store(to, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(to + half, (second * cos + first * sin).to(kind), mask=inside)
    if REST > 0:
        _copy_heads(
            x_ptr + 2 * half, out_ptr + 2 * half, heads, x_head, out_head, size - 2 * half, HEADS, REST
        )


@triton.jit
def _copy_heads(x_ptr, out_ptr, heads, x_head, out_head, size, HEADS: tl.constexpr, SIZE: tl.constexpr):
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, SIZE)[None, :]
    inside = (h < heads) & (d < size)
    x = tl.load(x_ptr + h * x_head + d, mask=inside, other=0.0)
    tl.store(out_ptr + h * out_head + d, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rope(
    x_ptr, out_ptr, cos_ptr, sin_ptr, position_ptr, heads, x_token, x_head, half, size,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(position_ptr + token).to(tl.int64) * half
    _turn_heads(
        x_ptr + token * x_token, out_ptr + token * heads * size, cos_ptr + angle, sin_ptr + angle,
        heads, x_head, size, half, size, HEADS, HALF, REST, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _rope_write_kv(
    q_ptr, k_ptr, v_ptr, out_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr,
    heads, groups, half, size, v_size, block_size, q_token, q_head, k_token, k_head, v_token, v_head,
    k_block, k_group, k_offset, v_block, v_group, v_offset,
    TURN: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, INTERLEAVED: tl.constexpr,
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
                q_ptr + token * q_token, out_ptr + token * heads * size, cos_ptr + angle, sin_ptr + angle,
                heads, q_head, size, half, size, HEADS, HALF, REST, INTERLEAVED,
            )  # fmt: skip
    elif slot >= 0:
        if part == 1:
            to = v_cache_ptr + block * v_block + offset * v_offset
            _copy_heads(v_ptr + token * v_token, to, groups, v_head, v_group, v_size, GROUPS, VALUES)
        else:
            to = k_cache_ptr + block * k_block + offset * k_offset
            if TURN:
                _turn_heads(
                    k_ptr + token * k_token, to, cos_ptr + angle, sin_ptr + angle,
                    groups, k_head, k_group, half, size, GROUPS, HALF, REST, INTERLEAVED,
                )  # fmt: skip
            else:
                _copy_heads(k_ptr + token * k_token, to, groups, k_head, k_group, size, GROUPS, KEYS)


@triton.jit
def _rope_write_latent(
    q_ptr, latent_ptr, key_ptr, out_ptr, cache_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr,
    heads, half, rank, block_size, q_token, q_head, latent_token, key_token, cache_block, cache_offset,
    HEADS: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    angle = tl.load(position_ptr + token).to(tl.int64) * half
    if tl.program_id(1) == 1:
        _turn_heads(
            q_ptr + token * q_token, out_ptr + token * heads * 2 * half, cos_ptr + angle, sin_ptr + angle,
            heads, q_head, 2 * half, half, 2 * half, HEADS, HALF, 0, INTERLEAVED,
        )  # fmt: skip
    elif slot >= 0:
        to = cache_ptr + slot // block_size * cache_block + slot % block_size * cache_offset
        _copy_heads(latent_ptr + token * latent_token, to, 1, 0, 0, rank, 1, RANK)
        _turn_heads(
            key_ptr + token * key_token, to + rank, cos_ptr + angle, sin_ptr + angle,
            1, 0, 0, half, 2 * half, 1, HALF, 0, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def _write_latent(
    latent_ptr,
    cache_ptr,
    slot_ptr,
    columns,
    block_size,
    latent_token,
    cache_block,
    cache_offset,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        to = cache_ptr + slot // block_size * cache_block + slot % block_size * cache_offset
        _copy_heads(latent_ptr + token * latent_token, to, 1, 0, 0, columns, 1, COLUMNS)


def rope(x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool) -> Tensor:
    """x_TAD turned by its positions; columns past twice cos_PD's are copied."""
    x_TAD, cos_PD, sin_PD = _packed_last(x_TAD), cos_PD.contiguous(), sin_PD.contiguous()
    tokens, heads, size = x_TAD.shape
    out_TAD = torch.empty(x_TAD.shape, dtype=x_TAD.dtype, device=x_TAD.device)
    half = cos_PD.shape[1]
    if out_TAD.numel():
        _rope[(tokens,)](
            x_TAD, out_TAD, cos_PD, sin_PD, position_T, heads, x_TAD.stride(0), x_TAD.stride(1), half, size,
            HEADS=_power(heads), HALF=_power(half), REST=_rest(size, half), INTERLEAVED=interleaved, **FUSED,
        )  # fmt: skip
    return out_TAD


def rope_write_kv(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor,
    k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor, interleaved: bool,
) -> Tensor:  # fmt: skip
    """Turned queries; the turned keys and the values go to their cache slots in the same launch."""
    q_TAD = _packed_last(q_TAD)
    out_TAD = torch.empty(q_TAD.shape, dtype=q_TAD.dtype, device=q_TAD.device)
    _launch_kv(
        q_TAD, k_TGD, v_TGD, out_TAD, (cos_PD, sin_PD, position_T), k_NGBD, v_NGBD, kv_slot_T, interleaved
    )
    return out_TAD


def write_kv(k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor) -> None:
    """Keys and values as they are to slots block * B + offset."""
    _launch_kv(k_TGD, k_TGD, v_TGD, k_TGD, None, k_NGBD, v_NGBD, kv_slot_T, False)


def _launch_kv(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_TAD: Tensor, turn: tuple[Tensor, Tensor, Tensor] | None,
    k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor, interleaved: bool,
) -> None:  # fmt: skip
    k_TGD, v_TGD = _packed_last(k_TGD), _packed_last(v_TGD)
    assert k_NGBD.stride(3) == v_NGBD.stride(3) == 1, "cache rows must be contiguous"
    tokens, groups, size = k_TGD.shape
    cos_PD, sin_PD, position_T = turn or (None, None, None)
    half = size // 2 if cos_PD is None else cos_PD.shape[1]
    if tokens:
        _rope_write_kv[(tokens, 3 if turn else 2)](
            q_TAD, k_TGD, v_TGD, out_TAD, k_NGBD, v_NGBD, cos_PD, sin_PD, position_T, kv_slot_T,
            q_TAD.shape[1], groups, half, size, v_TGD.shape[2], k_NGBD.shape[2],
            *q_TAD.stride()[:2], *k_TGD.stride()[:2], *v_TGD.stride()[:2], *k_NGBD.stride()[:3], *v_NGBD.stride()[:3],
            TURN=turn is not None, HEADS=_power(q_TAD.shape[1]), GROUPS=_power(groups), HALF=_power(half),
            REST=_rest(size, half), VALUES=_power(v_TGD.shape[2]), KEYS=_power(size), INTERLEAVED=interleaved, **FUSED,
        )  # fmt: skip


def rope_write_latent(
    q_TAR: Tensor, latent_TL: Tensor, key_TR: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor,
    cache_NBC: Tensor, kv_slot_T: Tensor, interleaved: bool,
) -> Tensor:  # fmt: skip
    """Turned rope part of the queries; (latent, turned key) go to their rows of the MLA cache."""
    q_TAR, cos_PD, sin_PD = _packed_last(q_TAR), cos_PD.contiguous(), sin_PD.contiguous()
    latent_TL, key_TR = _packed_last(latent_TL), _packed_last(key_TR)
    assert cache_NBC.stride(2) == 1, "cache rows must be contiguous"
    out_TAR = torch.empty(q_TAR.shape, dtype=q_TAR.dtype, device=q_TAR.device)
    tokens, heads, size = q_TAR.shape
    if tokens:
        _rope_write_latent[(tokens, 2)](
            q_TAR, latent_TL, key_TR, out_TAR, cache_NBC, cos_PD, sin_PD, position_T, kv_slot_T,
            heads, size // 2, latent_TL.shape[1], cache_NBC.shape[1],
            *q_TAR.stride()[:2], latent_TL.stride(0), key_TR.stride(0), *cache_NBC.stride()[:2],
            HEADS=_power(heads), HALF=_power(size // 2), RANK=_power(latent_TL.shape[1]), INTERLEAVED=interleaved,
            **FUSED,
        )  # fmt: skip
    return out_TAR


def write_latent(latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor) -> None:
    """Whole latent rows (compressed KV, then the turned key) to slots block * B + offset."""
    latent_TC = _packed_last(latent_TC)
    assert cache_NBC.stride(2) == 1, "cache rows must be contiguous"
    tokens, columns = latent_TC.shape
    if tokens:
        _write_latent[(tokens,)](
            latent_TC, cache_NBC, kv_slot_T, columns, cache_NBC.shape[1], latent_TC.stride(0), *cache_NBC.stride()[:2],
            COLUMNS=_power(columns), **FUSED,
        )  # fmt: skip


def _packed_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _power(n: int) -> int:
    return int(triton.next_power_of_2(n))


def _rest(size: int, half: int) -> int:
    return _power(size - 2 * half) if size > 2 * half else 0
