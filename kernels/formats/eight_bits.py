"""Rows of a KV cache in 8 bits: a code for each number, and scales in float32 behind them. It knows no cache.

A number is code * scale. A scale is a row's largest magnitude over the largest code: 127 (int8, -127 .. 127) or 448
(fp8, e4m3). E.g. a key of 128 numbers and its value, 512 bytes in bfloat16, are 128 + 8 and 128 bytes: 0.516 of that.

    key     D codes, its scale, the scale of its value
    value   D codes
    latent  C codes, the scale of the latent, that of the rotary key behind it, whose size is another

A row's codes are its own numbers' alone, so they are the same in any batch. A row that is not finite gets NaN as its
scale, and stays so. Shapes: N blocks, B block size or
blocks, T tokens, G heads, D elements, C latent and rotary key, Y bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SCALES = 8  # bytes at the end of a key's or a latent's row
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def is_eight(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has rows as above."""
    return dtype in _LARGEST


def key_width(size: int, dtype: torch.dtype) -> int:
    """Elements of a key's or a latent's row of so many numbers."""
    return size + SCALES if is_eight(dtype) else size


def key_numbers(width: int, dtype: torch.dtype) -> int:
    """How many numbers a key's or a latent's row of so many elements has."""
    return width - SCALES if is_eight(dtype) else width


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of rows as bytes (int8), and a float32 scale of each row, (..., 1)."""
    wide, largest = x.float(), _LARGEST[dtype]
    scale = F.pad(wide.abs(), (0, 1)).amax(-1, keepdim=True) / largest
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    codes = torch.where(scale > 0, wide / scale, 0.0).clamp(-largest, largest)
    kept = codes.round().to(dtype) if dtype is torch.int8 else codes.to(dtype)
    return kept.view(torch.int8), scale


def key_value_rows(k_TGD: Tensor, v_TGD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bytes of keys and values, (T, G, D + 8) and (T, G, D)."""
    (k, k_scale), (v, v_scale) = rounded(k_TGD, dtype), rounded(v_TGD, dtype)
    return torch.cat((k, k_scale.view(torch.int8), v_scale.view(torch.int8)), -1), v


def latent_rows(latent_TC: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Bytes of latents of `rank` numbers with rotary keys behind them, (T, C + 8). Keys of an indexer are latents with
    nothing behind."""
    parts = [rounded(part, dtype) for part in (latent_TC[:, :rank], latent_TC[:, rank:])]
    return torch.cat([codes for codes, _ in parts] + [scale.view(torch.int8) for _, scale in parts], -1)


def pair_at(k_NGBD: Tensor, v_NGBD: Tensor, block_B: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of some blocks in float32, of a cache of any dtype."""
    k, v = _rows(k_NGBD, block_B), _rows(v_NGBD, block_B)
    if not is_eight(k.dtype):
        return k.float(), v.float()
    size = k.shape[-1] - SCALES
    scale = _scales(k, size)
    return k[..., :size].float() * scale[..., :1], v.float() * scale[..., 1:]


def latents_at(cache_NBC: Tensor, block_B: Tensor, rank: int) -> Tensor:
    """Latents of some blocks in float32, of a cache of any dtype."""
    row = _rows(cache_NBC, block_B)
    if not is_eight(row.dtype):
        return row.float()
    size = row.shape[-1] - SCALES
    scale, codes = _scales(row, size), row[..., :size].float()
    return torch.cat((codes[..., :rank] * scale[..., :1], codes[..., rank:] * scale[..., 1:]), -1)


def _rows(cache: Tensor, block_B: Tensor) -> Tensor:
    """PyTorch picks no rows of 8-bit floats."""
    return cache.view(torch.int8)[block_B].view(cache.dtype) if is_eight(cache.dtype) else cache[block_B]


def _scales(row_Y: Tensor, size: int) -> Tensor:
    return row_Y.view(torch.int8)[..., size:].contiguous().view(torch.float32)
