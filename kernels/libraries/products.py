"""Grouped products of FP8 experts by a library: rows of one slot after the other, each slot's padded to whole tiles.

What lies around them, from the plan of rows to the sum of parts, is `kernels/triton/experts_apart.py`. Shapes: P
places, K inputs, N outputs, E slots, G groups of 128 inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from afserve.kernels.formats.scaled import FP8, GROUP, blocks_of, spread
from afserve.kernels.libraries.tested import TestedOps, WrongAnswer, expect_close
from afserve.kernels.packed import ExpertShape

Answer = TypeVar("Answer")
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q_PK e4m3, scale_PG float32 by group, weight_ENK e4m3, float32 scales of its blocks, slot_P int32, below 0 for tiles
of nobody) -> (P, N) bfloat16; rows of nobody are left unwritten."""
OP = "expert_ffn"
_SEED = 38


@dataclass(slots=True)
class GroupedProducts:
    """Of slots of one size. Tiles have `rows` places; with `powers` scales have to be powers of two."""

    ops: TestedOps
    size: str
    rows: int
    powers: bool
    multiply: Multiply

    def compute_apart(self, call: Callable[[], Answer]) -> Answer | None:
        """None: own kernels shall."""
        return self.ops.compute_tested(OP, self.size, call)

    def expect_scales(self, *scales: Tensor) -> None:
        """Of a slot that is filled; a chip that multiplies by powers of two alone can't do with others."""
        if self.powers and not all(bool((torch.frexp(x)[0] == 0.5).all()) for x in scales):
            self.ops.refuse(OP, self.size, "its scales are no powers of two, as this chip multiplies by")


def size_of(shape: ExpertShape) -> str:
    return f"FP8 experts of {shape.hidden} x {shape.inner}"


def expect_products(products: GroupedProducts, shape: ExpertShape, device: torch.device) -> None:
    """Both of an expert, by two slots, with a row that is no number and a tile of nobody. Raises WrongAnswer."""
    if shape.dtype is not torch.bfloat16:
        raise WrongAnswer(f"{shape.dtype} rows")
    if shape.hidden % GROUP or shape.inner % GROUP:
        raise WrongAnswer(f"sizes are no multiples of {GROUP}")
    generator = torch.Generator().manual_seed(_SEED)
    for outputs, inputs in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
        _expect_product(products, outputs, inputs, generator, device)


def _expect_product(
    products: GroupedProducts, outputs: int, inputs: int, generator: torch.Generator, device: torch.device
) -> None:
    rows, groups = products.rows, inputs // GROUP
    slot_P = torch.tensor([1, 0, -1], dtype=torch.int32).repeat_interleave(rows).to(device)
    q_PK = _codes(generator, device, 3 * rows, inputs)
    q_PK[5, 7] = float("nan")
    weight_ENK = _codes(generator, device, 2, outputs, inputs)
    scale_PG = _powers(generator, device, groups, 3 * rows).t()
    scale_E = _powers(generator, device, 2, *blocks_of(outputs, inputs))
    answer = products.multiply(q_PK, scale_PG, weight_ENK, scale_E, slot_P)
    wide_PK = q_PK.float() * scale_PG.repeat_interleave(GROUP, 1)
    for tile, slot in enumerate((1, 0)):
        weight_NK = weight_ENK[slot].float() * spread(scale_E[slot], (outputs, inputs))
        part = slice(tile * rows, (tile + 1) * rows)
        truth = (wide_PK[part] @ weight_NK.T).to(torch.bfloat16)
        expect_close(f"{outputs} x {inputs}", answer[part], truth, least=0.0)


def _codes(generator: torch.Generator, device: torch.device, *size: int) -> Tensor:
    """Numbers up to 2, of either sign."""
    return (4 * torch.rand(size, generator=generator) - 2).to(FP8).to(device)


def _powers(generator: torch.Generator, device: torch.device, *size: int) -> Tensor:
    return torch.exp2(torch.randint(-8, -4, size, generator=generator).float()).to(device)
