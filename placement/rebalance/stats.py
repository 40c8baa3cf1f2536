"""Routing statistics: how many rows went to each (layer, expert), in windows that forget, for prefill and decode apart.

Routers hand over expert ids or ready counts. A window with half-life h forgets half of its rows every h seconds: with h
= 10, a burst of 1,000 rows counts as 250 after 20 s. Several windows see the same traffic at several time scales. Time
comes in as a number: there is no clock here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from afserve.placement.optimizer.problem import Floats, Ints

PREFILL, DECODE = 0, 1
KINDS = ("prefill", "decode")


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRows:
    """Rows that a node sent to each expert since it last said so, int64 and never negative: L MoE layers, E experts."""

    prefill_LE: Ints
    decode_LE: Ints

    def __bool__(self) -> bool:
        return bool(self.prefill_LE.any() or self.decode_LE.any())


class RoutingStats:
    """Owns the counts of one model. `merge` gathers; `advance_windows` folds what was gathered into the windows."""

    def __init__(self, layers: int, experts: int, half_lives: Sequence[float] = (1.0, 8.0, 120.0)) -> None:
        self.layers, self.experts, self.half_lives = layers, experts, tuple(half_lives)
        self._fresh: NDArray[np.int64] = np.zeros((len(KINDS), layers, experts), dtype=np.int64)
        self._windows = np.zeros((len(self.half_lives), len(KINDS), layers, experts))
        self._total: Ints = np.zeros_like(self._fresh)
        self._now: float | None = None

    def merge(self, counts_LE: ArrayLike, kind: int = DECODE) -> None:
        """Adds counts that another process gathered."""
        self._fresh[kind] += np.asarray(counts_LE, dtype=np.int64)

    def advance_windows(self, now: float) -> Ints:
        """Ages the windows to `now` seconds, folds in what was gathered since, and returns that: counts_KLE."""
        elapsed = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now if self._now is None else max(now, self._now)
        fade = 0.5 ** (elapsed / np.array(self.half_lives))
        gathered = self._fresh.copy()
        self._windows *= fade[:, None, None, None]
        self._windows += gathered
        self._total += gathered
        self._fresh[:] = 0
        return gathered

    def window_load(self, window: int, kind: int | None = None) -> Floats:
        """load_LE of one window (its index in `half_lives`), of one class or of both."""
        counts = self._windows[window]
        load: Floats = counts.sum(0) if kind is None else counts[kind].copy()
        return load

    def total_counts(self, kind: int | None = None) -> Ints:
        """Everything since the start, undecayed."""
        counts: Ints = self._total.sum(0) if kind is None else self._total[kind].copy()
        return counts

    def everything(self) -> Ints:
        """load_LE since the start, what was gathered since the last `tick` included."""
        counts: Ints = (self._total + self._fresh).sum(0)
        return counts
