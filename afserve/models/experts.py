"""The routed experts of one node: slots of packed weights per MoE layer, filled one expert at a time.

A bank eats rows and slot ids; it knows neither who sent them nor what a placement is. `keeping.py` says how a layer's
weights are kept. A slot may be filled while others are in use; nobody may name it meanwhile. Shapes: R rows, K top-k,
H hidden, J = 2 I inner.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from afserve.comm.m2n.bank import Bank
from afserve.errors import ConfigError
from afserve.families.pattern.naming import Naming
from afserve.kernels.ops import Ops
from afserve.kernels.packed import ExpertShape, Gating, PackedExperts
from afserve.kernels.stack import LayeredExperts
from afserve.models.expert_tensors import (
    ExpertPlace,
    parts_of,
    read_codes,
    read_expert,
    read_halves,
    read_rows,
)
from afserve.models.keeping import Keeping, KeptFormat
from afserve.models.rounding import RoundingError
from afserve.models.weights import SCALE_SUFFIX, TensorSource
from afserve.placement.expert_memory import places_within
from afserve.spec import ModelSpec
from afserve.spec_parts import BOUNDED_SWIGLU, SQUARED_RELU, MoeSpec

Held = Sequence[tuple[int, int, int]]
Progress = Callable[[float], None]
_MOST_LOADERS = 4
log = logging.getLogger("afserve.models")


def _loaders(ops: Ops) -> int:
    """Threads that read and pack experts: of the native backend as many as there are cores, a few at most; else one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_LOADERS) if ops.backend_name == "native" else 1


def gating_of(moe: MoeSpec) -> Gating:
    named = (moe.activation == one for one in ("gelu_pytorch_tanh", BOUNDED_SWIGLU, SQUARED_RELU))
    return Gating(moe.limit, moe.alpha, *named)


