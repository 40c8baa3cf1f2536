"""Weights in whatever order a backend likes best; made once at load, opaque to everyone else.

The torch tensors are what the reference reads; `handle` is what a fast backend keeps instead.
`dtype` is that of the rows the weights multiply, which for int8 weights is not their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.formats.ggml import GgmlRows
from afserve.kernels.grouped import Groups
from afserve.kernels.pointwise import gelu_tanh, sigmoid, silu


@dataclass(frozen=True, slots=True)
class Gating:
    """How an FFN joins its projections: silu(gate) * up; with a `limit` it is gate * sigmoid(alpha * gate) * (up + 1),
    where the gate is at most `limit` and up is within it on both sides (gpt-oss), or, `bounded`, silu(gate) * up within
    the same limits (Step 3.7); `gelu` stands in silu's place. `squared`: there is no gate, it is relu(up)^2 (Nemotron).
    """

    limit: float | None = None
    alpha: float = 1.0
    gelu: bool = False
    bounded: bool = False
    squared: bool = False

    @property
    def odd(self) -> str:
        """What it is called where only some backends know it; empty for SiLU and for gpt-oss' clamped one."""
        if self.gelu:
            return "GELU"
        if self.bounded:
            return "a bounded SwiGLU"
        return "ReLU squared" if self.squared else ""

    @property
    def projections(self) -> int:
        """That are joined: gate and up, or up alone."""
        return 1 if self.squared else 2

    def join(self, both: Tensor) -> Tensor:
        """Of the last dimension, which has the gate before up."""
        if self.squared:
            return F.relu(both).square()
        gate, up = both.chunk(2, dim=-1)
        if self.gelu:
            return gelu_tanh(gate).to(gate.dtype) * up
        if self.limit is None:
            return silu(gate).to(gate.dtype) * up
        if self.bounded:
            return silu(gate).to(gate.dtype).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * sigmoid(gate * self.alpha).to(gate.dtype) * (up + 1)


SWIGLU = Gating()


@dataclass(slots=True)
class PackedLinear:
    """y_TO = x_TI @ weight_OI^T + bias_O."""

    outputs: int
    inputs: int
    weight_OI: Tensor | None
    bias_O: Tensor | None
    handle: object | None = None
    dtype: torch.dtype = torch.float32


@dataclass(slots=True)
class PackedHeads:
    """y_TAO[t, a] = x_TAI[t, a] @ weight_AOI[a]^T."""

    heads: int
    outputs: int
    inputs: int
    weight_AOI: Tensor | None
    handle: object | None = None
    dtype: torch.dtype = torch.float32


Biases = tuple[Tensor, Tensor]
"""Of one expert: gate_up_bias_J and down_bias_H."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What slots are made for: their number, the sizes of an expert, the dtype of its rows, biases, the gating; and for
    how many slots there is memory, if not for all."""

    slots: int
    hidden: int
    inner: int
    dtype: torch.dtype
    bias: bool = False
    gating: Gating = SWIGLU
    places: int | None = None

    @property
    def joined(self) -> int:
        """Rows of gate over up."""
        return self.gating.projections * self.inner

    @property
    def plain(self) -> bool:
        """SwiGLU without biases, which every backend knows."""
        return self.gating == SWIGLU and not self.bias


@dataclass(slots=True)
class PackedExperts:
    """E slots of an FFN: gate_up_EJH stacks gate over up (J = 2 I; I without gates), joined as `gating` says. Both
    biases, or none.

    `among`: over how many experts, of all nodes, choices are spread; 0: these slots. A slot is expected to get a share
    of the choices that a call has; most others are other nodes'.

    `place_E`: where there is memory for fewer experts, which of the tensors' rows has a slot's weights; -1: none has.
    `ggml`: the types of both, where they are kept as ggml's. `coded`: tensors by slot that a handle has beside these.
    """

    experts: int
    hidden: int
    inner: int
    gate_up_EJH: Tensor | None
    down_EHI: Tensor | None
    handle: object | None = None
    dtype: torch.dtype = torch.float32
    int8: bool = False
    gating: Gating = SWIGLU
    gate_up_bias_EJ: Tensor | None = None
    down_bias_EH: Tensor | None = None
    int4: Groups | None = None
    bias: bool = False
    place_E: list[int] | None = None
    ggml: tuple[str, str] | None = None
    fp8: bool = False
    among: int = 0
    coded: tuple[Tensor, ...] = ()

    @property
    def joined(self) -> int:
        """Rows of gate over up."""
        return self.gating.projections * self.inner

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        """What torch holds of the slots; a slot's row in each of them is all there is of an expert."""
        plain = self.gate_up_EJH, self.down_EHI, self.gate_up_bias_EJ, self.down_bias_EH
        return (*(tensor for tensor in plain if tensor is not None), *self.coded)

    def rows_expected(self, choices: int) -> int:
        """Of a slot, rounded up, of so many choices that rows make, those of other nodes' experts among them."""
        return -(-choices // max(self.experts, self.among))

    def put(self, slot: int, place: int) -> None:
        assert self.place_E is not None, "these slots have memory of their own"
        self.place_E[slot] = place

    def place_of(self, slot: int) -> int:
        """Raises IndexError where the slot's weights are not in memory."""
        place = slot if self.place_E is None else self.place_E[slot]
        if place < 0:
            raise IndexError(f"slot {slot} has no weights in memory")
        return place


class GgmlPacking(Protocol):
    """What packs weights of ggml's types; backends without one leave de-quantising to whoever reads them."""

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether rows of `dtype` are multiplied by them."""

    def pack_linear(
        self, parts: Sequence[GgmlRows], bias_O: Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """Of `joined` parts, for rows of `dtype`. Raises ValueError where `panel_types` has none of them."""

    def empty_experts(self, shape: ExpertShape, kinds: tuple[str, str]) -> PackedExperts:
        """As of `Ops`; gate and up are of the first type, down is of the second."""

    def set_expert(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up: GgmlRows,
        down: GgmlRows,
        biases: Biases | None = None,
    ) -> None:
        """As of `Ops`. Raises ValueError for another type or shape than the slots have."""

    def rows_of(self, table: GgmlRows, token_T: Tensor, dtype: torch.dtype) -> Tensor:
        """De-quantised rows of an embedding, T x H. Raises IndexError for a token that has none."""
