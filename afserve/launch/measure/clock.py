"""How kernels are timed: best, median and 90th percentile of repeats, and the bandwidth of a plain read."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from afserve.kernels.native import Native


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Seconds of one run."""

    best: float
    median: float
    p90: float

    def less(self, seconds: float) -> "RunTimes":
        return RunTimes(*(max(0.0, each - seconds) for each in (self.best, self.median, self.p90)))


def best_of(run: Callable[[], object], repeats: int) -> RunTimes:
    run()
    found = [seconds_of(run) for _ in range(repeats)]
    found.sort()
    return RunTimes(found[0], found[len(found) // 2], found[len(found) * 9 // 10])


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def out_of_cache(least: int = 256 << 20) -> int:
    """Bytes that no cache of this machine holds: a fifth more than the largest, at least so many."""
    sizes = [
        int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := path.read_text().strip())[-1] in "KM"
    ]
    return max(least, max(sizes, default=0) * 6 // 5)


def out_of_cache_data(native: Native) -> Tensor:
    data = native.empty_cache((out_of_cache() // 4,), torch.float32)
    return data.fill_(1.0)  # untouched pages are all the same page of zeros, which a cache holds


def measure_read(native: Native, data: Tensor, repeats: int = 5) -> float:
    """GB/s, the faster of our loop and torch.sum over float32."""
    ours, theirs = best_of(lambda: native.stream(data), repeats), best_of(data.sum, repeats)
    return data.numel() * 4 / min(ours.best, theirs.best) / 1e9
