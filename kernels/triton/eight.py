"""Rows of a KV cache in 8 bits in Triton's kernels: their codes and scales, to the byte those of
`formats/eight_bits.py`, and the products that they are read for.

A cache's elements are bytes, so an offset behind its pointer is one of bytes. Scales are read and written as words:
rows begin at multiples of 4 bytes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.errors import ConfigError
from afserve.kernels.formats.eight_bits import SCALES, is_eight
from afserve.kernels.triton.launch import launched, power_of_two
from afserve.kernels.triton.quant import to_fp8

_WORD = 4  # bytes of a scale
WORD = tl.constexpr(_WORD)
_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 that it was added to has no fraction any more


def expect_words(width: int, dtype: torch.dtype, has_fp8: bool) -> None:
    """ConfigError where kernels do not read rows of so many elements of a dtype."""
    if is_eight(dtype) and width % _WORD:
        told = f"rows of {width} bytes have scales across words; kernels of GPUs read whole ones"
        raise ConfigError(f"--kv-dtype: {told}. Leave it out", param="kv_dtype")
    if dtype is torch.float8_e4m3fn and not has_fp8:
        told = "this GPU has no FP8 conversions (compute capability 8.9 or newer); use int8, or leave it out"
        raise ConfigError(f"--kv-dtype fp8: {told}", param="kv_dtype")


def rows_dtype(cache: Tensor, x: Tensor) -> torch.dtype:
    """What rows of a cache are multiplied in, for queries x: theirs, where it has codes."""
    return x.dtype if is_eight(cache.dtype) else cache.dtype


def begins_at(cache: Tensor) -> int:
    """Of how many bytes the beginnings of a cache's rows of codes are multiples; 0 where they have none."""
    if not is_eight(cache.dtype):
        return 0
    return _WORD if cache.shape[-1] % (2 * _WORD) else 2 * _WORD


@triton.jit
def magnitude(x):
    """Infinite for what is no number, so that a maximum shows it."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def row_scale(largest, kind: tl.constexpr):
    LARGEST: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    return tl.where(largest < float("inf"), tl.div_rn(largest, LARGEST), float("nan"))


@triton.jit
def codes_of(x, scale, kind: tl.constexpr):
    counts = scale > 0.0  # neither nought nor no number
    code = tl.where(counts, tl.div_rn(x, tl.where(counts, scale, 1.0)), 0.0)
    if kind == tl.int8:
        kept = (tl.clamp(code, -127.0, 127.0) + _HALF_EVEN - _HALF_EVEN).to(tl.int8)
    else:
        kept = to_fp8(code)
    return kept


@triton.jit
def put_scale(at_ptr, scale, mask):
    tl.store(at_ptr.to(tl.pointer_type(tl.float32)), scale, mask=mask)


@triton.jit
def scales_at(at_ptr, mask):
    """The two at the end of a key's or a latent's row."""
    word_ptr = at_ptr.to(tl.pointer_type(tl.float32))
    return tl.load(word_ptr, mask=mask, other=0.0), tl.load(word_ptr + 1, mask=mask, other=0.0)


@triton.jit
def as_numbers(code, kind: tl.constexpr):
    """Exact in every dtype of rows."""
    return code.to(tl.float32).to(kind)


@triton.jit
def weighted_rows(weight, code, scale, kind: tl.constexpr):
    """Both factors of weights times rows. Scales are multiplied into the weights, but into the numbers where weights
    have float16's range."""
    if kind == tl.float16:
        number = (code.to(tl.float32) * scale[:, None]).to(kind)
    else:
        weight *= scale[None, :]
        number = as_numbers(code, kind)
    return weight.to(kind), number


@launched
def _gather_latents(cache_ptr, row_ptr, out_ptr, rank, columns, width, COLUMNS: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    cache_ptr += tl.load(row_ptr + m) * width
    c = tl.arange(0, COLUMNS)
    word_ptr = (cache_ptr + columns).to(tl.pointer_type(tl.float32))
    scale = tl.where(c < rank, tl.load(word_ptr), tl.load(word_ptr + 1))
    code = tl.load(cache_ptr + c, mask=c < columns, other=0.0)
    number = (code.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m * columns + c, number, mask=c < columns)


def gather_latents(cache_NBC: Tensor, row_M: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """(M, C): these rows of a cache, rounded to `dtype` where they have codes."""
    rows = cache_NBC.flatten(0, 1)
    if not is_eight(rows.dtype):
        return rows[row_M]
    columns = rows.shape[1] - SCALES
    latent_MC = torch.empty((len(row_M), columns), dtype=dtype, device=rows.device)
    wide = power_of_two(columns)
    _gather_latents[(len(row_M),)](rows, row_M, latent_MC, rank, columns, rows.shape[1], COLUMNS=wide)
    return latent_MC
