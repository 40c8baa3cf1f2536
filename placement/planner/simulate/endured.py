"""What losses cost over many days: places of a plan are lost at random and filled again, and what is left is added up.

The speed with some places empty is that of `losses.py`; nothing is played request by request. Values in, values out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.prefill import BUSY
from afserve.placement.planner.simulate.losses import READERS, PlanRole

Array = NDArray[np.float64]
DAY = 86400.0
MOST = 200_000
"""Losses that are drawn at most."""


@dataclass(frozen=True, slots=True)
class Endured:
    """losses: by role. kept: tokens of all days over those without any loss. still, fewer: seconds per day in which
    nothing is served, and in which some place is empty while the others serve."""

    losses: dict[str, int]
    kept: float
    still: float
    fewer: float


def expected(roles: Sequence[PlanRole], mtbf: float, days: float) -> float:
    """Losses, where a device is lost every `mtbf` seconds on average."""
    return sum(role.devices for role in roles) * days * DAY / mtbf


def endured(roles: Sequence[PlanRole], mtbf: float, days: float, again: float, seed: int) -> Endured:
    """`again`: seconds of the whole deployment that it takes to compute a lost rank's requests again. Places are lost
    independently of each other, and of how long they have served; more than `MOST` losses are not drawn."""
    assert expected(roles, mtbf, days) <= MOST
    random, whole = np.random.default_rng(seed), days * DAY
    places = [(role, instance) for role in roles for instance in range(role.instances)]
    lost = [
        np.sort(random.uniform(0.0, whole, random.poisson(role.units * role.size * whole / mtbf)))
        for role, _ in places
    ]
    drawn = list(zip(places, lost, strict=True))
    marks = np.unique(np.concatenate([[0.0, whole], *(_marks(role, at) for (role, _), at in drawn)]))
    marks = marks[marks <= whole]
    begins, lasts = marks[:-1], np.diff(marks)
    speeds = np.ones((max(role.instances for role in roles), len(begins)))
    readers, empty = np.ones_like(begins), np.zeros(len(begins), dtype=np.bool_)
    for (role, instance), at in drawn:
        gone = np.minimum(_open(begins, at, role.down), len(role.speed) - 1)
        empty |= gone > 0
        left = np.array(role.speed)[gone]
        stands = _open(begins, at, role.stall) > 0
        if role.name == READERS:
            readers = np.where(stands, 0.0, np.minimum(left / BUSY, 1.0))
            continue
        if role.moves:
            left = left * np.maximum(role.units - gone, 0) / role.units
        speeds[instance] = np.where(stands, 0.0, speeds[instance] * left)
    speed = np.minimum(speeds.mean(axis=0), readers)
    moved = sum(len(at) for (role, _), at in drawn if role.moves)
    done = float((speed * lasts).sum()) - again * moved
    return Endured(
        losses={role.name: sum(len(at) for (one, _), at in drawn if one is role) for role in roles},
        kept=max(done / whole, 0.0),
        still=float(lasts[speed <= 0].sum()) / days,
        fewer=float(lasts[empty & (speed > 0)].sum()) / days,
    )


def _marks(role: PlanRole, at: Array) -> Array:
    return np.concatenate([at, at + role.stall, at + role.down])


def _open(when: Array, begun: Array, lasts: float) -> NDArray[np.int64]:
    """How many of the spans that begin at `begun` (sorted) and last so long hold each moment."""
    before = np.searchsorted(begun, when, side="right")
    over = np.searchsorted(begun + lasts, when, side="right")
    return np.asarray(before - over)
