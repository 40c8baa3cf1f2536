"""Everything that multiplies packed weights with the native library: dense maps, heads, experts, LM head.

Weights packed for the library are held by nothing else, so rows of another dtype are converted to theirs. Weights of a
dtype that it does not know are packed and multiplied by the reference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels import _native
from afserve.kernels.formats.scaled import BlockScaled, dequantised, quantised_blocks
from afserve.kernels.grouped import Grouped, Groups, quantised_groups
from afserve.kernels.packed import Biases, ExpertShape, Gating, PackedExperts, PackedHeads, PackedLinear
from afserve.kernels.reference import Reference
from afserve.kernels.stack import LayeredExperts

CODES = {torch.float32: 0, torch.bfloat16: 1}
FLOAT_CODE, INT8_CODE, COMPACT_CODE, FP8_CODE = 0, 2, 3, 6


class NativeProducts(Reference):
    """One engine: an instruction set, its threads and its scratch memory. Not for use by two threads at once. A
    reference of its own computes what falls back, so that PyTorch does all of such an op."""

    name = "native"

    def __init__(self, threads: int, isa: str = "") -> None:
        super().__init__()
        self._engine = _native.Engine(threads, isa)
        self.isa = self._engine.isa
        self._plain = Reference()

    def _fall_back(self, op: str, reason: str) -> Reference:
        """What does an op that the library can't."""
        self.fallbacks.record_fallback(op, reason)
        return self._plain

    def _weight_code(self, dtype: torch.dtype, int8: bool = False) -> int | None:
        """How weights of `dtype` are kept: bf16 in 12 bits, without loss, where that is faster."""
        code = CODES.get(dtype)
        if code is None or int8:
            return None if code is None else INT8_CODE
        return COMPACT_CODE if dtype is torch.bfloat16 and self._engine.compacts else code

    def holds_int8(self, dtype: torch.dtype) -> bool:
        return dtype in CODES

    def holds_int4(self, dtype: torch.dtype) -> bool:
        return dtype in CODES

    def holds_fp8(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def borrow_core(self, memory_B: Tensor | None, offset: int = 0) -> bool:
        self._engine.borrow(0 if memory_B is None else memory_B.data_ptr() + offset, memory_B)
        return True

    def explain(self) -> str:
        return f"native library, {self.isa} instructions, {self._engine.threads} thread(s)"

    def stream(self, x: Tensor) -> None:
        """Read a contiguous tensor once: the bandwidth that other ops are measured against."""
        _native.stream(self._engine, x.data_ptr(), x.numel() * x.element_size())

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None, int8: bool = False, int4: Groups | None = None
    ) -> PackedLinear:
        kept = self._weight_code(weight_OI.dtype, int8)
        if kept is None:
            return self._fall_back("linear", f"{weight_OI.dtype} weights").pack_linear(
                weight_OI, bias_O, int8, int4
            )
        weight = matrix(weight_OI)
        outputs, inputs = weight.shape
        if int4 is None:
            handle = _native.Linear(outputs, inputs, kept)
            handle.pack(weight.data_ptr(), CODES[weight.dtype], weight.stride(0))
        else:
            handle = _native.Linear(outputs, inputs, _groups(int4))
            made = quantised_groups(weight, int4.size)
            handle.pack_int4(made.code_OI.data_ptr(), made.scale_OG.data_ptr())
        if bias_O is not None:
            bias = bias_O.to(torch.float32).contiguous()
            handle.set_bias(bias.data_ptr(), CODES[torch.float32])
        return PackedLinear(outputs, inputs, None, None, handle, weight_OI.dtype)

    def empty_experts(self, shape: ExpertShape, int8: bool = False) -> PackedExperts:
        kept = self._weight_code(shape.dtype, int8)
        if kept is None:
            return self._fall_back("expert_ffn", f"{shape.dtype} weights").empty_experts(shape, int8)
        sizes = shape.slots, shape.hidden, shape.inner
        handle = _native.Experts(*sizes, kept, shape.bias, gating_of(shape.gating), *places_of(shape))
        return PackedExperts(*sizes, None, None, handle, shape.dtype, int8, shape.gating, bias=shape.bias)

    def put_expert(self, experts: PackedExperts, slot: int, place: int) -> None:
        if isinstance(experts.handle, _native.Experts):
            experts.handle.put(slot, place)
        else:
            self._plain.put_expert(experts, slot, place)

    def set_expert(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up_JH: Tensor,
        down_HI: Tensor,
        biases: Biases | None = None,
    ) -> None:
        if not isinstance(experts.handle, _native.Experts):
            self._plain.set_expert(experts, slot, gate_up_JH, down_HI, biases)
            return
        if experts.fp8:
            blocks = [quantised_blocks(weight) for weight in (*gate_up_JH.chunk(2), down_HI)]
            self.set_expert_fp8(experts, slot, *blocks)
            return
        self.set_half(experts, slot, [gate_up_JH], down_HI)
        set_biases(experts.handle, slot, biases)

    def set_half(
        self, experts: PackedExperts, slot: int, gate_up: Sequence[Tensor], down_HI: Tensor | None
    ) -> None:
        if not isinstance(experts.handle, _native.Experts):
            self._plain.set_half(experts, slot, gate_up, down_HI)
            return
        held = [matrix(part.to(experts.dtype)) for part in gate_up]
        if len(held) > 1 and len({part.stride(0) for part in held}) > 1:
            held = [torch.cat(held)]
        first, second = (*held, None, None)[:2]
        down = None if down_HI is None else matrix(down_HI.to(experts.dtype))
        strides = [0 if part is None else part.stride(0) for part in (first, down)]
        experts.handle.pack(
            slot, address(first), strides[0], address(down), strides[1], CODES[experts.dtype], address(second)
        )

    def empty_experts_int4(self, shape: ExpertShape, groups: Groups) -> PackedExperts:
        if shape.dtype not in CODES:
            fallback = self._fall_back("expert_ffn", f"{shape.dtype} weights")
            return fallback.empty_experts_int4(shape, groups)
        sizes = shape.slots, shape.hidden, shape.inner
        handle = _native.Experts(
            *sizes, _groups(groups), shape.bias, gating_of(shape.gating), *places_of(shape)
        )
        return PackedExperts(
            *sizes, None, None, handle, shape.dtype, gating=shape.gating, int4=groups, bias=shape.bias
        )

    def set_expert_int4(
        self, experts: PackedExperts, slot: int, gate_up: Grouped, down: Grouped, biases: Biases | None = None
    ) -> None:
        if not isinstance(experts.handle, _native.Experts):
            self._plain.set_expert_int4(experts, slot, gate_up, down, biases)
            return
        held = [x.contiguous() for x in (gate_up.code_OI, gate_up.scale_OG, down.code_OI, down.scale_OG)]
        experts.handle.pack_int4(slot, *(x.data_ptr() for x in held))
        set_biases(experts.handle, slot, biases)

    def empty_experts_fp8(self, shape: ExpertShape) -> PackedExperts:
        if not self.holds_fp8(shape.dtype):
            raise ConfigError(
                f"experts: FP8 weights meet bfloat16 rows on CPUs, not {shape.dtype}; keep them in that"
            )
        sizes = shape.slots, shape.hidden, shape.inner
        handle = _native.Experts(*sizes, FP8_CODE, False, None, *places_of(shape))
        return PackedExperts(*sizes, None, None, handle, shape.dtype, fp8=True)

    def set_expert_fp8(
        self, experts: PackedExperts, slot: int, gate: BlockScaled, up: BlockScaled, down: BlockScaled
    ) -> None:
        if not (experts.fp8 and isinstance(experts.handle, _native.Experts)):
            self.set_expert(experts, slot, *dequantised(gate, up, down, experts.dtype))
            return
        codes = torch.cat((gate.q_OI, up.q_OI)), down.q_OI.contiguous()
        scales = torch.cat((gate.scale, up.scale)).float(), down.scale.float().contiguous()
        held = [x for both in zip(codes, scales, strict=True) for x in both]
        experts.handle.pack_fp8(slot, *(x.data_ptr() for x in held))

    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        return self._linear(x_TI, packed, x_TI.dtype)

    def logits(self, x_TH: Tensor, packed: PackedLinear) -> Tensor:
        return self._linear(x_TH, packed, torch.float32)

    def _linear(self, x_TI: Tensor, packed: PackedLinear, out_dtype: torch.dtype) -> Tensor:
        if not isinstance(packed.handle, _native.Linear):
            return self._fall_back("linear", f"{packed.dtype} weights").linear(x_TI, packed).to(out_dtype)
        x = matrix(x_TI.reshape(-1, packed.inputs).to(packed.dtype))
        code = CODES[packed.dtype]
        made = out_dtype if out_dtype in (packed.dtype, torch.float32) else packed.dtype
        out = torch.empty((*x_TI.shape[:-1], packed.outputs), dtype=made)
        packed.handle.run(
            self._engine, x.data_ptr(), x.stride(0), x.shape[0], code, out.data_ptr(), CODES[made]
        )
        return out.to(out_dtype)

    def argmax(self, logits_RV: Tensor) -> Tensor:
        logits = plain(logits_RV, torch.float32)
        rows, size = logits.shape
        index = torch.empty(rows, dtype=torch.int32)
        _native.argmax(self._engine, logits.data_ptr(), rows, size, index.data_ptr())
        return index

    def pack_heads(self, weight_AOI: Tensor, int8: bool = False, int4: Groups | None = None) -> PackedHeads:
        kept = self._weight_code(weight_AOI.dtype, int8)
        if kept is None:
            fallback = self._fall_back("linear_heads", f"{weight_AOI.dtype} weights")
            return fallback.pack_heads(weight_AOI, int8, int4)
        heads, outputs, inputs = weight_AOI.shape
        if int4 is None:
            handle = _native.HeadLinear(heads, outputs, inputs, kept)
        else:
            handle = _native.HeadLinear(heads, outputs, inputs, _groups(int4))
        for head in range(heads):
            weight = matrix(weight_AOI[head])
            if int4 is None:
                handle.pack(head, weight.data_ptr(), CODES[weight.dtype], weight.stride(0))
            else:
                made = quantised_groups(weight, int4.size)
                handle.pack_int4(head, made.code_OI.data_ptr(), made.scale_OG.data_ptr())
        return PackedHeads(heads, outputs, inputs, None, handle, weight_AOI.dtype)

    def linear_heads(self, x_TAI: Tensor, packed: PackedHeads) -> Tensor:
        if not isinstance(packed.handle, _native.HeadLinear):
            return self._fall_back("linear_heads", f"{packed.dtype} weights").linear_heads(x_TAI, packed)
        x = x_TAI.to(packed.dtype)
        x = x if x.stride(2) == 1 else x.contiguous()
        out = torch.empty((x.shape[0], packed.heads, packed.outputs), dtype=packed.dtype)
        code = CODES[packed.dtype]
        packed.handle.run(
            self._engine, code, x.data_ptr(), x.stride(0), x.stride(1), x.shape[0], out.data_ptr()
        )
        return out.to(x_TAI.dtype)

    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        first, second, alike = gate_up.handle, down.handle, x_TH.dtype is gate_up.dtype is down.dtype
        if isinstance(first, _native.Linear) and isinstance(second, _native.Linear) and alike:
            x = matrix(x_TH.reshape(-1, gate_up.inputs))
            out = torch.empty((*x_TH.shape[:-1], down.outputs), dtype=x_TH.dtype)
            code, rows = CODES[x.dtype], x.shape[0]
            _native.mlp(self._engine, first, second, code, x.data_ptr(), x.stride(0), rows, out.data_ptr())
            return out
        wide = self.linear(x_TH, gate_up)
        known = CODES.get(wide.dtype)
        if known is None:
            self.fallbacks.record_fallback("mlp", f"{wide.dtype} rows")
            gate, up = wide.chunk(2, dim=-1)
            return self.linear(torch.nn.functional.silu(gate) * up, down)
        middle = torch.empty((*wide.shape[:-1], down.inputs), dtype=wide.dtype)
        rows = middle.numel() // down.inputs
        _native.gated(self._engine, known, wide.data_ptr(), rows, down.inputs, middle.data_ptr())
        return self.linear(middle, down)

    def expert_ffn(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool,
    ) -> None:
        handle = experts.handle
        if not isinstance(handle, _native.Experts):
            fallback = self._fall_back("expert_ffn", f"{experts.dtype} weights")
            fallback.expert_ffn(x_RH, slot_RK, weight_RK, experts, out_RH, add)
            return
        if (
            out_RH.dtype not in (x_RH.dtype, torch.float32)
            or out_RH.stride(1) != 1
            or x_RH.dtype != experts.dtype
        ):
            self._expert_ffn_converted(x_RH, slot_RK, weight_RK, experts, out_RH, add)
            return
        x = matrix(x_RH)
        slot, weight = plain(slot_RK, torch.int32), plain(weight_RK, torch.float32)
        rows, choices = slot.shape
        handle.run(
            self._engine,
            x.data_ptr(),
            x.stride(0),
            CODES[x.dtype],
            slot.data_ptr(),
            weight.data_ptr(),
            rows,
            choices,
            out_RH.data_ptr(),
            out_RH.stride(0),
            CODES[out_RH.dtype],
            add,
        )

    def expert_layers(
        self, layers: Sequence[PackedExperts], rows: torch.dtype, sums: torch.dtype
    ) -> LayeredExperts | None:
        handles = [x.handle for x in layers if isinstance(x.handle, _native.Experts) and x.dtype is rows]
        if len(handles) < len(layers) or sums not in (rows, torch.float32):
            return None
        return LayeredExperts(_native.ExpertLayers(self._engine, handles, CODES[rows], CODES[sums]))

    def _expert_ffn_converted(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool,
    ) -> None:
        out = out_RH.float().contiguous() if add else torch.empty(out_RH.shape, dtype=torch.float32)
        self.expert_ffn(x_RH.to(experts.dtype), slot_RK, weight_RK, experts, out, add)
        out_RH.copy_(out)


def _groups(groups: Groups) -> _native.Groups:
    return _native.Groups(groups.size, groups.wide, groups.e2m1)


def gating_of(gating: Gating) -> _native.Gating | None:
    """None for a plain SwiGLU."""
    if gating.limit is None and not (gating.squared or gating.gelu):
        return None
    return _native.Gating(gating.limit or 0.0, gating.alpha, gating.bounded, gating.squared, gating.gelu)


def places_of(shape: ExpertShape) -> tuple[int, ...]:
    """Where there are fewer than slots."""
    return () if shape.places is None else (shape.places,)


def set_biases(experts: _native.Experts, slot: int, biases: Biases | None) -> None:
    if biases is not None:
        gate_up, down = (plain(bias, torch.float32) for bias in biases)
        experts.set_bias(slot, gate_up.data_ptr(), down.data_ptr())


def matrix(x_RC: Tensor) -> Tensor:
    """The same matrix with its columns next to each other."""
    return x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()


def address(x: Tensor | None) -> int:
    """Where its elements begin; 0 for none."""
    return 0 if x is None else x.data_ptr()


def plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values, contiguous and of `dtype`."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()
