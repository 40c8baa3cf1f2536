"""Fits the rates of served engines to some rows and predicts others: `ServedModel`.

A rate is one global number, times a factor per engine and feature, a factor per chip, and a factor per engine and
model. Priors pull every factor to 1, so a few rows move it little. A prediction carries the spread of the fit's own
errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.pipeline import larger
from afserve.placement.planner.fit import Fit, fit_positive
from afserve.placement.planner.served import DECODE, PREFILL, ServedRow, decode_features, prefill_features

Array = NDArray[np.float64]
_DECODE_START = (2e-5, 5e-6, 1.25, 1.4, 2.0, 2.0, 1.25, 2.5, 1.5, 1e-7, 5e-4, 1e-6)
_PREFILL_START = (2.0, 2.5, 2.0, 1.5, 2e-5, 0.3)
_WAIT_START = (0.02, 0.1, 1.0, 0.2, 0.9)
"""Seconds before scheduling, prompts queued per concurrent request, steps waited, 0.1 ms per request, and the power
of the concurrency that queues."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The names that factors belong to: engines, then each of `ServedRow.labels`. Unseen names get the factor 1."""

    engines: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[ServedRow]) -> "Labels":
        columns = zip(*(row.labels for row in rows), strict=True)
        return cls(tuple(sorted({row.engine for row in rows})), tuple(tuple(sorted(set(c))) for c in columns))

    @property
    def named(self) -> int:
        return sum(len(names) for names in self.others)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows as arrays. `engine` and `other` index Labels; -1 finds the 1 that `_with_one` puts last."""

    decode: Array
    prefill: Array
    concurrency: Array
    running: Array
    answer: Array
    workers: Array
    mixed: Array
    limit: Array
    tpot: Array
    ttft: Array
    engine: NDArray[np.int64]
    other: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, rows: Sequence[ServedRow], labels: Labels) -> "Table":
        def numbers(name: str) -> Array:
            return np.array([float(getattr(row, name)) for row in rows])

        return cls(
            decode=np.array([decode_features(row) for row in rows]),
            prefill=np.array([prefill_features(row) for row in rows]),
            concurrency=numbers("concurrency"),
            running=numbers("running"),
            answer=numbers("answer"),
            workers=numbers("prefill_workers") / numbers("decode_workers"),
            mixed=1.0 - numbers("disaggregated"),
            limit=np.minimum(numbers("limit"), numbers("concurrency")),
            tpot=numbers("tpot"),
            ttft=numbers("ttft"),
            engine=_places([row.engine for row in rows], labels.engines),
            other=tuple(
                _places([row.labels[kind] for row in rows], names) for kind, names in enumerate(labels.others)
            ),
        )

    def factor(self, values: Array, labels: Labels) -> Array:
        """The product of each row's label factors, from the flat vector of all of them."""
        parts = np.split(values, np.cumsum([len(names) for names in labels.others])[:-1])
        total = np.ones(len(self.tpot))
        for part, places in zip(parts, self.other, strict=True):
            total = total * _with_one(part)[places]
        return total


def _places(values: Sequence[str], known: tuple[str, ...]) -> NDArray[np.int64]:
    index = {name: place for place, name in enumerate(known)}
    return np.array([index.get(value, -1) for value in values])


def _with_one(factors: Array) -> Array:
    return np.concatenate([factors, np.ones((1, *factors.shape[1:]))])


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """Fitted parameters; `tpot` and `ttft` predict seconds."""

    labels: Labels
    decode: Fit
    wait: Fit

    def tpot(self, rows: Sequence[ServedRow]) -> Array:
        return _tpot(self.decode.values, Table.of(rows, self.labels), self.labels)

    def ttft(self, rows: Sequence[ServedRow]) -> Array:
        table = Table.of(rows, self.labels)
        return _ttft(self.wait.values, table, self.labels, _tpot(self.decode.values, table, self.labels))

    def rates(self, engine: str) -> dict[str, float]:
        """The decode rates of one engine, by feature."""
        base, _, _, factors, _ = _decode_parts(self.decode.values, self.labels)
        row = factors[self.labels.engines.index(engine)]
        return {name: float(rate) for name, rate in zip(DECODE, base * row, strict=True)}


