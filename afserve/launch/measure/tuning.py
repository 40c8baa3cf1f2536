"""What `afserve tune` measures: the read rate by threads, and how near to it the expert kernels come.

Figures are best times: others on the machine only take away. All that is read is larger than the caches. Memory that is
taken: twice `out_of_cache`, and one expert.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from afserve.errors import DoesNotFitError
from afserve.kernels.native import Native
from afserve.launch.measure.clock import measure_read, out_of_cache, out_of_cache_data, seconds_of
from afserve.launch.measure.experts import (
    FP8,
    INT4,
    INT8,
    MXFP4,
    PLAIN,
    MeasuredCalls,
    WeightKind,
    drawn_expert,
    fill,
)
from afserve.launch.measure.others import CoreTime, OtherLoad, others_before
from afserve.launch.plan.footprint import gib
from afserve.launch.plan.machine import Machine

KINDS = (PLAIN, INT8, FP8, INT4, MXFP4)
ROWS = (1, 2, 4, 8, 32, 128)
_BANK = 96 << 20  # bytes of experts at least: packing them takes longer than running them
_CHANGED = 0.10  # of the read rate, from the beginning to the end


@dataclass(frozen=True, slots=True)
class ReadFigure:
    threads: int
    gb_s: float


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One expert's weights, `kept` so, for `rows` rows on all cores: microseconds, GB/s of weights, that as a share of
    the read rate, GFLOP/s."""

    isa: str
    kept: str
    rows: int
    us: float
    gb_s: float
    share: float
    gflop_s: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """`hidden` and `inner` are those of the experts; `read_again` is the last of `reads`, at the end; `warnings` say
    why not to believe the figures."""

    hidden: int
    inner: int
    reads: tuple[ReadFigure, ...]
    kernels: tuple[KernelFigure, ...]
    read_again: float
    others: OtherLoad

    def warnings(self) -> list[str]:
        first = self.reads[-1].gb_s
        said = self.others.said()
        if abs(self.read_again / first - 1) > _CHANGED:
            said.append(f"the read rate changed: {first:.1f} GB/s at first, {self.read_again:.1f} at the end")
        return said


def measure_machine(machine: Machine, isas: Sequence[str], hidden: int, inner: int, seconds: float) -> Tuning:
    """Takes about so long: one call of each case is made in any case. Raises DoesNotFitError where there is too little
    memory."""
    _check_memory(machine, hidden, inner)
    end = time.monotonic() + seconds
    others, begin = others_before(machine.cores), CoreTime.now()
    data = out_of_cache_data(Native(1))
    reads = tuple(_reads(machine.cores, data))
    best = reads[-1].gb_s
    kernels: list[KernelFigure] = []
    for number, isa in enumerate(isas):
        left = (end - time.monotonic()) / (len(isas) - number)
        kernels += _kernels(Native(machine.cores, isa), (hidden, inner), time.monotonic() + left)
    again = _read(machine.cores, data)
    now = CoreTime.now()
    others = replace(others, others=now.others_since(begin), stolen=now.stolen_since(begin))
    rate = max(best, again)
    figures = tuple(replace(figure, share=figure.gb_s / rate) for figure in kernels)
    return Tuning(hidden, inner, reads, figures, again, others)


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ..., and all."""
    return [*(1 << n for n in range(cores.bit_length()) if 1 << n < cores), cores]


def _reads(cores: int, data: Tensor) -> Iterator[ReadFigure]:
    for threads in thread_counts(cores):
        yield ReadFigure(threads, _read(threads, data))


def _read(threads: int, data: Tensor) -> float:
    torch.set_num_threads(threads)
    return measure_read(Native(threads), data)


def _kernels(native: Native, shape: tuple[int, int], end: float) -> Iterator[KernelFigure]:
    up, down = drawn_expert(*shape)
    for number, kind in enumerate(KINDS):
        each = (end - time.monotonic()) / (len(KINDS) - number)
        yield from _of_kind(native, kind, up, down, time.monotonic() + each)


def _of_kind(
    native: Native, kind: WeightKind, up: Tensor, down: Tensor, end: float
) -> Iterator[KernelFigure]:
    """All rows in turn until the end, so that a slow moment is in none alone."""
    hidden, inner = down.shape
    size = int(3 * hidden * inner * kind.bytes)
    bank = kind.empty(native, -(-out_of_cache(_BANK) // size), hidden, inner)
    fill(native, [bank], up, down)
    calls = [MeasuredCalls(native, bank, rows) for rows in ROWS]
    took = _rounds([call.call for call in calls], end)
    for call, best in zip(calls, took, strict=True):
        rate = call.read_bytes(kind) / best / 1e9
        yield KernelFigure(
            native.isa, kind.name, call.rows, best * 1e6 / call.per_call, rate, 0.0, call.flops / best / 1e9
        )


def _rounds(runs: Sequence[Callable[[], None]], end: float) -> list[float]:
    """The best seconds of each; the first round counts only where there is no time for another."""
    best = [seconds_of(run) for run in runs]
    warm = True
    while time.monotonic() < end:
        found = [seconds_of(run) for run in runs]
        best = found if warm else [min(pair) for pair in zip(best, found, strict=True)]
        warm = False
    return best


def _check_memory(machine: Machine, hidden: int, inner: int) -> None:
    needed = 2 * out_of_cache() + 4 * 3 * hidden * inner * 4
    if needed > machine.memory:
        raise DoesNotFitError(
            f"afserve tune needs {gib(needed)} of memory, to read more than the caches hold, and {gib(machine.memory)} "
            "are free; end something, or raise the container's limit"
        )
