"""The routed experts of one expert node: slots of packed weights per MoE layer, filled and emptied by name.

A bank eats rows and slot ids; it knows neither who sent them nor what a placement is.
Shapes: R rows, K top-k, H hidden, E slots, J = 2 I inner.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedExperts
from afserve.models.naming import Naming
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec

Held = Iterable[tuple[int, int, int]]


class ExpertBank:
    """`held` lists (MoE layer number, slot, expert); slots not listed stay zero."""

    def __init__(self, spec: ModelSpec, slots: int, ops: Ops) -> None:
        self._spec, self._slots, self._ops = spec, slots, ops
        self._layers: list[PackedExperts | None] = [None] * spec.moe_layers

    @property
    def slots(self) -> int:
        return self._slots

    def load(
        self,
        held: Held,
        source: TensorSource,
        naming: Naming,
        dtype: torch.dtype,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        """Read this node's experts, one layer at a time, and pack them."""
        by_layer: dict[int, list[tuple[int, int]]] = {}
        for number, slot, expert in held:
            if not 0 <= slot < self._slots:
                raise ConfigError(f"slot {slot} of MoE layer {number} is outside [0, {self._slots})")
            by_layer.setdefault(number, []).append((slot, expert))
        for done, (number, wanted) in enumerate(sorted(by_layer.items())):
            self._layers[number] = self._pack(self._spec.moe_layer_ids[number], wanted, source, naming, dtype)
            progress((done + 1) / len(by_layer))

    def _pack(
        self,
        layer: int,
        wanted: list[tuple[int, int]],
        source: TensorSource,
        naming: Naming,
        dtype: torch.dtype,
    ) -> PackedExperts:
        hidden, inner = self._spec.hidden, self._spec.moe.inner
        device = self._ops.device
        gate_up = torch.zeros((self._slots, 2 * inner, hidden), dtype=dtype, device=device)
        down = torch.zeros((self._slots, hidden, inner), dtype=dtype, device=device)
        for slot, expert in wanted:
            gate_name, up_name, down_name = naming.expert(layer, expert)
            gate_up[slot, :inner] = source.tensor(gate_name, (inner, hidden), dtype)
            gate_up[slot, inner:] = source.tensor(up_name, (inner, hidden), dtype)
            down[slot] = source.tensor(down_name, (hidden, inner), dtype)
        return self._ops.pack_experts(gate_up, down)

    def forward(self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor) -> None:
        """out_RH = weighted sum over each row's slots (negative slots skipped); `layer` counts MoE layers."""
        packed = self._layers[layer]
        if packed is None:
            raise ConfigError(f"this node holds no experts of MoE layer {layer}")
        self._ops.expert_ffn(x_RH, slot_RK, weight_RK, packed, out_RH)
