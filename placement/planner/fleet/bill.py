"""What devices cost that are taken by the hour: reserved and on demand, power, energy, spares for failures.

Rules, each a sentence: a device is worth reserving while its hours on demand would cost more. A device that serves
nobody is off. A host draws its own power while any of its devices is on. Devices fail independently, and one that
failed is away for the time of a repair.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.hardware import Hardware

Array = NDArray[np.float64]
JOULES = 3.6e6  # of a kWh
_MOST_SPARES = 1 << 20


@dataclass(frozen=True, slots=True)
class SiteCosts:
    """pue: power of the building over that of the machines. host_watts: of each host beside its devices (processors,
    fans, network). usd_per_kwh: 0 where energy is in the price of a device. available: the chance that spares are
    enough; mtbf and repair in seconds, infinite mtbf where nothing fails. reserved: USD per device hour by kind."""

    pue: float = 1.0
    host_watts: float = 0.0
    usd_per_kwh: float = 0.0
    available: float = 0.999
    mtbf: float = float("inf")
    repair: float = 0.0
    reserved: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class KindBill:
    """One kind of device over a period. peak: devices at most; spares come on top. reserved: of those and the spares,
    so many are paid for all hours. device_hours: in use. usd: for the period, energy included. kwh: likewise."""

    kind: str
    peak: int
    spares: int
    reserved: int
    device_hours: float
    usd: float
    usd_on_demand: float
    kwh: float
    watts_at_peak: float


def bill_of(chip: Hardware, hours: Array, site: SiteCosts) -> KindBill:
    """`hours`: devices of `chip` by hour. Spares stand by in every hour, reserved where that is to be had."""
    peak = int(hours.max())
    spares = spares_for(peak, site)
    price = (site.reserved or {}).get(chip.name)
    standing = hours + spares
    reserved = worth_reserving(standing, price / chip.usd_per_hour) if price is not None else 0
    demanded = float(np.maximum(standing - reserved, 0.0).sum())
    kwh = float(_watts(chip, hours, site).sum()) / 1e3
    energy = kwh * site.usd_per_kwh
    return KindBill(
        kind=chip.name,
        peak=peak,
        spares=spares,
        reserved=reserved,
        device_hours=float(hours.sum()),
        usd=reserved * len(hours) * (price or 0.0) + demanded * chip.usd_per_hour + energy,
        usd_on_demand=float(standing.sum()) * chip.usd_per_hour + energy,
        kwh=kwh,
        watts_at_peak=float(_watts(chip, hours.max(keepdims=True), site)[0]),
    )


def worth_reserving(hours: Array, share: float) -> int:
    """How many devices are used for more than `share` of the hours: each of them is cheaper reserved, where a reserved
    hour costs that share of one on demand."""
    if share >= 1:
        return 0
    order = np.sort(hours)[::-1]
    used = int(
        np.floor(share * len(hours))
    )  # the device that is used in exactly so many hours costs the same
    return int(order[used]) if used < len(order) else 0


def spares_for(devices: int, site: SiteCosts) -> int:
    """The fewest spare devices that are enough at any moment with the chance of `site`: devices away are as many as a
    Poisson number whose mean is devices x repair / mtbf (each fails once in `mtbf` and is away for `repair`)."""
    mean = devices * site.repair / site.mtbf
    if mean <= 0:
        return 0
    chance = total = float(np.exp(-mean)) if mean < 700 else 0.0
    if not chance:  # far from zero it is normal
        return int(np.ceil(mean + NormalDist().inv_cdf(site.available) * np.sqrt(mean)))
    count = 0
    while total < site.available and count < _MOST_SPARES:
        count += 1
        chance *= mean / count
        total += chance
    return count


def _watts(chip: Hardware, devices: Array, site: SiteCosts) -> Array:
    hosts = np.ceil(devices / chip.devices)
    return np.asarray((devices * chip.watts + hosts * site.host_watts) * site.pue)
