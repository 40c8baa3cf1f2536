"""For every layout of a family the largest batch inside the targets: TPOT rises with the batch, so an interval of it is
narrowed for whole grids of layouts at once. Values only.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import Stages
from afserve.placement.planner.search import PlanFamily, Targets

Array = NDArray[np.float64]


def best_batches(
    family: PlanFamily,
    setting: Setting,
    targets: Targets,
    cost: Array | None = None,
    running: int = 0,
) -> "Cells":
    """The feasible layouts at their largest batch; no layouts when nothing is feasible.

    With a `cost` per layout only those that may still have the least cost per token, of layouts with as many instances
    that decode, are carried to the end: for any batch up to `high`, throughput is at most that of `high` requests at
    the TPOT of `low`.
    """
    limit = family.batch_limit(setting, running)
    none = np.zeros_like(limit)
    cells = Cells(family, none, none, none, limit, limit if cost is None else cost).keep(limit >= 1)
    high = cells.limit
    while (cells.low < high).any():
        cells, high = _narrowed(cells, setting, targets, high)
        served = cells.low >= 1
        cells, high = cells.keep(served), high[served]
        if cost is not None and len(high):
            alive = cells.least(high) <= cells.least_found() * (1 + 1e-12)
            if alive.mean() < _WORTH_DROPPING:
                cells, high = cells.keep(alive), high[alive]
    return cells


def _narrowed(cells: "Cells", setting: Setting, targets: Targets, high: Array) -> tuple["Cells", Array]:
    """The same cells and the most that may do, after as many batches (B) of each layout (L) were tried at once as take
    hardly longer than one: calls cost more than sums over few layouts. At first that is one request and more; `low`
    stays 0 where one is too much."""
    count, least = min(max(_AT_ONCE // len(high), 1), 15), np.maximum(cells.low, 1.0)
    step_B1 = np.arange(1.0, count + 1)[:, None]
    batch_BL = np.ceil(least * (high / least) ** (step_B1 / (count + 1)))
    batch_BL = np.minimum(np.maximum(batch_BL, least + step_B1), high)
    if not cells.low.any():
        batch_BL, count = np.concatenate([least[None], batch_BL]), count + 1
    stages, fine_BL = _try(cells, setting, targets, batch_BL)
    fine_BL &= batch_BL > cells.low
    fine_L = np.logical_and.accumulate(fine_BL).sum(axis=0)  # so many of the smallest ones
    at_L = np.arange(len(high))
    beyond = batch_BL[np.minimum(fine_L, count - 1), at_L]
    high = np.where(fine_L == count, high, np.maximum(beyond - 1, cells.low))
    last = np.maximum(fine_L - 1, 0), at_L
    better = fine_L > 0
    low, tpot, prefill = (
        np.where(better, found[last], before)
        for found, before in (
            (batch_BL, cells.low),
            (stages.tpot, cells.tpot),
            (stages.prefill, cells.prefill),
        )
    )
    return replace(cells, low=low, tpot=tpot, prefill=prefill), high


_AT_ONCE = 512
_WORTH_DROPPING = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Layouts under search: the largest batch known to meet the targets, its TPOT and the devices that read its
    prompts, the memory limit, the cost."""

    family: PlanFamily
    low: Array
    tpot: Array
    prefill: Array
    limit: Array
    cost: Array

    def keep(self, which: NDArray[np.bool_]) -> "Cells":
        if which.all():
            return self
        numbers = (self.low, self.tpot, self.prefill, self.limit, self.cost)
        return Cells(self.family.subset(which), *(each[which] for each in numbers))

    def least_found(self) -> Array | float:
        """The least cost per token that is known, of layouts with as many instances that decode."""
        found, counts = self.least(self.low), self.family.decoders
        if isinstance(counts, int):
            return float(found.min())
        table = np.full(int(counts.max()) + 1, np.inf)
        at = counts.astype(np.int64)
        np.minimum.at(table, at, found)
        return np.asarray(table[at])

    def least(self, batch: Array) -> Array:
        """The cost per token that `batch` requests at the present TPOT would have."""
        at_once = self.family.ranks * self.family.micro_batches * self.family.decoders * batch
        return np.asarray(self.cost * self.tpot / at_once)


def _try(cells: Cells, setting: Setting, targets: Targets, batch: Array) -> tuple[Stages, NDArray[np.bool_]]:
    family, stages = cells.family, cells.family.stages(setting, batch)
    keeps_up = (stages.prefill_share < 0.95) | (setting.concurrency > 0)
    fine = (stages.tpot <= targets.tpot) & keeps_up & (stages.first_token <= targets.ttft)
    if family.prefill is not None:
        fine &= stages.prefill <= family.left_for_prefill()
    fine &= (batch <= 1) | family.decodes(setting, batch, stages.tpot)
    return stages, np.asarray(fine)
