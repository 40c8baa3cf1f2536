"""How an attention node keeps its linear maps: as the checkpoint has them, or rounded to int8 or int4 while they are
loaded. It packs what it is given, and measures what rounding loses.

Weights of ggml's types and FP8 blocks stay as they are stored where the kernels multiply those; a map whose parts do
not fit together so is de-quantised.

Embeddings, norms, routers, gates of shared experts and rates of gated delta nets are never rounded.
"""

from typing import TypeVar

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.formats.ggml import GgmlRows, joined, panel_types
from afserve.kernels.formats.scaled import ScaledRows, joined_blocks
from afserve.kernels.grouped import Groups
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedHeads, PackedLinear
from afserve.models.blocks import dequantised
from afserve.models.rounding import RoundingError
from afserve.models.weights import SCALE_SUFFIX, WholeTensors

End = Tensor | GgmlRows
"""Rows of the embedding or the LM head: numbers, or as a GGUF file stores them."""
Weight = End | ScaledRows
"""Rows of any linear map: those, or FP8 with scales. All are cut and ordered by `weight[rows]`."""
Rows = TypeVar("Rows", Tensor, GgmlRows, Weight)
FP8 = "fp8"


class Dense:
    """`kept`: auto, model (numbers of `dtype`), fp8 (as stored), int8 (a scale per output) or int4 (a scale for 32
    inputs). Raises ConfigError where the kernels do not keep that many bits for rows of `dtype`."""

    def __init__(self, ops: Ops, dtype: torch.dtype, kept: str = "auto") -> None:
        holds = {"int8": ops.holds_int8, "int4": ops.holds_int4}.get(kept)
        if holds is not None and (ops.backend_name != "native" or not holds(dtype)):
            raise ConfigError(
                f"dense_dtype: {kept} needs the native CPU library and float32 or bfloat16 rows; here are the "
                f"{ops.backend_name} kernels and {dtype}. Leave --dense-dtype at auto, or reinstall with a compiler",
                param="dense_dtype",
            )
        blocks = ops.fp8_maps and ops.holds_fp8(dtype)
        if kept == FP8 and not blocks:
            raise ConfigError(
                "dense_dtype: fp8 needs Triton, a GPU of compute capability 8.9 or newer and 16-bit rows; here are "
                f"the {ops.backend_name} kernels and {dtype}. Leave --dense-dtype at auto",
                param="dense_dtype",
            )
        self._ops, self.dtype, self.holds_blocks = ops, dtype, blocks and kept in ("auto", FP8)
        self._ggml = ops.ggml if kept == "auto" and ops.ggml is not None and ops.ggml.holds(dtype) else None
        self._int8, self._int4 = kept == "int8", Groups() if kept == "int4" else None
        self._error = None if holds is None else RoundingError(self._int4.size if self._int4 else None)
        self.name = kept if self._int4 is None else f"int4 in groups of {self._int4.size}"

    def read(self, source: WholeTensors, name: str, shape: tuple[int, int]) -> Weight:
        """For `linear`."""
        if self.holds_blocks and source.has_tensor(name + SCALE_SUFFIX):
            blocks = source.block_scaled(name, shape)
            if blocks is not None:
                return ScaledRows.of(blocks)
        return self.read_end(source, name, shape)

    def read_end(self, source: WholeTensors, name: str, shape: tuple[int, int]) -> End:
        """The same of an embedding or LM head, which are in no blocks."""
        stored = None if self._ggml is None else source.ggml(name, shape)
        return source.tensor(name, shape, self.dtype) if stored is None else stored

    def linear(self, *parts: Weight, bias_O: Tensor | None = None) -> PackedLinear:
        """One map of all outputs of the parts."""
        stored = [part for part in parts if isinstance(part, GgmlRows)]
        if self._ggml is not None and len(stored) == len(parts) and panel_types(joined(stored)) is not None:
            return self._ggml.pack_linear(stored, bias_O, self.dtype)
        scaled = [part for part in parts if isinstance(part, ScaledRows)]
        blocks = joined_blocks(scaled) if scaled and len(scaled) == len(parts) else None
        if blocks is not None:
            return self._ops.pack_linear_fp8(blocks, bias_O, self.dtype)
        numbers = [self._numbers(part) for part in parts]
        weight_OI = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
        self._look_at(weight_OI)
        return self._ops.pack_linear(weight_OI, bias_O, self._int8, self._int4)

    def heads(self, weight_AOI: Tensor) -> PackedHeads:
        self._look_at(weight_AOI.flatten(0, 1))
        return self._ops.pack_heads(weight_AOI, self._int8, self._int4)

    def _numbers(self, part: Weight) -> Tensor:
        if isinstance(part, ScaledRows):
            return part.dequantised().to(self.dtype)
        return dequantised(part, self.dtype) if isinstance(part, GgmlRows) else part

    def _look_at(self, weight_OI: Tensor) -> None:
        if self._error is not None:
            self._error.look_at(weight_OI)

    @property
    def rounding_error(self) -> float | None:
        """Relative, of all weights rounded so far; None where none was."""
        return None if self._error is None else self._error.relative
