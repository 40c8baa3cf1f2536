"""Converts rows to e4m3 and back, with one float32 scale for each row and block of 128 columns.

A number is about its e4m3 value times its scale. DeepSeek-V3 sends its dispatches like this (technical report, arXiv
2412.19437, section 3.3). Example: a row of 7,168 columns in bf16 takes 14,336 bytes; in e4m3 with its 56 scales, 7,168
+ 224.
"""

import torch
from torch import Tensor
from torch.nn import functional

from afserve.comm.transport import SCALE_BLOCK

_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST = 1e-12


def quantise(x_RH: Tensor, value_RH: Tensor, scale_RS: Tensor) -> None:
    """Fill value_RH (e4m3) and scale_RS (float32), such as a mailbox's views."""
    block_RSB = _blocks(x_RH.float())
    scale_RS.copy_(block_RSB.abs().amax(-1).clamp_min(_SMALLEST) / _LARGEST)
    scaled_RH = (block_RSB / scale_RS[..., None]).flatten(1)[:, : x_RH.shape[1]]
    value_RH.copy_(scaled_RH.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn))


def dequantise(value_RH: Tensor, scale_RS: Tensor) -> Tensor:
    """float32 rows. The scales are the sender's; a NaN there spoils its own rows only."""
    block_RSB = _blocks(value_RH.float())
    return (block_RSB * scale_RS[..., None]).flatten(1)[:, : value_RH.shape[1]].contiguous()


def _blocks(x_RH: Tensor) -> Tensor:
    rows, hidden = x_RH.shape
    return functional.pad(x_RH, (0, -hidden % SCALE_BLOCK)).view(rows, -1, SCALE_BLOCK)
