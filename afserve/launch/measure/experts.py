"""Experts to measure kernels with: the ways in which weights are kept, and banks of them that no cache holds."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.kernels.grouped import Grouped, Groups, quantised_groups
from afserve.kernels.native import Native
from afserve.kernels.packed import ExpertShape, PackedExperts

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class WeightKind:
    """How expert weights are kept, and bytes a weight."""

    name: str
    bytes: float
    int8: bool = False
    int4: Groups | None = None
    fp8: bool = False

    def empty(self, native: Native, experts: int, hidden: int, inner: int) -> PackedExperts:
        shape = ExpertShape(experts, hidden, inner, BF16)
        if self.int4 is not None:
            return native.empty_experts_int4(shape, self.int4)
        if self.fp8:
            return native.empty_experts_fp8(shape)
        return native.empty_experts(shape, self.int8)


PLAIN, INT8 = WeightKind("bf16", 2), WeightKind("int8", 1, int8=True)
FP8 = WeightKind("fp8", 1, fp8=True)


def grouped_kind(name: str, groups: Groups) -> WeightKind:
    return WeightKind(name, groups.bits / 8, int4=groups)


INT4, MXFP4 = grouped_kind("int4", Groups(32)), grouped_kind("mxfp4", Groups(32, e2m1=True))


def drawn_expert(hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    """gate_up_JH and down_HI."""
    up = torch.randn(2 * inner, hidden).to(BF16) / hidden**0.5
    return up, torch.randn(hidden, inner).to(BF16) / inner**0.5


def fill(native: Native, banks: list[PackedExperts], up: Tensor, down: Tensor) -> None:
    """The same expert in all slots. A `Native` packs int4 codes only, so those are made here, once."""
    int4 = banks[0].int4
    codes = (_codes(up, int4), _codes(down, int4)) if int4 is not None else None
    for bank in banks:
        for slot in range(bank.experts):
            if codes is not None:
                native.set_expert_int4(bank, slot, *codes)
            else:
                native.set_expert(bank, slot, up, down)


def _codes(weight_OI: Tensor, groups: Groups) -> Grouped:
    """Of e2m1 numbers those that are whole numbers of an int4 code too: what a code says takes no time."""
    made = quantised_groups(weight_OI, groups.size)
    if not groups.e2m1:
        return made
    known = torch.tensor([-8, -6, -6, -4, -4, -3, -2, -1, 0, 1, 2, 3, 4, 4, 6, 6], dtype=torch.int8)
    return Grouped(known[made.code_OI.int() + 8], made.scale_OG, made.size)


class MeasuredCalls:
    """Calls of `rows` rows for each of some slots, which walk through a bank so that none is in a cache.

    A call has `per_call` slots: of many rows few, which take as long."""

    def __init__(self, native: Native, bank: PackedExperts, rows: int, most_rows: int = 64) -> None:
        self.rows, self.per_call = rows, max(1, min(bank.experts, most_rows // rows))
        self._native, self._bank = native, bank
        total = rows * self.per_call
        self._x, self._weight = torch.randn(total, bank.hidden).to(BF16), torch.ones(total, 1)
        self._out = torch.empty(total, bank.hidden, dtype=BF16)
        self._slots = self._windows()

    def _windows(self) -> Iterator[Tensor]:
        at = torch.arange(self.rows * self.per_call) % self.per_call
        first = 0
        while True:
            yield ((at + first) % self._bank.experts).int()[:, None].contiguous()
            first += self.per_call

    def call(self) -> None:
        self._native.expert_ffn(self._x, next(self._slots), self._weight, self._bank, self._out, False)

    @property
    def flops(self) -> int:
        return 6 * self.rows * self.per_call * self._bank.hidden * self._bank.inner

    def read_bytes(self, kind: WeightKind) -> int:
        """Of weights, as this kind keeps them."""
        return int(3 * self.per_call * self._bank.hidden * self._bank.inner * kind.bytes)
