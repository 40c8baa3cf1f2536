"""How a checkpoint stores weights in fewer bits than it computes in: plain numbers, no torch, no tensors."""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["pack-quantized", "scaled", "gptq", "awq", "mxfp4", "q4_0", "mixed"]
NATIVE_FP8_BITS = 8 + 64 * 8 / (128 * 64)
"""Of a weight in blocks of FP8 natively: a byte, and its share of the cache line of scales that 128 inputs of 64
outputs have."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """One way for all weights of a checkpoint; those that it stores as they are need none.

    pack-quantized: compressed-tensors' `weight_packed`, codes in int32 along the inputs, and `weight_scale`.
    scaled: compressed-tensors' `weight` in int8 or e4m3, and `weight_scale`.
    gptq: `qweight` in int32 along the inputs, `scales`, `qzeros`, `g_idx`. awq: the same along the outputs.
    mxfp4: experts as `NAME_blocks` of e2m1 pairs and `NAME_scales` that are powers of two, in groups of 32.
    q4_0, mixed, and mxfp4 too: of a `gguf` file, where every expert has tensors of its own, whatever the family's other
    checkpoints have; mixed are experts that are de-quantised.

    `expert_bits`, `map_bits` and `embedding_bits` are those of such a file: what a weight of experts, of other maps and
    of the embedding takes, its share of scales included, where the native library computes.

    `group` inputs share a scale; None: all inputs of an output, or with `per_tensor` the whole weight. `block`: outputs
    x inputs that share one. `ordered`: groups go by `g_idx` (act-order). `zero_shift` is added to stored zero points.
    """

    layout: Layout
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    per_tensor: bool = False
    symmetric: bool = True
    ordered: bool = False
    zero_shift: int = 0
    gguf: bool = False
    expert_bits: float = 16.0
    map_bits: float = 16.0
    embedding_bits: float = 16.0

    @property
    def e2m1(self) -> bool:
        """Whether codes are four-bit floats; their scales are powers of two."""
        return self.layout == "mxfp4"

    @property
    def regular(self) -> bool:
        """Whether a weight is a 4-bit code times the scale of its group, whose inputs lie side by side."""
        if self.e2m1 or self.layout == "q4_0":
            return True
        wide = self.group is None or self.group % 32 == 0
        return (
            self.layout in ("pack-quantized", "gptq")
            and self.bits == 4
            and self.symmetric
            and not self.ordered
            and not self.per_tensor
            and self.block is None
            and wide
        )

    def group_for(self, *inputs: int) -> int:
        """Inputs to a scale where weights have so many inputs: a multiple of 32 that is one group of all of them, if
        the checkpoint has one scale to an output."""
        return -(-max(inputs) // 32) * 32 if self.group is None else self.group
