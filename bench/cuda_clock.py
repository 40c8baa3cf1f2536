"""How the CUDA bench times: graph replays after the L2 cache was overwritten, and the chip's limits measured alike.

It knows no kernels: a case brings its own call, and how many bytes and operations that call cannot do without.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One timed call: the bytes it must move, the operations it must do, and torch's way to the same result."""

    op: str
    case: str
    run: Callable[[], object]
    bytes: int
    flops: int = 0
    rate: str = "bf16"
    peer: Callable[[], object] | None = None


@dataclass(frozen=True)
class Limits:
    """Bytes and operations per second that this chip reached in this run."""

    copy: float
    bf16: float
    fp8: float

    def seconds(self, case: Case) -> float:
        return max(case.bytes / self.copy, case.flops / (self.fp8 if case.rate == "fp8" else self.bf16))


class Clock:
    """Times CUDA graph replays; `flush` is several times the L2 cache."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self._repeats = repeats

    def seconds(self, run: Callable[[], object]) -> list[float]:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self._repeats)
        ]
        for start, end in marks:
            self._flush.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return sorted(start.elapsed_time(end) / 1e3 for start, end in marks)


def measure_limits(device: torch.device, clock: Clock) -> Limits:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target, n = torch.empty_like(source), 8192
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    copy = statistics.median(clock.seconds(lambda: target.copy_(source)))
    bf16 = statistics.median(clock.seconds(lambda: a @ b))
    fp8 = bf16
    if torch.cuda.get_device_capability(device) >= (8, 9):
        fp8 = statistics.median(
            clock.seconds(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16))
        )
    return Limits(2 * source.numel() / copy, 2 * n**3 / bf16, 2 * n**3 / fp8)
