"""Weights of 4 bits as a GPU's kernels read them: two codes to a byte, and scales of four-bit floats as exponents.

Bytes are by blocks of 64 inputs: a block's byte i holds inputs i (low half) and i + 32. It knows no kernel. Shapes:
O x I weight, G groups.
"""

import torch
from torch import Tensor

BLOCK, HALF = 64, 32  # inputs and bytes


def float_codes(code_OI: Tensor) -> Tensor:
    """Twice the numbers of four-bit floats -> a sign and the place among 0, 1, 2, 3, 4, 6, 8, 12, int8."""
    magnitudes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8, device=code_OI.device)
    place = torch.bucketize(code_OI.abs(), magnitudes)
    return (place | (code_OI < 0).int() << 3).to(torch.int8)


def exponents(scale_OG: Tensor) -> Tensor:
    """Powers of two -> uint8 e, where 2^(e - 127) is the scale: 255 where one is not finite, 0 (no weight at all) for
    nought and what is below 2^-126. Raises ValueError for a scale that is no power of two."""
    mantissa, exponent = torch.frexp(scale_OG)
    finite, nought = scale_OG.isfinite(), scale_OG == 0
    if not bool(((mantissa == 0.5) | nought | ~finite).all()):
        raise ValueError("experts: scales of four-bit floats are powers of two, and one of these is not")
    held = torch.where(nought, 0, (exponent + 126).clamp(0, 254))
    return torch.where(finite, held, 255).to(torch.uint8)


def packed_halves(code_OI: Tensor) -> Tensor:
    """int8 codes -8 .. 7 -> (O, 32 for each block) uint8, in two's complement; inputs beyond the last are 0."""
    outputs, inputs = code_OI.shape
    wide = torch.nn.functional.pad(code_OI, (0, -inputs % BLOCK)).view(torch.uint8).view(outputs, -1, 2, HALF)
    return ((wide[:, :, 0] & 15) | (wide[:, :, 1] << 4)).flatten(1)
