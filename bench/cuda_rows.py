"""One row per case: its times beside the chip's limits and torch's kernel, or what failed. A failure ends no run.

It knows neither kernels nor processes: cases, limits and a clock come from outside, rows go to a callable.
"""

import statistics
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Protocol

import torch
import triton
from triton.errors import TritonError

from afserve.kernels.devices.cuda import chip_of
from afserve.kernels.devices.opened import device_of
from bench.cuda_cases import Planned
from bench.cuda_clock import Case, Limits
from bench.origin import commit

Row = dict[str, object]
FAILURES = (  # what a launcher, a compiler or an allocator raises; none of them may end a run
    RuntimeError, TritonError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError,
)  # fmt: skip


class Times(Protocol):
    def seconds(self, run: Callable[[], object]) -> list[float]: ...


class DeviceLost(Exception):
    """The device answers no more in this process; the next case needs a new one."""


def measure(
    cases: Iterable[Planned], limits: Limits, clock: Times, write: Callable[[Row], None], device: torch.device
) -> None:
    """A row for each case, in order. Raises DeviceLost after the row of the case that lost it."""
    for planned in cases:
        try:
            row = row_of(planned.build(), limits, clock)
        except FAILURES as error:
            row = failed(planned.name, error)
        write(row)
        if "error" in row:
            _check(device)


def row_of(case: Case, limits: Limits, clock: Times) -> Row:
    times = clock.seconds(case.run)
    bound, median = limits.seconds(case), statistics.median(times)
    row: Row = {
        "op": case.op, "case": case.case, "us_median": 1e6 * median, "us_p10": 1e6 * times[len(times) // 10],
        "us_p90": 1e6 * times[-1 - len(times) // 10], "repeats": len(times), "bytes": case.bytes, "flops": case.flops,
        "us_bound": 1e6 * bound, "of_bound": bound / median, "of_copy": case.bytes / limits.copy / median,
    }  # fmt: skip
    if case.peer is not None:
        try:
            peer = statistics.median(clock.seconds(case.peer))
            row |= {"peer": "torch", "peer_us_median": 1e6 * peer, "peer_ratio": peer / median}
        except FAILURES as error:
            row["peer_error"] = _line(error)
    missed = {
        name: bar
        for name, bar in case.bars.items()
        if not isinstance(got := row.get(name), float) or got < bar
    }
    return row | {"bars": dict(case.bars), "missed": sorted(missed)}


def stamp(device: torch.device) -> Row:
    """Where a row is from."""
    chip, date = chip_of(device).name, datetime.now(UTC).isoformat(timespec="seconds")
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"machine": chip, "commit": commit(), "date": date, **versions}


def failed(name: str, error: BaseException | str) -> Row:
    return {"case": name, "error": error if isinstance(error, str) else _line(error)}


def _check(device: torch.device) -> None:
    try:
        device_of(device).finish()
    except RuntimeError as error:
        raise DeviceLost(str(error)) from error


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