def fit_served(rows: Sequence[ServedRow]) -> ServedModel:
    """TPOT first, then TTFT with the predicted step in it."""
    labels = Labels.of(rows)
    table = Table.of(rows, labels)
    start, prior = _decode_start(labels)
    decode = fit_positive(lambda v: _tpot(v, table, labels), table.tpot, start, prior_spread=prior)
    step = _tpot(decode.values, table, labels)
    start, prior = _wait_start(labels)
    wait = fit_positive(lambda v: _ttft(v, table, labels, step), table.ttft, start, prior_spread=prior)
    return ServedModel(labels, decode, wait)


def _decode_start(labels: Labels) -> tuple[Array, Array]:
    factors = len(labels.engines) * len(DECODE)
    start = [*_DECODE_START, *_PREFILL_START, 0.7, *[1.0] * (factors + labels.named)]
    prior = [0.5] * len(DECODE) + [0.4] * len(PREFILL) + [0.5] + [0.4] * factors + [0.15] * labels.named
    return np.array(start), np.array(prior)


def _decode_parts(v: Array, labels: Labels) -> tuple[Array, Array, float, Array, Array]:
    """(decode rates, prefill rates, overlap, factors per engine and feature, label factors)."""
    sizes = [len(DECODE), len(PREFILL), 1, len(labels.engines) * len(DECODE), labels.named]
    base, prefill, overlap, factors, named = np.split(v, np.cumsum(sizes)[:-1])
    return base, prefill, float(overlap[0]), _with_one(factors.reshape(-1, len(DECODE))), named


def _tpot(v: Array, table: Table, labels: Labels) -> Array:
    base, prefill, overlap, factors, named = _decode_parts(v, labels)
    step = (table.decode * base * factors[table.engine]).sum(axis=1)
    prompts = np.maximum(table.running - 1, 0.0) / table.answer * table.mixed
    step = step + overlap * prompts * (table.prefill * prefill).sum(axis=1)
    return np.asarray(step * table.factor(named, labels))


def _wait_start(labels: Labels) -> tuple[Array, Array]:
    engines = 4 * len(labels.engines)
    start = [*_PREFILL_START, *_WAIT_START, *[1.0] * (engines + labels.named)]
    prior = [0.5] * len(PREFILL) + [1.0, 1.0, 0.5, 1.0, 0.2] + [0.5] * engines + [0.2] * labels.named
    return np.array(start), np.array(prior)


def _ttft(v: Array, table: Table, labels: Labels, step: Array) -> Array:
    """Prompt seconds, those queued before it, the step in progress, and the wait for memory to come free."""
    sizes = [len(PREFILL), len(_WAIT_START), 4 * len(labels.engines), labels.named]
    prefill, wait, factors, named = np.split(v, np.cumsum(sizes)[:-1])
    each = _with_one(factors.reshape(-1, 4))[table.engine]
    prompt = (table.prefill * prefill).sum(axis=1) * each[:, 0]
    queued = wait[1] * each[:, 1] * np.maximum(table.running / table.workers - 1, 0.0) ** wait[4]
    start = wait[0] * each[:, 2] + wait[2] * step + wait[3] * each[:, 3] * 1e-4 * table.running
    blocked = (table.concurrency / table.running - 1) * table.answer * step
    light = (start + prompt * (1 + queued)) * table.factor(named, labels)
    return np.asarray(larger(light, _full_queue(prompt, step, table)) + blocked)


def _full_queue(prompt: Array, step: Array, table: Table) -> Array:
    """Disaggregated, where prefill workers are always busy: every prompt waits for all others but those in decode."""
    decoding = table.answer * step
    return (1 - table.mixed) * (table.running * prompt / table.workers - decoding)
