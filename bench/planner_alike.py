"""What measured rows of an engine say of rows alike: their likeness, and the weights of what a fit leaves on them.

The planner reads these weights (`placement/planner/perf/engine_rows.py`, which says what likeness is); only benches
learn them. It knows no physics.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.engine_rows import DEVICES, LENGTHS, REQUESTS, SIGNAL, UNLIKE, Like

Array = NDArray[np.float64]
NOISE, CLIP = 0.05, 2.0
"""Spread of the errors that rows alike do not share, and the largest error that is learned from."""
_TAIL, _ROUNDS = 3.0, 8
"""Degrees of freedom of the errors that rows do not share (Student's t: a benchmark that compiled while it was measured
is off by ten times), and rounds of weighing them."""


def likeness(rows: tuple[Like, ...], requests: Array, devices: Array) -> Array:
    """Of every row to every other; requests and devices in doublings."""
    exponent = _apart(requests, REQUESTS) + _apart(devices, DEVICES)
    for length in ("prompt", "answer"):
        exponent = exponent + _apart(np.log2([getattr(row, length) for row in rows]), LENGTHS)
    for place, cost in enumerate(UNLIKE.values()):
        names = np.array([row.names[place] for row in rows])
        exponent = exponent + cost * (names[:, None] != names)
    return np.asarray(np.exp(-exponent))


def _apart(values: Array, deviation: float) -> Array:
    return np.asarray(((values[:, None] - values) / deviation) ** 2 / 2)


def learned(alike: Array, errors: Array, series: NDArray[np.str_]) -> tuple[Array, Array]:
    """(weights of the correction, errors that are left on each row when its whole series is not learned from).

    `alike` is (rows, rows), `errors` the fit's log errors: measured over predicted. A row that those alike contradict
    is heard less: what it does not share with them is taken for noise, and the wider its noise, the less it says.
    """
    heard = np.clip(errors, -CLIP, CLIP)
    noise = np.full(len(errors), NOISE**2)
    inverse = np.linalg.inv(SIGNAL**2 * alike + np.diag(noise))
    for _ in range(_ROUNDS):
        alone = noise * (inverse @ heard)  # what of each error is not shared
        noise = NOISE**2 * np.maximum(1.0, (_TAIL + (alone / NOISE) ** 2) / (_TAIL + 1))
        inverse = np.linalg.inv(SIGNAL**2 * alike + np.diag(noise))
    weights = inverse @ heard
    left = errors - heard
    for name in np.unique(series):
        own = np.flatnonzero(series == name)
        left[own] += np.linalg.solve(inverse[np.ix_(own, own)], weights[own])
    return weights, left
