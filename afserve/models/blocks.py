"""Numbers out of the blocks in which GGUF files store them, in plain PyTorch.

Source: the `dequantize_row_*` functions of ggml-quants.c. Shapes: N blocks of so many bytes -> N x numbers, float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from afserve.gguf.kinds import PACKED
from afserve.kernels.formats.ggml import GgmlRows
from afserve.kernels.grouped import Grouped
from afserve.models.unpacking import MX_GROUP, mx_codes

_PART = 1 << 22  # numbers that are de-quantised at a time
HALF = 16  # bytes of a block of 32 codes of 4 bits: the low half of each is of the first 16 numbers
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def unblocked(bytes_RB: Tensor, kind: str) -> Tensor:
    """R rows of blocks -> R x numbers."""
    size = PACKED[kind].size
    return _UNBLOCK[kind](bytes_RB.reshape(-1, size)).reshape(len(bytes_RB), -1)


def dequantised(rows: GgmlRows, dtype: torch.dtype) -> Tensor:
    """R x numbers, some rows at a time."""
    made = torch.empty((len(rows), rows.inputs), dtype=dtype)
    each = max(1, _PART // rows.inputs)
    for bytes_RB, values_RV in zip(rows.bytes_RB.split(each), made.split(each), strict=True):
        values_RV.copy_(unblocked(bytes_RB, rows.kind))
    return made


def groups(bytes_RB: Tensor, kind: str) -> Grouped:
    """Rows of Q4_0 or MXFP4 as groups of 32 inputs, without rounding; values are those of `unblocked`."""
    block_NB = bytes_RB.reshape(-1, PACKED[kind].size)
    rows = len(bytes_RB)
    if kind == "MXFP4":
        pair_NP = _nibbles(block_NB[:, 1:])
        packed = pair_NP[:, 0::2] | pair_NP[:, 1::2] << 4
        code, scale = mx_codes(packed.view(rows, -1, HALF), block_NB[:, 0].view(rows, -1))
        return Grouped(code, scale, MX_GROUP)
    code = _nibbles(block_NB[:, 2:]).sub(8).view(torch.int8)  # below 0 a byte wraps to what int8 means
    return Grouped(code.reshape(rows, -1), _half(block_NB, 0).view(rows, -1), MX_GROUP)


def _half(block_NB: Tensor, at: int) -> Tensor:
    """The float16 there as float32, N x 1."""
    return block_NB[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(byte_NB: Tensor) -> Tensor:
    """The low halves of all bytes, then the high ones."""
    return torch.cat((byte_NB & 15, byte_NB >> 4), 1)


def _by_chunk(byte_NB: Tensor, size: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Of each chunk of `size` bytes the bits at each shift, one shift after the other."""
    chunk_NCB = byte_NB.reshape(len(byte_NB), -1, size)
    return torch.stack([chunk_NCB >> shift & mask for shift in shifts], 2).flatten(1)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2)


def _fifths(byte_N4: Tensor) -> Tensor:
    """The fifth bit of each of 32 codes."""
    bit = torch.arange(8, dtype=torch.uint8)
    return (byte_N4.unsqueeze(2) >> bit & 1).flatten(1)


def _q5_0(b: Tensor) -> Tensor:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifths(b[:, 2:6]) << 4).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifths(b[:, 4:8]) << 4).float() + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].contiguous().view(torch.int8).float()


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b, 0) * _non_linear(_nibbles(b[:, 2:]))


def _non_linear(code: Tensor) -> Tensor:
    return torch.tensor(_NON_LINEAR, dtype=torch.float32)[code.int()]


def _mxfp4(b: Tensor) -> Tensor:
    return groups(b, "MXFP4").dequantised()


def _q2_k(b: Tensor) -> Tensor:
    scale, code = b[:, :16], _by_chunk(b[:, 16:80], 32, (0, 2, 4, 6), 3)
    step, least = _half(b, 80) * (scale & 15).float(), _half(b, 82) * (scale >> 4).float()
    return _spread(code.float(), step) - least.repeat_interleave(16, 1)


def _q3_k(b: Tensor) -> Tensor:
    high = _by_chunk(b[:, :32], 32, tuple(range(8)), 1)
    code = _by_chunk(b[:, 32:96], 32, (0, 2, 4, 6), 3)
    low, top = b[:, 96:104], b[:, 104:108]
    lows = torch.cat((low & 15, low >> 4), 1)
    tops = torch.cat([top >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    scale = (lows | tops << 4).float() - 32
    return _spread(code.float() - 4 * (1 - high.float()), _half(b, 108) * scale)


def _scales_and_mins(byte_N12: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits."""
    a, b, c = byte_N12.split(4, 1)
    scale = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), 1)
    least = torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), 1)
    return scale.float(), least.float()


def _k_values(b: Tensor, code: Tensor) -> Tensor:
    scale, least = _scales_and_mins(b[:, 4:16])
    spread = _spread(code.float(), _half(b, 0) * scale)
    return spread - (_half(b, 2) * least).repeat_interleave(32, 1)


def _q4_k(b: Tensor) -> Tensor:
    return _k_values(b, _by_chunk(b[:, 16:], 32, (0, 4), 15))


def _q5_k(b: Tensor) -> Tensor:
    high = _by_chunk(b[:, 16:48], 32, tuple(range(8)), 1)
    return _k_values(b, _by_chunk(b[:, 48:], 32, (0, 4), 15) | high << 4)


def _q6_k(b: Tensor) -> Tensor:
    low = _by_chunk(b[:, :128], 64, (0, 4), 15)
    high = _by_chunk(b[:, 128:192], 32, (0, 2, 4, 6), 3)
    scale = b[:, 192:208].contiguous().view(torch.int8).float()
    return _spread((low | high << 4).float() - 32, _half(b, 208) * scale)


def _iq4_xs(b: Tensor) -> Tensor:
    high = b[:, 2:4].contiguous().view(torch.uint16).int()  # N x 1, two bits of each of eight scales
    pair = torch.arange(8, dtype=torch.int32)
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), 2).flatten(1).int()
    scale = (low | (high >> 2 * pair & 3) << 4) - 32
    code = _by_chunk(b[:, 8:], 16, (0, 4), 15)
    return _spread(_non_linear(code), _half(b, 0) * scale.float())


def _spread(value_NV: Tensor, scale_NS: Tensor) -> Tensor:
    """Each scale times as many values that lie side by side."""
    count, scales = scale_NS.shape
    return (value_NV.view(count, scales, -1) * scale_NS.unsqueeze(2)).flatten(1)


_UNBLOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