class ExpertBank(Bank):
    """`slots` per MoE layer, all empty until `fill`ed. Layers are MoE layer numbers everywhere."""

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        ops: Ops,
        source: TensorSource,
        naming: Naming,
        dtype: torch.dtype,
        expert_dtype: str = "auto",
        memory: int = 0,
        numbered: bool = False,
    ) -> None:
        """memory: bytes for the weights of all layers, where those of all slots are more; see `places`. numbered: where
        there are fewer places than slots, calls name places instead."""
        self._spec, self._ops, self._source, self._naming, self.dtype = spec, ops, source, naming, dtype
        self._weigh_input = spec.moe.weigh_input
        self._kept = [
            Keeping(spec, ops, source, naming, dtype, expert_dtype).of(i) for i in range(spec.moe_layers)
        ]
        self.slots = slots
        self.expert_bytes = int(spec.expert_parameters() * max(kept.bits(dtype) for kept in self._kept) / 8)
        self.places = places_within(memory, spec, slots, self.expert_bytes) if memory else None
        bias = spec.moe.expert_bias
        moes = (spec.layer(layer).moe for layer in spec.moe_layer_ids)
        gatings = [gating_of(moe) for moe in moes if moe is not None]
        places = None if numbered else self.places
        rows = self.places if numbered and self.places is not None else slots
        sizes = rows, spec.expert_width, spec.moe.inner, dtype

        def empty(kept: KeptFormat, gating: Gating) -> PackedExperts:
            if kept.ggml is not None and ops.ggml is not None:
                return ops.ggml.empty_experts(ExpertShape(*sizes, bias, gating, places), kept.ggml)
            return ops.empty_experts(*sizes, kept.int8, kept.fp8, bias, gating, kept.int4, places)

        self._layers: list[PackedExperts] = [
            empty(kept, gating) for kept, gating in zip(self._kept, gatings, strict=True)
        ]
        for packed in self._layers:
            packed.among = max(slots, spec.experts)
        self._error = next((RoundingError(kept.group) for kept in self._kept if kept.rounds), None)

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def each_layer(self) -> tuple[PackedExperts, ...]:
        return tuple(self._layers)

    @property
    def packed(self) -> tuple[PackedExperts, ...] | None:
        """The slots of each MoE layer where `forward` is nothing but `Ops.expert_ffn` of them."""
        return None if self._weigh_input else self.each_layer

    def answering(self, rows: torch.dtype, sums: torch.dtype) -> LayeredExperts | None:
        """As `comm.m2n.bank.Bank`."""
        packed = self.packed
        return self._ops.expert_layers(packed, rows, sums) if packed else None

    @property
    def rounding_error(self) -> float | None:
        """Relative, of all weights that were rounded to `expert_dtype` so far; None where none was."""
        return None if self._error is None else self._error.relative

    def load(self, held: Held, progress: Progress) -> None:
        """Fill (layer, slot, expert), several at a time: reading waits for the disk, and packing for the memory. This
        thread alone fills a GPU, whose kernels are launched in order. Raises CheckpointError."""
        threads = _loaders(self._ops)
        with ThreadPoolExecutor(threads, "expert-loader") if threads > 1 else nullcontext() as pool:
            filled = (pool.map if pool else map)(lambda one: self.fill(*one), held)
            for done, _ in enumerate(filled):
                progress((done + 1) / len(held))
        self.tell_rounding()

    def tell_rounding(self) -> None:
        if self.rounding_error is not None:
            named = next(kept.name for kept in self._kept if kept.rounds)
            log.warning("expert weights are rounded to %s: relative error %.2g", named, self.rounding_error)

    def check_slot(self, layer: int, slot: int) -> None:
        if not 0 <= slot < self.slots or not 0 <= layer < len(self._layers):
            raise ConfigError(
                f"slot {slot} of MoE layer {layer}: there are {self.slots} in {len(self._layers)} layers"
            )

    @property
    def bytes_read(self) -> int:
        """Of tensors, so far; random ones are not read."""
        return self._source.bytes_read

    def put(self, layer: int, slot: int, place: int | None) -> None:
        """Of a bank with fewer places than slots: the slot is filled at this place next; None: it has no weights."""
        self._ops.put_expert(self._layers[layer], slot, place)

    def fill(self, layer: int, slot: int, expert: int, *, again: bool = False) -> None:
        """Read one expert and pack it into a slot that nobody uses. `again`: its rounding is counted already."""
        self.check_slot(layer, slot)
        where = self._spec, self._source, self._naming, self._spec.moe_layer_ids[layer], expert
        names, row = parts_of(*where)
        with self._source.together(names, row):
            if row is None and self._by_halves(layer):
                self._fill_halves(layer, slot, read_halves(*where, self.dtype), again)
            else:
                self._fill_whole(layer, slot, expert, where, again)

    def _by_halves(self, layer: int) -> bool:
        kept = self._kept[layer]
        whole = kept.fp8 or kept.int4 is not None or kept.ggml is not None or self._spec.moe.expert_bias
        return not whole and self._ops.device.type == "cpu"

    def _fill_halves(self, layer: int, slot: int, halves: Iterator[list[Tensor]], again: bool) -> None:
        """Gate and up are packed while down is read."""
        for number, parts in enumerate(halves):
            for part in parts:
                self._look_at(layer, part, again)
            half = (parts, None) if number == 0 else ((), parts[0])
            self._ops.set_half(self._layers[layer], slot, *half)

    def _look_at(self, layer: int, weight_OI: Tensor, again: bool) -> None:
        if self._kept[layer].rounds and self._error is not None and not again:
            self._error.look_at(weight_OI)

    def _fill_whole(self, layer: int, slot: int, expert: int, where: ExpertPlace, again: bool) -> None:
        kept = self._kept[layer]
        if kept.ggml is not None and self._ops.ggml is not None:
            rows = read_rows(*where, self.dtype)
            self._ops.ggml.set_expert(self._layers[layer], slot, rows.gate_up, rows.down, rows.biases)
            return
        if kept.fp8 and self._fill_fp8(layer, slot, expert):
            return
        if kept.int4 is not None and kept.stored:
            codes = read_codes(*where, self.dtype, kept.int4.size)
            biases = codes.gate_up_bias_J, codes.down_bias_H
            self._ops.set_expert_int4(self._layers[layer], slot, codes.gate_up, codes.down, *biases)
            return
        read = read_expert(*where, self.dtype)
        for weight_OI in (read.gate_up_JH, read.down_HI):
            self._look_at(layer, weight_OI, again)
        self._ops.set_expert(
            self._layers[layer], slot, read.gate_up_JH, read.down_HI, read.gate_up_bias_J, read.down_bias_H
        )

    def _parts(self, layer: int, expert: int) -> list[tuple[str, tuple[int, int]]]:
        """Names and shapes of an expert's gate, up and down."""
        hidden, inner = self._spec.expert_width, self._spec.moe.inner
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        return list(zip(self._naming.expert(self._spec.moe_layer_ids[layer], expert), shapes, strict=True))

    def _fill_fp8(self, layer: int, slot: int, expert: int) -> bool:
        """Whether the checkpoint has this expert in blocks, which then are in the slot as they are."""
        gate, up, down = (
            self._source.block_scaled(name, shape) for name, shape in self._parts(layer, expert)
        )
        if gate is None or up is None or down is None:
            if not self._source.has_tensor(self._parts(layer, expert)[0][0] + SCALE_SUFFIX):
                where = self._spec.moe_layer_ids[layer]
                log.warning(
                    "expert %d of layer %d is rounded to FP8, as the layer's first is stored", expert, where
                )
            return False
        self._ops.set_expert_fp8(self._layers[layer], slot, gate, up, down)
        return True

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """out_RH = weighted sum over each row's slots, negative slots skipped; `add`: it starts from out_RH."""
        if self._weigh_input:
            self._forward_weighed(layer, x_RH, slot_RK, weight_RK, out_RH, add)
            return
        self._ops.expert_ffn(x_RH, slot_RK, weight_RK, self._layers[layer], out_RH, add)

    def _forward_weighed(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool
    ) -> None:
        """Every choice of a row is a row of its own, already multiplied by its weight."""
        (rows, choices), hidden = slot_RK.shape, x_RH.shape[1]
        x_NH = (x_RH.unsqueeze(1) * weight_RK.unsqueeze(2).to(x_RH.dtype)).flatten(0, 1)
        out_NH = torch.empty((rows * choices, hidden), dtype=torch.float32, device=x_RH.device)
        one_N1 = torch.ones((rows * choices, 1), dtype=torch.float32, device=x_RH.device)
        slot_N1 = slot_RK.reshape(-1, 1)
        self._ops.expert_ffn(x_NH, slot_N1, one_N1, self._layers[layer], out_NH)
        sum_RH = out_NH.unflatten(0, (rows, choices)).sum(1)
        out_RH.copy_(out_RH + sum_RH if add else sum_RH)
