"""Weights of ggml's types in the native library: packed as they are stored, multiplied by the library's own ops."""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.kernels import _native
from afserve.kernels.checks import both_biases, expect_shape, expect_slot
from afserve.kernels.formats.ggml import TYPES, GgmlRows, joined, panel_types
from afserve.kernels.native_products import CODES, gating_of, places_of, plain, set_biases
from afserve.kernels.packed import Biases, ExpertShape, PackedExperts, PackedLinear


class NativeGgml:
    """As `GgmlPacking`. The library keeps a copy, so that the rows may be dropped."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    def holds(self, dtype: torch.dtype) -> bool:
        return dtype in CODES

    def pack_linear(
        self, parts: Sequence[GgmlRows], bias_O: Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        parts = joined(parts)
        types, inputs = panel_types(parts), parts[0].inputs
        if types is None or any(part.inputs != inputs for part in parts):
            raise ValueError("rows of different types share 64 outputs, or have different inputs")
        outputs = sum(map(len, parts))
        handle = _native.Linear(outputs, inputs, types)
        first = 0
        for part in parts:
            handle.pack_ggml(part.bytes_RB.contiguous().data_ptr(), first, len(part))
            first += len(part)
        if bias_O is not None:
            expect_shape("bias_O", bias_O, (outputs,))
            handle.set_bias(plain(bias_O, torch.float32).data_ptr(), CODES[torch.float32])
        return PackedLinear(outputs, inputs, None, None, handle, dtype)

    def empty_experts(self, shape: ExpertShape, kinds: tuple[str, str]) -> PackedExperts:
        sizes = shape.slots, shape.hidden, shape.inner
        types = TYPES.index(kinds[0]), TYPES.index(kinds[1])
        handle = _native.Experts(*sizes, types, shape.bias, gating_of(shape.gating), *places_of(shape))
        return PackedExperts(
            *sizes, None, None, handle, shape.dtype, gating=shape.gating, bias=shape.bias, ggml=kinds
        )

    def set_expert(
        self,
        experts: PackedExperts,
        slot: int,
        gate_up: GgmlRows,
        down: GgmlRows,
        biases: Biases | None = None,
    ) -> None:
        expect_slot(slot, experts)
        _expect(experts, "gate_up", gate_up, (experts.joined, experts.hidden), 0)
        _expect(experts, "down", down, (experts.hidden, experts.inner), 1)
        checked = both_biases(experts, *(biases or (None, None)))
        assert isinstance(experts.handle, _native.Experts), "only these have ggml's types"
        held = gate_up.bytes_RB.contiguous(), down.bytes_RB.contiguous()
        experts.handle.pack_ggml(slot, held[0].data_ptr(), held[1].data_ptr())
        set_biases(experts.handle, slot, checked)

    def rows_of(self, table: GgmlRows, token_T: Tensor, dtype: torch.dtype) -> Tensor:
        made_TH = torch.empty(len(token_T), table.inputs, dtype=dtype)
        token = plain(token_T, torch.int64).data_ptr()
        embedding_of(table).read(self._engine, CODES[dtype], token, len(token_T), made_TH.data_ptr())
        return made_TH


def embedding_of(table: Tensor | GgmlRows) -> _native.Embedding:
    """It reads the table's memory."""
    if isinstance(table, Tensor):
        return _native.Embedding(table.data_ptr(), len(table), table.shape[1], -1)
    return _native.Embedding(table.bytes_RB.data_ptr(), len(table), table.inputs, table.number)


def _expect(experts: PackedExperts, name: str, rows: GgmlRows, shape: tuple[int, int], which: int) -> None:
    kind = None if experts.ggml is None else experts.ggml[which]
    if rows.kind != kind or (len(rows), rows.inputs) != shape:
        raise ValueError(
            f"{name}: {len(rows)} x {rows.inputs} of {rows.kind}, expected {shape[0]} x {shape[1]} of {kind}"
        )
