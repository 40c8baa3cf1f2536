"""What a layer's expert slots keep of weights: the rows' dtype, int8, FP8 blocks, or int4 groups.

With `auto` a quantised checkpoint stays as it is stored where the backend multiplies that, and is de-quantised
elsewhere. It reads no weight.
"""

from dataclasses import dataclass

import torch

from afserve.errors import ConfigError
from afserve.families.pattern.naming import Naming
from afserve.kernels.grouped import Groups
from afserve.kernels.ops import Ops
from afserve.models.weights import SCALE_SUFFIX, TensorSource
from afserve.quantization import NATIVE_FP8_BITS
from afserve.spec import ModelSpec
from afserve.spec_parts import projections_of


@dataclass(frozen=True, slots=True)
class KeptFormat:
    """At most one of int8, fp8, int4 and ggml. `stored`: the checkpoint has it so, and nothing is rounded. `ggml`: the
    types of gate and up, and of down, which have so many `ggml_bits` to a weight."""

    int8: bool = False
    fp8: bool = False
    int4: Groups | None = None
    stored: bool = False
    ggml: tuple[str, str] | None = None
    ggml_bits: float = 0.0

    @property
    def rounds(self) -> bool:
        return not self.stored and (self.int8 or self.int4 is not None)

    @property
    def group(self) -> int | None:
        return None if self.int4 is None else self.int4.size

    @property
    def name(self) -> str:
        return "int8" if self.int4 is None else f"int4 in groups of {self.int4.size}"

    def bits(self, dtype: torch.dtype) -> float:
        """Of a weight."""
        if self.ggml is not None:
            return self.ggml_bits
        if self.int4 is not None:
            return self.int4.bits
        if self.fp8:
            return NATIVE_FP8_BITS
        return 8.0 if self.int8 else 8.0 * dtype.itemsize


def kept_as_stored(spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> tuple[str, ...]:
    """The formats of fewer bits in which `auto` leaves a checkpoint's experts with these kernels and rows of `dtype`;
    elsewhere the same weights are rounded to `dtype`, so that what is computed with them differs."""
    how = spec.quantization
    in_ggml = how is not None and how.gguf
    held = {
        "fp8": spec.in_fp8_blocks and ops.holds_fp8(dtype),
        "int4": how is not None and not in_ggml and ops.holds_int4(dtype),
        "ggml": in_ggml and ops.ggml is not None and ops.ggml.holds(dtype),
    }
    return tuple(name for name, is_held in held.items() if is_held)


class Keeping:
    """The choice for each MoE layer. Raises ConfigError where `expert_dtype` asks for what the kernels lack."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        source: TensorSource,
        naming: Naming,
        dtype: torch.dtype,
        expert_dtype: str,
    ) -> None:
        self._spec, self._ops, self._source, self._naming = spec, ops, source, naming
        self._dtype, self._asked = dtype, expert_dtype
        holds = {"int8": ops.holds_int8, "int4": ops.holds_int4}.get(expert_dtype)
        if holds is not None and not holds(dtype):
            raise ConfigError(
                f"expert_dtype: {expert_dtype} experts need the native CPU library and float32 or bfloat16 rows, or "
                f"Triton; here are the {ops.backend_name} kernels and {dtype}. Leave --expert-dtype at auto, or "
                "reinstall with a compiler",
                param="expert_dtype",
            )

    def of(self, layer: int) -> KeptFormat:
        """`layer` is a MoE layer number."""
        if self._asked == "int8":
            return KeptFormat(int8=True)
        ggml = self._stored_ggml(layer) if self._asked == "auto" else None
        if ggml is not None:
            return ggml
        stored = self._stored_int4(layer)
        if stored is not None:
            return KeptFormat(int4=stored, stored=True)
        if self._asked == "int4":
            return KeptFormat(int4=Groups(), stored=self._source.makes_int4)
        return KeptFormat(fp8=self._stays_fp8(layer), stored=True)

    def _stored_ggml(self, layer: int) -> KeptFormat | None:
        """As the layer's first expert is stored, where the library multiplies that; gate and up are one product."""
        ggml, how = self._ops.ggml, self._spec.quantization
        if ggml is None or how is None or not how.gguf or not ggml.holds(self._dtype):
            return None
        hidden, inner = self._spec.expert_width, self._spec.moe.inner
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        names = self._naming.expert(self._spec.moe_layer_ids[layer], 0)
        gate, up, down = (self._source.ggml(*one) for one in zip(names, shapes, strict=True))
        if gate is None or up is None or down is None or gate.kind != up.kind:
            return None
        bits = (2 * gate.bits + down.bits) / 3
        return KeptFormat(stored=True, ggml=(gate.kind, down.kind), ggml_bits=bits)

    def _gate(self, layer: int) -> str | None:
        """A checkpoint may leave some layers' experts in 16 bits, so each layer is asked for its first expert."""
        stacked = self._naming.stacked
        if stacked is not None and not stacked.sometimes:
            return None
        return self._naming.expert(self._spec.moe_layer_ids[layer], 0)[
            -projections_of(self._spec.moe.activation)
        ]

    def _stays_fp8(self, layer: int) -> bool:
        moe = self._spec.layer(self._spec.moe_layer_ids[layer]).moe
        if moe is None or moe.activation != "silu":  # blocks are multiplied by a plain SwiGLU alone
            return False
        if not self._ops.holds_fp8(self._dtype) or not self._spec.in_fp8_blocks:
            return False
        gate = self._gate(layer)
        return gate is not None and self._source.has_tensor(gate + SCALE_SUFFIX)

    def _stored_int4(self, layer: int) -> Groups | None:
        """The groups that the checkpoint has, where slots can hold them; scales stay as precise as they are."""
        how = self._spec.quantization
        if how is None or not self._ops.holds_int4(self._dtype):
            return None
        stacked = self._naming.stacked
        if how.e2m1 and stacked is not None:
            first = self._naming.in_moe(self._spec.moe_layer_ids[layer], stacked.gate_up)
        else:
            first = self._gate(layer) or ""
        if not self._source.has_int4(first):
            return None
        size = how.group_for(self._spec.expert_width, self._spec.moe.inner)
        return Groups(size, wide=not how.e2m1, e2m1=how.e2m1)
