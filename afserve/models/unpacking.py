"""Codes of a few bits out of the words that checkpoints pack them in, in plain PyTorch. It knows no file.

Shapes: O outputs, I inputs, G groups, W words of int32, P codes to a word.
"""

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the four-bit floats of the OCP Microscaling formats (MX v1.0, 5.3.3); the fourth bit is the sign."""

MX_GROUP = 32
_MX_BIAS = 127
_AWQ_ORDER = (
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
)  # where code i of eight lies in a word (AutoAWQ, utils/packing_utils.py)


def along_columns(words_RW: Tensor, bits: int) -> Tensor:
    """R x W words -> R x (W P) codes of 4 or 8 bits from 0 on, uint8; the lowest bits are the first column's.

    A word's bytes are taken as they lie in memory, the lowest first, as in the file.
    """
    pair = words_RW.contiguous().view(torch.uint8)
    if bits == 8:
        return pair
    return torch.stack((pair & 15, pair >> 4), -1).flatten(-2)


def along_rows(words_WC: Tensor, bits: int) -> Tensor:
    """W x C words -> (W P) x C codes."""
    return along_columns(words_WC.t(), bits).t()


def awq_columns(words_RW: Tensor) -> Tensor:
    """R x W words -> R x 8 W codes of 4 bits in AWQ's order."""
    codes = along_columns(words_RW, 4).unflatten(-1, (-1, 8))
    in_order: Tensor = codes[..., list(_AWQ_ORDER)]
    return in_order.flatten(-2)


def mx_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """(..., G, 16) bytes of two e2m1 codes, the low half first, and (..., G) exponents -> float32 (..., 32 G)."""
    code, scale = mx_codes(blocks, scales)
    values: Tensor = code.unflatten(-1, (-1, MX_GROUP)) * scale.unsqueeze(-1)
    return values.flatten(-2)


def mx_codes(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The same as int8 codes (..., 32 G), twice the numbers, and their scales (..., G), half of what is stored."""
    table = torch.tensor([2 * value for value in (*E2M1, *(-value for value in E2M1))], dtype=torch.int8)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)
    return table[codes.int()], torch.ldexp(torch.full(scales.shape, 0.5), scales.int() - _MX_BIAS)
