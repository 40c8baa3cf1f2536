"""What measured rows of an engine say of rows alike: their likeness, and the weights of what a fit leaves on them.

The planner reads these weights (`placement/planner/perf/engine_rows.py`, which says what likeness is); only benches
learn them. It knows no physics.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.engine_rows import (
    DEVICES,
    LENGTHS,
    REQUESTS,
    SHARE,
    SHARE_REQUESTS,
    SIGNAL,
    UNLIKE,
    Like,
)

Array = NDArray[np.float64]
NOISE, CLIP = {"tpot": 0.04, "ttft": 0.1}, 2.0
"""Spread of the errors that rows alike do not share, and the largest error that is learned from."""
_TAIL, _ROUNDS = 4.0, 8
"""Degrees of freedom of the errors that rows do not share (Student's t: a benchmark that compiled while it was measured
is off by ten times), and rounds of weighing them."""


def likeness(rows: tuple[Like, ...], requests: Array, devices: Array, *, shared: bool = False) -> Array:
    """Of every row to every other; requests and devices in doublings. shared: of what their errors share."""
    exponent = _apart(requests, SHARE_REQUESTS if shared else REQUESTS) + _apart(devices, DEVICES)
    for length in ("prompt", "answer"):
        exponent = exponent + _apart(np.log2([getattr(row, length) for row in rows]), LENGTHS)
    for place, cost in enumerate((SHARE if shared else UNLIKE).values()):
        names = np.array([row.names[place] for row in rows])
        exponent = exponent + cost * (names[:, None] != names)
    return np.asarray(np.exp(-exponent))


def _apart(values: Array, deviation: float) -> Array:
    return np.asarray(((values[:, None] - values) / deviation) ** 2 / 2)


def learned(alike: Array, errors: Array, series: NDArray[np.str_], noise: float) -> tuple[Array, Array]:
    """(weights of the correction, errors that are left on each row when its whole series is not learned from).

    `alike` is (rows, rows), `errors` the fit's log errors: measured over predicted; noise: as of `NOISE`. A row that
    those alike contradict is heard less: what it does not share with them is taken for noise, and the wider its noise,
    the less it says.
    """
    heard = np.clip(errors, -CLIP, CLIP)
    own = np.full(len(errors), noise**2)
    inverse = np.linalg.inv(SIGNAL**2 * alike + np.diag(own))
    for _ in range(_ROUNDS):
        alone = own * (inverse @ heard)  # what of each error is not shared
        own = noise**2 * np.maximum(1.0, (_TAIL + (alone / noise) ** 2) / (_TAIL + 1))
        inverse = np.linalg.inv(SIGNAL**2 * alike + np.diag(own))
    weights = inverse @ heard
    left = errors - heard
    for name in np.unique(series):
        mine = np.flatnonzero(series == name)
        left[mine] += np.linalg.solve(inverse[np.ix_(mine, mine)], weights[mine])
    return weights, left
