"""Fits an engine's profile to rows that were measured of it: rates, factors, and what rows alike still have in common.

Every part of the physics is evaluated alone (`Rates.only`), so that the sum that is fitted is exactly what `plan` says
later. Priors pull every rate towards the kernels' own and every factor towards 1: a few rows move them little.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.curve import CurveSet
from afserve.placement.planner.perf.engine import PLAIN, Engine, Rates, Wait
from afserve.placement.planner.perf.engine_rows import (
    MANY,
    REACH,
    Like,
    MeasuredRows,
    local_error,
)
from afserve.placement.planner.perf.first_token import Crowd, crowd_of, first_token
from afserve.placement.planner.perf.fit import Fit, fit_positive
from bench.planner_alike import NOISE, learned, likeness
from bench.planner_served import ServedRow

Array = NDArray[np.float64]
PARTS = tuple(entry.name for entry in fields(Rates))
_WAITS = tuple(entry.name for entry in fields(Wait))
_RATE_PRIOR, _FACTOR_PRIOR, _ROUNDS = 0.5, 0.08, 30
_WAIT_PRIOR = (0.5, 0.5, 1.0, 1.0, 0.5, 1.0, 0.2)
COVERED = 0.8
_USUAL, _WORTH = 1.0, 10
"""The quantile that engines with hundreds of rows have, and how many rows of its own outweigh it."""


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Rows as arrays: seconds of every part of the physics (rows, parts) and of all of it at the kernels' own rates,
    likeness, and what was measured. Parts add up where nothing overlaps: one micro-batch, colocated."""

    rows: tuple[ServedRow, ...]
    parts: Array
    plain: Array
    like: tuple[Like, ...]
    crowds: Crowd
    requests: Array
    devices: Array
    tpot: Array
    ttft: Array
    series: NDArray[np.str_]

    def some(self, which: NDArray[np.bool_]) -> "Evidence":
        at = np.flatnonzero(which)
        return Evidence(
            tuple(self.rows[i] for i in at),
            self.parts[at],
            self.plain[at],
            tuple(self.like[i] for i in at),
            Crowd(**{f.name: getattr(self.crowds, f.name)[at] for f in fields(Crowd)}),
            *(getattr(self, name)[at] for name in ("requests", "devices", "tpot", "ttft", "series")),
        )


