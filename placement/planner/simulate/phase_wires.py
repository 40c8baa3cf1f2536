"""Seconds of rows between the devices of a pool, as lines over rows: what they take at none, and each row more.

It knows transfers and no stage.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from afserve.placement.planner.perf.exchange import all_to_all, m2n_ways
from afserve.placement.planner.simulate.phase_tables import StageTables

_AT = 4096.0  # rows at which the slope of a transfer is taken
Wire = tuple[tuple[float, float], tuple[float, float]]
"""Of dispatch and of combine: seconds at no rows, and for each row of a rank."""


def quickest(kernels: Iterable[Wire], rows: float) -> Wire:
    """The kernel that takes least for so many rows of a device, both ways."""
    return min(kernels, key=lambda one: (one[0][0] + one[0][1] * rows) + (one[1][0] + one[1][1] * rows))


@lru_cache(maxsize=1024)
def wires(tables: StageTables, devices: int) -> tuple[Wire, ...]:
    """Between `devices` that each have attention and experts, per kernel: a copy to each device that is chosen, or one
    to each host, which passes it on."""
    setting, chip, count = tables.setting, tables.chip, np.array([float(devices)])
    away = 1 - 1 / -(-devices // max(chip.devices, 1))

    def by_host(rows: float) -> tuple[float, float]:
        there, back = m2n_ways(setting, chip, chip, 1, count, count, np.array([rows]))
        return float(there.seconds[0]), float(back.seconds[0])

    def by_device(rows: float) -> tuple[float, float]:
        pair = all_to_all(setting, chip, count, np.array([rows]))
        return float(pair[0][0]), float(pair[1][0])

    kinds = [line_of(by_device)]
    if away:
        there, back = line_of(by_host)
        kinds.append(((there[0], there[1] * away), (back[0], back[1] * away)))
    return tuple(kinds)


def line_of(transfer: Callable[[float], tuple[float, float]]) -> Wire:
    """Of (dispatch, combine) by rows: each as (seconds at no rows, seconds per row)."""
    empty, full = transfer(0.0), transfer(_AT)
    there, back = ((none, (some - none) / _AT) for none, some in zip(empty, full, strict=True))
    return there, back
