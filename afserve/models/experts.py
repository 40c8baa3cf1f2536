"""The routed experts of one node: slots of packed weights per MoE layer, filled one expert at a time.

A bank eats rows and slot ids; it knows neither who sent them nor what a placement is. An FP8 checkpoint stays FP8
where the backend multiplies its blocks, and is de-quantised elsewhere; `int8` keeps any in a byte per weight. A slot
may be filled while others are in use; nobody may name it meanwhile. Shapes: R rows, K top-k, H hidden, J = 2 I inner.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.families.naming import Naming
from afserve.kernels.gating import Gating
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedExperts
from afserve.kernels.scaled import GROUP
from afserve.models.expert_tensors import read_expert
from afserve.models.weights import SCALE_SUFFIX, TensorSource
from afserve.spec import ModelSpec

Held = Sequence[tuple[int, int, int]]


class ExpertBank:
    """`slots` per MoE layer, all empty until `fill`ed. Layers are MoE layer numbers everywhere."""

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        ops: Ops,
        source: TensorSource,
        naming: Naming,
        dtype: torch.dtype,
        int8: bool = False,
    ) -> None:
        if int8 and not ops.holds_int8(dtype):
            raise ConfigError(
                f"expert_dtype: int8 experts need the native CPU library and float32 or bfloat16 rows; here are the "
                f"{ops.backend_name} kernels and {dtype}. Leave --expert-dtype at auto, or reinstall with a compiler",
                param="expert_dtype",
            )
        self._spec, self._ops, self._source, self._naming, self._dtype = spec, ops, source, naming, dtype
        self._weigh_input = spec.moe.weigh_input
        self._fp8 = [not int8 and self._stays_fp8(layer) for layer in range(spec.moe_layers)]
        bias, gating = spec.moe.expert_bias, Gating(spec.moe.limit, spec.moe.alpha)
        self._layers: list[PackedExperts] = [
            ops.empty_experts(slots, spec.hidden, spec.moe.inner, dtype, int8, fp8, bias, gating)
            for fp8 in self._fp8
        ]
        self.slots = slots
        self.expert_bytes = spec.expert_parameters() * (1 if int8 or all(self._fp8) else dtype.itemsize)

    def _stays_fp8(self, layer: int) -> bool:
        """A checkpoint may leave some layers' experts in 16 bits; those have no scales."""
        if not self._ops.holds_fp8 or self._spec.fp8_block != (GROUP, GROUP) or self._dtype.itemsize != 2:
            return False
        if self._naming.stacked is not None:
            return False
        gate, _, _ = self._naming.expert(self._spec.moe_layer_ids[layer], 0)
        return self._source.has(gate + SCALE_SUFFIX)

    def load(self, held: Held, progress: Callable[[float], None]) -> None:
        """Fill (layer, slot, expert) one after the other. Raises CheckpointError."""
        for done, (layer, slot, expert) in enumerate(held):
            self.fill(layer, slot, expert)
            progress((done + 1) / len(held))

    def fill(self, layer: int, slot: int, expert: int) -> None:
        """Read one expert and pack it into a slot that nobody uses."""
        if not 0 <= slot < self.slots or not 0 <= layer < len(self._layers):
            raise ConfigError(
                f"slot {slot} of MoE layer {layer}: there are {self.slots} in {len(self._layers)} layers"
            )
        if self._fp8[layer] and self._fill_fp8(layer, slot, expert):
            return
        read = read_expert(
            self._spec, self._source, self._naming, self._spec.moe_layer_ids[layer], expert, self._dtype
        )
        self._ops.set_expert(
            self._layers[layer], slot, read.gate_up_JH, read.down_HI, read.gate_up_bias_J, read.down_bias_H
        )

    def _fill_fp8(self, layer: int, slot: int, expert: int) -> bool:
        """Whether the checkpoint has this expert in blocks, which then are in the slot as they are."""
        hidden, inner = self._spec.hidden, self._spec.moe.inner
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        names = self._naming.expert(self._spec.moe_layer_ids[layer], expert)
        gate, up, down = (self._source.blocks(name, shape) for name, shape in zip(names, shapes, strict=True))
        if gate is None or up is None or down is None:
            return False
        self._ops.set_expert_fp8(self._layers[layer], slot, gate, up, down)
        return True

    def forward(self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor) -> None:
        """out_RH = weighted sum over each row's slots, negative slots skipped."""
        if self._weigh_input:
            self._forward_weighed(layer, x_RH, slot_RK, weight_RK, out_RH)
            return
        self._ops.expert_ffn(x_RH, slot_RK, weight_RK, self._layers[layer], out_RH)

    def _forward_weighed(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor
    ) -> None:
        """Every choice of a row is a row of its own, already multiplied by its weight."""
        (rows, choices), hidden = slot_RK.shape, x_RH.shape[1]
        x_NH = (x_RH.unsqueeze(1) * weight_RK.unsqueeze(2).to(x_RH.dtype)).flatten(0, 1)
        out_NH = torch.empty((rows * choices, hidden), dtype=torch.float32, device=x_RH.device)
        one_N1 = torch.ones((rows * choices, 1), dtype=torch.float32, device=x_RH.device)
        slot_N1 = slot_RK.reshape(-1, 1)
        self._ops.expert_ffn(x_NH, slot_N1, one_N1, self._layers[layer], out_NH)
        out_RH.copy_(out_NH.unflatten(0, (rows, choices)).sum(1))
