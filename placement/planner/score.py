"""What layouts are ranked by: the cost of a token, or how many devices a rate takes. Values only."""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.batches import Cells
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.search import DevicePool, PlanFamily

Array = NDArray[np.float64]


def cost_of(family: PlanFamily, objective: str) -> Array | None:
    """What the objective counts per second of this layout; None when it does not count per token."""
    attention, experts = family.decode_devices, family.expert_devices
    if objective == "dollar":
        return attention * family.attention.usd_per_hour + experts * family.experts.usd_per_hour
    if objective == "device":
        return np.asarray(attention + experts)
    if objective == "watt":
        return attention * family.attention.watts + experts * family.experts.watts
    return None


def _counted(chip: Hardware | None, objective: str) -> float:
    """The same of one device."""
    if chip is None:
        return 0.0
    return {"dollar": chip.usd_per_hour, "watt": chip.watts}.get(objective, 1.0)


def score_of(
    cells: Cells, objective: str, concurrency: float, wanted: float, pools: tuple[DevicePool, ...]
) -> tuple[Array, Array]:
    """(lower is better, infinite where the pools do not reach the wanted rate; how many instances it takes). wanted:
    tokens per second, 0 where one instance is asked for."""
    family, batch, tpot, prefill = cells.family, cells.low, cells.tpot, cells.prefill
    speed = family.ranks * batch * family.micro_batches * family.decoders / tpot
    speed = np.minimum(speed, (concurrency or np.inf) / tpot)
    cost = cost_of(family, objective)
    if cost is not None:
        score = (cost + prefill * _counted(family.prefill, objective)) / speed
    elif objective == "latency":
        score = tpot
    elif objective == "speed":
        score = 1 / speed
    else:
        score = family.decode_devices + family.expert_devices + prefill
    if not wanted:
        return np.asarray(score), np.ones_like(speed)
    instances = np.maximum(np.ceil(wanted / speed * (1 - 1e-9)), 1.0)
    whole = (
        score * instances * (speed if cost is not None else 1.0 if objective == "count" else 1 / instances)
    )
    held = _instances_held(family, pools, prefill)
    return np.asarray(np.where(instances <= held, whole, np.inf)), instances


def _instances_held(family: PlanFamily, pools: tuple[DevicePool, ...], prefill: Array) -> Array:
    """How many instances of each layout the pools hold."""
    sides = [
        (family.attention, family.decode_devices),
        (family.experts, family.expert_devices),
    ]
    sides += [(family.prefill, prefill)] if family.prefill is not None else []
    held = np.full_like(family.ranks, np.inf)
    for pool in pools:
        used = sum((devices for chip, devices in sides if chip.name == pool.chip.name), np.zeros_like(held))
        if not pool.endless:
            held = np.where(used > 0, np.minimum(held, pool.count // np.maximum(used, 1.0)), held)
    return np.asarray(held)
