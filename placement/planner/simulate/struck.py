"""Plays requests on one deployment while devices are lost and come back.

A loss makes every rank stand still or slow (`losses.py`), or takes the requests of one rank, which go on at the others.
Where not all ranks are played, those that lose a device are among the ones that are, and count for themselves only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.simulate.losses import Outage, RecoveryTimes, computed_again, pace_of
from afserve.placement.planner.simulate.requests import (
    Arrivals,
    Rank,
    RankRequest,
    RankServing,
    ServedRequests,
)


@dataclass(frozen=True, slots=True)
class Struck:
    """What happens: `outages` by time; how it is recovered; `second`: seconds to compute a token again."""

    outages: Sequence[Outage]
    recovery: RecoveryTimes
    second: float


class Losing:
    """`sent` requests on as many of `ranks` equal ranks. weights: how many of them each one stands for; moved: requests
    that lost their rank; again: their tokens that are computed again."""

    def __init__(self, rank: Rank, ranks: int, sent: Sequence[Arrivals], struck: Struck, seed: int) -> None:
        self.served = [ServedRequests() for _ in sent]
        self._ranks, self._struck = ranks, struck
        pace = pace_of(struck.outages)
        self._random = np.random.default_rng([seed, len(sent)])
        self._serving = [
            RankServing(rank, arrivals, np.random.default_rng([seed, number]), done, pace)
            for number, (arrivals, done) in enumerate(zip(sent, self.served, strict=True))
        ]
        self._back = np.zeros(len(sent))  # when each serves again
        self._alone: set[int] = set()  # those that stand for themselves
        self.moved = 0
        self.again = 0.0

    @property
    def weights(self) -> list[float]:
        shown, struck = len(self.served), len(self._alone)
        if struck == shown:
            return [self._ranks / shown] * shown
        rest = (self._ranks - struck) / (shown - struck)
        return [1.0 if place in self._alone else rest for place in range(shown)]

    def play(self) -> Iterator[tuple[int, float]]:
        """(rank, share of its requests admitted) now and then."""
        for number, outage in enumerate(one for one in self._struck.outages if one.role.moves):
            struck = self._serving_now(outage.at, number)
            for place in struck:
                yield from self._one(place, outage.at)
            self._alone.update(struck)
            self._back[struck] = outage.back
            for place in struck:
                self._strike(place, outage)
        for place in range(len(self._serving)):
            yield from self._one(place, np.inf)

    def _serving_now(self, at: float, number: int) -> list[int]:
        """Those that a loss takes: all that serve where everything ends, else one of them, in turn."""
        serving = np.flatnonzero(self._back <= at).tolist()
        if self._struck.recovery.all_end or not serving:
            return serving
        return [serving[number % len(serving)]]

    def _one(self, place: int, until: float) -> Iterator[tuple[int, float]]:
        for share in self._serving[place].play(until):
            yield place, share

    def _strike(self, place: int, outage: Outage) -> None:
        """One rank loses what it holds."""
        recovery = self._struck.recovery
        held, coming = self._serving[place].take(outage.back)
        for one in held:
            one.read = computed_again(one.read, recovery)
            one.second, one.lost = self._struck.second, outage.at
        for moved, next_one in ((held, recovery.kv_copies), (coming, False)):
            for one in moved:
                one.at = max(one.at, outage.at + recovery.notice)
            to = np.full(len(moved), place) if recovery.all_end else self._others(place, len(moved), next_one)
            self._give(moved, to)
        self.moved += len(held)
        self.again += sum(one.read for one in held)

    def _others(self, place: int, count: int, next_one: bool) -> NDArray[np.int64]:
        """Any of the other ranks, or the next one, which has the copies."""
        if self._ranks == 1:
            return np.full(count, place)
        if next_one:
            following = (place + 1) % len(self._serving)
            self._alone.add(following)
            return np.full(count, following)
        drawn = self._random.integers(0, self._ranks - 1, count)
        return np.asarray(drawn + (drawn >= place))

    def _give(self, moved: Sequence[RankRequest], to: NDArray[np.int64]) -> None:
        """Those of ranks that are not played go out of sight. Where a rank does not serve, the next one that does takes
        them; where none does, they wait for the first that comes back."""
        count = len(self._serving)
        given: dict[int, list[RankRequest]] = {}
        for number in np.argsort(to, kind="stable"):
            if to[number] < count:
                order = (np.arange(count) + to[number]) % count
                begins = np.maximum(self._back[order], moved[number].at)
                first = int(np.argmin(begins))
                moved[number].at = float(begins[first])
                given.setdefault(int(order[first]), []).append(moved[number])
        for taker, more in given.items():
            self._serving[taker].give(more)
