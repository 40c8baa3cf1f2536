"""Robust least squares in log space, for the curves of `curve.py`.

All parameters are positive and are varied by their logarithm. Errors are log ratios, so being 10 % off counts the same
for a row of 10 us and for one of 10 ms. Huber weights keep a few broken rows from bending the rest. It knows nothing of
kernels or devices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_HUBER = 1.5
_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class Fit:
    """values: the fitted positive parameters. spread: robust standard deviation of log(predicted/measured).
    median_error: median |predicted/measured - 1|. rows: how many were fitted."""

    values: Array
    spread: float
    median_error: float
    rows: int


def fit_positive(
    predict: Callable[[Array], Array],
    measured: Array,
    start: Array,
    *,
    prior_spread: Array | None = None,
    rounds: int = 60,
) -> Fit:
    """Levenberg-Marquardt on log parameters. `predict(values)` gives one prediction per measured row.

    `prior_spread` (log units, per parameter) ties each parameter to its start; a small one holds it there.
    """
    centre = np.log(start)
    pull = np.zeros_like(centre) if prior_spread is None else 1.0 / prior_spread
    target = np.log(measured)
    theta, damping = centre.copy(), 1e-2

    def residuals(at: Array) -> Array:
        return np.asarray(np.log(np.maximum(predict(np.exp(at)), 1e-12)) - target)

    error = residuals(theta)
    scale = _scale(error)
    cost = _cost(error, scale, pull * (theta - centre))
    for _ in range(rounds):
        jacobian = _jacobian(residuals, theta, error)
        weight = 1.0 / np.maximum(1.0, np.abs(error) / (_HUBER * scale)) / scale**2
        normal = (jacobian * weight[:, None]).T @ jacobian + np.diag(pull**2)
        slope = jacobian.T @ (weight * error) + pull**2 * (theta - centre)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), slope)
        trial = theta - np.clip(step, -1.0, 1.0)
        trial_error = residuals(trial)
        trial_cost = _cost(trial_error, scale, pull * (trial - centre))
        if trial_cost < cost:
            finished = cost - trial_cost < 1e-7 * cost
            theta, error, damping = trial, trial_error, damping / 3
            scale = _scale(error)
            cost = _cost(error, scale, pull * (theta - centre))
            if finished:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return summarize(np.exp(theta), error)


def summarize(values: Array, log_errors: Array) -> Fit:
    return Fit(values, _scale(log_errors), float(np.median(np.abs(np.expm1(log_errors)))), len(log_errors))


def _jacobian(residuals: Callable[[Array], Array], theta: Array, error: Array) -> Array:
    columns = []
    for index in range(len(theta)):
        moved = theta.copy()
        moved[index] += _STEP
        columns.append((residuals(moved) - error) / _STEP)
    return np.stack(columns, axis=1)


def _scale(error: Array) -> float:
    """1.48 x the median absolute log error: a standard deviation that outliers do not move."""
    return max(1.4826 * float(np.median(np.abs(error))), 1e-3)


def _cost(error: Array, scale: float, tied: Array) -> float:
    size = np.abs(error) / scale
    huber = np.where(size <= _HUBER, 0.5 * size**2, _HUBER * (size - 0.5 * _HUBER))
    return float(huber.sum() + 0.5 * (tied**2).sum())
