"""A paged GQA cache in tiles, as the native library multiplies it where it lies (native/tiles.h).

Shapes: N blocks, G key/value heads, B tokens of a block, D elements of a head; a word is 4 bytes, so L = 2 elements
of bf16 or 1 of float32. Rows are (N, G, B, D). Tiles are sixteen tokens of a head:

    keys    (N, G, B / 16, D / L, 16 tokens, L)                    products over D, a column per token
    values  (N, G, B / 16, D / 16 W, 16 / L, W, 16 columns, L)     products over tokens, a column per element

where W is 4 if D is a multiple of 64, else 1. The number of dimensions says which of the three a cache is.
"""

import torch
from torch import Tensor

TOKENS = 16
ROWS, KEYS, VALUES = 4, 6, 8  # dimensions
_LAYOUT = {ROWS: 0, KEYS: 1, VALUES: 2}  # codes of native/tiles.h
_BY_TOKEN = {KEYS: (0, 1, 2, 4, 3, 5), VALUES: (0, 1, 2, 4, 7, 3, 5, 6)}
_FROM_TOKEN = {KEYS: (0, 1, 2, 4, 3, 5), VALUES: (0, 1, 2, 5, 3, 6, 7, 4)}


def fits(block_size: int, size: int) -> bool:
    """Whether blocks of so many tokens and heads of so many elements are whole tiles."""
    return block_size % TOKENS == 0 and size % TOKENS == 0


def key_shape(blocks: int, groups: int, block_size: int, size: int, dtype: torch.dtype) -> tuple[int, ...]:
    lane = 4 // dtype.itemsize
    return blocks, groups, block_size // TOKENS, size // lane, TOKENS, lane


def value_shape(blocks: int, groups: int, block_size: int, size: int, dtype: torch.dtype) -> tuple[int, ...]:
    lane = 4 // dtype.itemsize
    wide = 4 if size % (4 * TOKENS) == 0 else 1
    return blocks, groups, block_size // TOKENS, size // (TOKENS * wide), TOKENS // lane, wide, TOKENS, lane


def views(flat: Tensor, shape: tuple[int, int, int], sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Keys and values of `shape` blocks, heads and tokens in one piece of memory, those of a block side by side."""
    blocks, groups, block_size = shape
    keys, values = (groups * block_size * size for size in sizes)
    rows = flat.view(blocks, keys + values)
    return (
        rows[:, :keys].view(key_shape(*shape, sizes[0], flat.dtype)),
        rows[:, keys:].view(value_shape(*shape, sizes[1], flat.dtype)),
    )


def shape_of(cache: Tensor) -> tuple[int, int, int, int]:
    """(N, G, B, D) of a cache in rows or tiles."""
    shape = cache.shape
    if len(shape) == KEYS:
        return shape[0], shape[1], shape[2] * TOKENS, shape[3] * shape[5]
    if len(shape) == VALUES:
        return shape[0], shape[1], shape[2] * TOKENS, shape[3] * shape[5] * TOKENS
    return shape[0], shape[1], shape[2], shape[3]


def as_rows(cache: Tensor) -> Tensor:
    """(N, G, B, D): the cache itself, or a copy where it is in tiles."""
    return cache if cache.dim() == ROWS else by_token(cache).reshape(shape_of(cache))


def by_token(cache: Tensor) -> Tensor:
    """A view of tiles with tokens before elements: the dimensions of B, then those of D. Another cache is as it is."""
    return cache.permute(_BY_TOKEN[cache.dim()]) if cache.dim() in _BY_TOKEN else cache


def from_token(by_token: Tensor) -> Tensor:
    """The view that `by_token` was made of."""
    return by_token.permute(_FROM_TOKEN[by_token.dim()]) if by_token.dim() in _FROM_TOKEN else by_token


def layout_of(cache: Tensor) -> int:
    """The code of native/tiles.h; caches that are neither of keys nor of values are in rows."""
    return _LAYOUT.get(cache.dim(), _LAYOUT[ROWS])


def place(cache: Tensor) -> tuple[int, int, int, int]:
    """What the native library is told: strides of blocks, heads and tokens in elements, and the layout's code."""
    stride = cache.stride()
    return stride[0], stride[1], stride[2] if cache.dim() == ROWS else 0, _LAYOUT[cache.dim()]
