"""How the CUDA bench times: graph replays after the L2 cache was overwritten, and the chip's limits measured alike.

It knows no kernels: a case brings its own call, and how many bytes and operations that call cannot do without.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from afserve.kernels.devices.cuda import chip_of
from afserve.kernels.devices.opened import device_of


@dataclass(frozen=True)
class Case:
    """One timed call: the bytes it must move, the operations it must do, and torch's way to the same result.

    `bars` are the least values that this project asks of the row's fields (of_bound, of_copy, peer_ratio).
    """

    op: str
    case: str
    run: Callable[[], object]
    bytes: int
    flops: int = 0
    rate: str = "bf16"
    peer: Callable[[], object] | None = None
    bars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Bytes and operations per second that this chip reached in this run."""

    copy: float
    bf16: float
    fp8: float

    def seconds(self, case: Case) -> float:
        return max(case.bytes / self.copy, case.flops / (self.fp8 if case.rate == "fp8" else self.bf16))


class Clock:
    """Times CUDA graph replays; `flush` is several times the L2 cache.

    Events are nodes of the graph where this torch can record them there, so that the launch of a graph is no part of a
    kernel's time; else they stand around the replay. `place` says which.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self._device = device_of(device)
        self.repeats = repeats
        self.place = "in the graph"
        try:
            self.seconds(self._flush[:1024].zero_)
        except (RuntimeError, TypeError):
            self.place = "around the graph"

    def seconds(self, run: Callable[[], object]) -> list[float]:
        """`repeats` times of one call, ascending."""
        for _ in range(2):
            run()
        self._device.finish()
        return sorted(self._inside(run) if self.place == "in the graph" else self._around(run))

    def _inside(self, run: Callable[[], object]) -> list[float]:
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

        def launch() -> None:
            self._flush.zero_()
            start.record()
            run()
            end.record()

        replay, times = self._device.record_launch(launch), []
        for _ in range(self.repeats):
            replay()
            self._device.finish()
            times.append(start.elapsed_time(end) / 1e3)
        return times

    def _around(self, run: Callable[[], object]) -> list[float]:
        def launch() -> None:
            run()

        replay, times = self._device.record_launch(launch), []
        for _ in range(self.repeats):
            self._flush.zero_()
            start = self._device.current().put_event(timed=True)
            replay()
            end = self._device.current().put_event(timed=True)
            self._device.finish()
            times.append(end.seconds_since(start))
        return times


def measure_limits(device: torch.device, clock: Clock) -> Limits:
    """Random operands: a chip multiplies zeros faster than it can anything else."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target, n = torch.empty_like(source), 8192
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    copy = statistics.median(clock.seconds(lambda: target.copy_(source)))
    bf16 = statistics.median(clock.seconds(lambda: a @ b))
    fp8 = bf16
    if chip_of(device).capability >= (8, 9):
        fp8 = statistics.median(
            clock.seconds(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16))
        )
    return Limits(2 * source.numel() / copy, 2 * n**3 / bf16, 2 * n**3 / fp8)