def evidence(rows: Sequence[ServedRow], curves: CurveSet, way: Engine = PLAIN) -> Evidence:
    """`way`: how the engine works; its rates are not looked at. Rows whose weights do not fit are left out."""
    kept, parts, plain, like, crowds, requests = [], [], [], [], [], []
    alone = {name: Rates(**{each.name: float(each.name == name) for each in fields(Rates)}) for name in PARTS}
    settings = {name: replace(way, rates=rates) for name, rates in alone.items()}
    for row in rows:
        setting = row.setting(curves, way)
        batch = row.batch(setting)
        if batch[0] < 1:
            continue
        family = row.family
        kept.append(row)
        parts.append(
            [float(family.stages(row.setting(curves, one), batch).tpot[0]) for one in settings.values()]
        )
        plain.append(float(family.stages(setting, batch).tpot[0]))
        like.append(row.like(setting))
        resident = batch * row.micro_batches
        crowds.append(
            crowd_of(
                setting,
                row.chip,
                family.tensor_parallel,
                family.ranks,
                row.places(setting) * row.micro_batches,
                np.array([row.tpot]),
            )
        )
        requests.append(float(family.ranks[0] * resident[0]))
    joined = {f.name: np.concatenate([getattr(c, f.name) for c in crowds]) for f in fields(Crowd)}
    return Evidence(
        tuple(kept),
        np.array(parts),
        np.array(plain),
        tuple(like),
        Crowd(**joined),
        np.log2(np.maximum(requests, 1.0)),
        np.log2(np.array([float(row.total_devices) for row in kept])),
        np.array([row.tpot for row in kept]),
        np.array([row.ttft for row in kept]),
        np.array([row.series for row in kept]),
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """Factors by label, as places in a flat vector."""

    labels: tuple[str, ...]
    uses: Array

    @classmethod
    def of(cls, like: Sequence[Like]) -> "_Named":
        labels = tuple(sorted({label for entry in like for label in entry.labels}))
        uses = np.array([[float(label in entry.labels) for label in labels] for entry in like])
        return cls(labels, uses)

    def factor(self, logs: Array) -> Array:
        return np.asarray(np.exp(self.uses @ logs))

    def values(self, logs: Array) -> Mapping[str, float]:
        return {label: round(float(np.exp(log)), 4) for label, log in zip(self.labels, logs, strict=True)}


def fit_engine(
    engine: Engine, found: Evidence, *, rates: bool = True, core: NDArray[np.bool_] | None = None
) -> Engine:
    """`engine` with everything fitted to `found`. Not `rates`: so few rows that the kernels' own rates stay, and only
    the errors of rows alike are learned. core: rows that rates, factors and waits are fitted to; the others only say
    what rows like them have in common beyond those."""
    core = np.ones(len(found.rows), dtype=bool) if core is None else core
    fitted, said = engine, found.plain
    if rates:
        kept = found.some(core)
        rated, factors = _fit_rates(kept, _Named.of(kept.like))
        fitted = replace(engine, rates=rated, factors=factors)
        said = (found.parts * np.array([getattr(rated, name) for name in PARTS])).sum(axis=1)
        said = said * np.array([fitted.labelled(entry) for entry in found.like])
    alike = likeness(found.like, found.requests, found.devices)
    shared = likeness(found.like, found.requests, found.devices, shared=True)
    weights, left = learned(shared, np.log(found.tpot / said), found.series, NOISE["tpot"])
    wait, wait_weights = Wait(), np.zeros_like(weights)
    wait_factors: Mapping[str, float] = {}
    known = found.ttft > 0
    if rates and known.any():
        wait, wait_factors, wait_weights[known] = _fit_wait(
            found.some(known), np.exp(-left[known]), core[known]
        )
    others = alike * (found.series[:, None] != found.series)
    size = np.abs(left) / local_error(others, left)
    quantile = _quantile(size)
    many = size[found.requests > np.log2(MANY)]
    rows = MeasuredRows(
        found.like,
        found.requests,
        found.devices,
        weights,
        wait_weights,
        left,
        quantile,
        max(_quantile(many), quantile) if len(many) >= _WORTH else quantile,
    )
    summary = {
        "rows": len(left),
        "series": len(np.unique(found.series)),
        "tpot_error_unseen_series": round(float(np.median(np.abs(np.expm1(left)))), 4),
    }
    return replace(fitted, wait=wait, wait_factors=wait_factors, rows=rows, fit={**engine.fit, **summary})


def beside(engine: Engine, odd: Evidence) -> Engine:
    """`engine` with rows that correct nothing and make the interval near them as wide as they are off: rows in a mode
    that their source does not say."""
    if not len(odd.rows):
        return engine
    said = (odd.parts * np.array([getattr(engine.rates, name) for name in PARTS])).sum(axis=1)
    factors = [
        float(engine.factor(like, np.exp2(requests), np.exp2(devices)))
        for like, requests, devices in zip(odd.like, odd.requests, odd.devices, strict=True)
    ]
    rows, none = engine.rows, np.zeros(len(odd.rows))
    joined = MeasuredRows(
        rows.like + odd.like,
        np.concatenate([rows.requests, odd.requests]),
        np.concatenate([rows.devices, odd.devices]),
        np.concatenate([rows.tpot, none]),
        np.concatenate([rows.ttft, none]),
        np.concatenate([rows.wrong, np.log(odd.tpot / said / np.array(factors))]),
        rows.quantile,
        rows.quantile_many,
    )
    return replace(engine, rows=joined)


def _quantile(size: Array) -> float:
    """Of errors over local errors, drawn towards the usual one where rows are few."""
    own = float(np.quantile(size, _rank(len(size))))
    return (len(size) * own + _WORTH * _USUAL) / (len(size) + _WORTH)


def _rank(count: int) -> float:
    """The conformal quantile: a little above 80 % where rows are few."""
    return min(COVERED * (1 + 1 / count), 1.0)


def _fit_rates(found: Evidence, named: _Named) -> tuple[Rates, Mapping[str, float]]:
    parts, labels = len(PARTS), len(named.labels)

    def predict(values: Array) -> Array:
        return np.asarray((found.parts * values[:parts]).sum(axis=1) * named.factor(np.log(values[parts:])))

    fit = _fitted(predict, found.tpot, [1.0] * parts, [_RATE_PRIOR] * parts, labels)
    rates = Rates(**{name: round(float(v), 5) for name, v in zip(PARTS, fit.values[:parts], strict=True)})
    return rates, named.values(np.log(fit.values[parts:]))


def _fit_wait(
    found: Evidence, ratio: Array, core: NDArray[np.bool_]
) -> tuple[Wait, Mapping[str, float], Array]:
    """(the wait, its factors, weights of the correction). `ratio`: predicted over measured step, for a series that was
    not seen: a wait is computed with predicted steps. core: as of `fit_engine`."""
    kept = found.some(core)
    named = _Named.of(kept.like)
    crowd = replace(kept.crowds, step=kept.tpot * ratio[core])
    start = [getattr(Wait(), name) for name in _WAITS]
    count = len(start)

    def predict(values: Array) -> Array:
        return first_token(crowd, Wait(*values[:count]), named.factor(np.log(values[count:])))

    fit = _fitted(predict, kept.ttft, start, list(_WAIT_PRIOR), len(named.labels))
    wait = Wait(*(round(float(value), 5) for value in fit.values[:count]))
    factors = named.values(np.log(fit.values[count:]))
    every = replace(found.crowds, step=found.tpot * ratio)
    labelled = [np.prod([factors.get(label, 1.0) for label in like.labels]) for like in found.like]
    errors = np.log(found.ttft / first_token(every, wait, np.array(labelled)))
    shared = likeness(found.like, found.requests, found.devices, shared=True) ** REACH["ttft"]
    weights, _ = learned(shared, errors, found.series, NOISE["ttft"])
    return wait, factors, weights


def _fitted(
    predict: Callable[[Array], Array], measured: Array, start: list[float], prior: list[float], labels: int
) -> Fit:
    return fit_positive(
        predict,
        measured,
        np.array([*start, *[1.0] * labels]),
        prior_spread=np.array([*prior, *[_FACTOR_PRIOR] * labels]),
        rounds=_ROUNDS,
    )
