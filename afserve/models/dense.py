"""How an attention node keeps its linear maps: as the checkpoint has them, or rounded to int8 or int4 while they are
loaded. It packs what it is given, measures what rounding loses, and reads no weight.

Embeddings, norms, routers, gates of shared experts and rates of gated delta nets are never rounded.
"""

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.grouped import Groups
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedHeads, PackedLinear
from afserve.models.rounding import RoundingError


class Dense:
    """`kept`: auto, int8 (a scale per output) or int4 (a scale for 32 inputs). Raises ConfigError where the kernels do
    not keep that many bits for rows of `dtype`."""

    def __init__(self, ops: Ops, dtype: torch.dtype, kept: str = "auto") -> None:
        holds = {"int8": ops.holds_int8, "int4": ops.holds_int4}.get(kept)
        if holds is not None and (ops.backend_name != "native" or not holds(dtype)):
            raise ConfigError(
                f"dense_dtype: {kept} needs the native CPU library and float32 or bfloat16 rows; here are the "
                f"{ops.backend_name} kernels and {dtype}. Leave --dense-dtype at auto, or reinstall with a compiler",
                param="dense_dtype",
            )
        self._ops = ops
        self._int8, self._int4 = kept == "int8", Groups() if kept == "int4" else None
        self._error = None if holds is None else RoundingError(self._int4.size if self._int4 else None)
        self.name = kept if self._int4 is None else f"int4 in groups of {self._int4.size}"

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> PackedLinear:
        self._look_at(weight_OI)
        return self._ops.pack_linear(weight_OI, bias_O, self._int8, self._int4)

    def heads(self, weight_AOI: Tensor) -> PackedHeads:
        self._look_at(weight_AOI.flatten(0, 1))
        return self._ops.pack_heads(weight_AOI, self._int8, self._int4)

    def _look_at(self, weight_OI: Tensor) -> None:
        if self._error is not None:
            self._error.look_at(weight_OI)

    @property
    def rounding_error(self) -> float | None:
        """Relative, of all weights rounded so far; None where none was."""
        return None if self._error is None else self._error.relative
