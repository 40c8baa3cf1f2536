"""How many instances of a plan each hour of a load takes, and what several loads take together by kind of device.

An instance serves what its plan serves inside the targets. Instances are started and ended by the hour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.fleet.load import HourlyLoad
from afserve.placement.planner.plan import Plan

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class InstanceNeed:
    """One load on instances of `plan`, each of which serves `capacity` requests per second; `instances` by hour."""

    name: str
    plan: Plan
    load: HourlyLoad
    capacity: float
    answer: float
    instances: Array

    @property
    def tokens(self) -> float:
        """Generated in the whole period."""
        return self.load.requests * self.answer

    def devices(self) -> dict[str, Array]:
        """Devices by kind and hour."""
        return {kind: count * self.instances for kind, count in self.plan.devices_used.items()}


def need_of(name: str, plan: Plan, load: HourlyLoad, answer: float, headroom: float) -> InstanceNeed:
    """`headroom`: so much more than the load is always ready, for what comes unevenly within the hour."""
    capacity = plan.tok_s / answer
    instances = np.ceil(np.array(load.rates) * (1 + headroom) / capacity * (1 - 1e-9))
    return InstanceNeed(name, plan, load, capacity, answer, instances)


def cheapest(
    name: str,
    plans: Sequence[Plan],
    load: HourlyLoad,
    answer: float,
    headroom: float,
    months: Sequence[HourlyLoad],
) -> InstanceNeed:
    """The need of `load` on that of the plans which costs least over the hours of all `months`: small instances follow
    them more closely."""

    def cost(plan: Plan) -> float:
        needs = (need_of(name, plan, month, answer, headroom) for month in months)
        return sum(float(need.instances.sum()) for need in needs) * plan.usd_per_hour

    return need_of(name, min(plans, key=cost), load, answer, headroom)


def together(needs: Sequence[InstanceNeed]) -> dict[str, Array]:
    """Devices by kind and hour that all of them take; shorter periods repeat themselves in the longest one."""
    hours = max(len(need.instances) for need in needs)
    total: dict[str, Array] = {}
    for need in needs:
        for kind, devices in need.devices().items():
            total[kind] = total.get(kind, np.zeros(hours)) + np.resize(devices, hours)
    return total


def peaks(needs: Sequence[InstanceNeed]) -> Mapping[str, int]:
    """Devices by kind if each load had its own."""
    found: dict[str, int] = {}
    for need in needs:
        for kind, devices in need.devices().items():
            found[kind] = found.get(kind, 0) + int(devices.max())
    return found
