"""Weights as ggml's types store them: rows of bytes, which the native library multiplies without de-quantising them.

What the bytes mean is in native/ggml.h. It knows no kernel and no file. Shapes: R rows, B bytes of a row, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TYPES = ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # in the order of native/ggml.h
PANEL = 64  # outputs that have one type


@dataclass(frozen=True, slots=True)
class GgmlRows:
    """Rows of `inputs` numbers each, all of one of TYPES: bytes_RB uint8, as a GGUF file has them."""

    kind: str
    bytes_RB: Tensor
    inputs: int

    @property
    def number(self) -> int:
        """Of its type, for the library."""
        return TYPES.index(self.kind)

    @property
    def bits(self) -> float:
        """Of a weight, its share of the scales included."""
        return 8 * self.bytes_RB.shape[1] / self.inputs

    @property
    def device(self) -> torch.device:
        return self.bytes_RB.device

    def __len__(self) -> int:
        return len(self.bytes_RB)

    def __getitem__(self, rows: slice | Tensor) -> "GgmlRows":
        """Some of them, or those of these numbers in this order."""
        return GgmlRows(self.kind, self.bytes_RB[rows], self.inputs)


def joined(parts: Sequence[GgmlRows]) -> list[GgmlRows]:
    """The same rows one after the other, neighbours of one type as one part."""
    made: list[GgmlRows] = []
    for part in parts:
        if made and made[-1].kind == part.kind:
            part = GgmlRows(part.kind, torch.cat((made.pop().bytes_RB, part.bytes_RB)), part.inputs)
        made.append(part)
    return made


def panel_types(parts: Sequence[GgmlRows]) -> list[int] | None:
    """The type of every 64 outputs of `joined` parts; None where a part ends within 64."""
    if any(len(part) % PANEL for part in parts[:-1]):
        return None
    return [part.number for part in parts for _ in range(-(-len(part) // PANEL))]
