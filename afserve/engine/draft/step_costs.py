"""What a step takes by its rows, fitted to steps as they were measured: integers and seconds in, seconds out.

    seconds = base + own * rows + shared * (rows + pool) + expert * distinct experts of a layer (rows and pool)

`base` is what a step takes however few its rows are. Rows are compute, and the tiles that they fill; a distinct expert
is the weights that are read for it. No coefficient is below 0. It knows no drafts and no clock.
"""

import math
from dataclasses import dataclass

from afserve.engine.draft.allotment import RowPrices
from afserve.engine.draft.price import RanStep

_FEW = 4  # steps of a kind say something
_KEPT = 64  # kinds of steps that are remembered
_EVERY, _SELDOM = 8, 64  # steps between two fits, at first and later
_NEWEST = 0.1  # least weight of the newest step among those of its kind
_STALE = 2000.0  # steps after which a kind that was not seen again counts half
_PRIOR = (0.45, 0.1, 0.1, 0.35)  # shares of a step's seconds, where nothing else is known
_TRUST = 0.01  # how much that is worth: so many kinds of steps
_OVERLAP = 0.38  # of the experts of neighbouring rows, until it is measured (Cohere, verifying 4 tokens)
_SHORTEST = 1e-7  # seconds; nothing that was measured well took less
_FULL = 0.9  # of the experts: a layer that has so many distinct ones says nothing of a row's share

Features = tuple[float, float, float, float]


class ExpertSpread:
    """How many distinct experts of a layer rows choose: e (1 - (1 - k / e)^rows) for rows that choose alike but
    independently. `experts` e is at most what the layer has, and less where some are chosen more often; a draft's row
    shares `overlap` of its choice with its neighbour's. Both are measured."""

    def __init__(self, experts: int, top_k: float) -> None:
        self._most, self._top_k = float(max(experts, 1)), float(max(top_k, 1))
        self.experts, self.overlap = self._most, _OVERLAP

    def touched(self, rows: float) -> float:
        untouched: float = self.kept**rows
        return self.experts * (1.0 - untouched)

    @property
    def kept(self) -> float:
        """Of the experts that no row has chosen so far, the share that a further row leaves so."""
        return max(0.0, 1.0 - self._top_k / self.experts)

    def learn_spread(self, step: RanStep) -> None:
        """From a step whose distinct experts were counted."""
        if step.touched is None or not self._top_k < step.touched < _FULL * self._most:
            return
        plain, touched = step.rows - step.drafted, float(step.touched)
        if not step.drafted:
            self.experts += 0.05 * (self._experts_of(plain, touched) - self.experts)
        elif touched < _FULL * self.experts and self.kept > 0.0:
            as_if = math.log(1.0 - touched / self.experts) / math.log(self.kept)
            shared = 1.0 - (as_if - plain) / step.drafted
            self.overlap += 0.05 * (min(max(shared, 0.0), 0.95) - self.overlap)

    def _experts_of(self, rows: int, touched: float) -> float:
        """With how many experts so many rows touch so many."""
        low, high = touched, self._most
        for _ in range(12):
            middle = (low + high) / 2.0
            if middle * (1.0 - (1.0 - self._top_k / middle) ** rows) < touched:
                low = middle
            else:
                high = middle
        return (low + high) / 2.0


@dataclass(slots=True)
class _Kind:
    """Steps of about as many rows, in the mean."""

    rows: float
    drafted: float
    pool: float
    seconds: float
    count: float
    seen: int

    def blend_step(self, step: RanStep, number: int) -> None:
        """Seconds that are far from the usual ones count as if they were less far: other processes are in them."""
        self.count, self.seen = self.count + 1.0, number
        weight = max(_NEWEST, 1.0 / self.count)
        off = min(max(step.seconds - self.seconds, -0.5 * self.seconds), 0.3 * self.seconds)
        self.seconds += weight * off
        self.rows += weight * (step.rows - self.rows)
        self.drafted += weight * (step.drafted - self.drafted)
        self.pool += weight * (step.pool - self.pool)


class StepCosts:
    def __init__(self, spread: ExpertSpread) -> None:
        self.spread = spread
        self.pool = 0.0  # rows of others, lately
        self._kinds: dict[
            tuple[int, int, bool], _Kind
        ] = {}  # by rows, others' rows, and whether some were drafts'
        self._numbers = self._plain = 0  # steps, and those without drafts
        self._costs: Features = (0.0, 0.0, 0.0, 0.0)
        self._fit_at = 0

    @property
    def known(self) -> bool:
        """Whether some steps without drafts were measured."""
        return self._plain >= _FEW

    def measured(self, rows: int) -> bool:
        """Whether steps of about so many were, by themselves."""
        return any(key[0] == _size(rows) and kind.count >= _FEW for key, kind in self._kinds.items())

    def drafts_share(self, rows: int, drafted: int) -> float:
        """Of what a step of `rows` takes, so much is that `drafted` of them were drafts'."""
        if not self.known:
            return 0.0
        prices = self.prices(rows - drafted)
        added = prices.added(drafted)
        return added / (prices.seconds + added)

    def note_step(self, step: RanStep) -> None:
        if not (step.rows > 0 and math.isfinite(step.seconds) and step.seconds > _SHORTEST):
            return
        self._numbers += 1
        self._plain += not step.drafted
        self.pool += 0.1 * (step.pool - self.pool)
        self.spread.learn_spread(step)
        key = _size(step.rows), _size(step.pool), step.drafted > 0
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _KEPT:
                del self._kinds[min(self._kinds, key=lambda one: self._kinds[one].seen)]
            seconds = step.seconds
            if any(self._costs):
                usual = self._seconds(self._features(step.rows, step.drafted, step.pool))
                seconds = min(seconds, 3.0 * usual)
            self._kinds[key] = _Kind(step.rows, step.drafted, step.pool, seconds, 1.0, self._numbers)
        else:
            kind.blend_step(step, self._numbers)
        if kind is None:
            self._fit_at = 0

    def prices(self, rows: int) -> RowPrices:
        """Of a step that has `rows` tokens without drafts. Only where `known`."""
        assert self._kinds, "no step was measured yet"
        if self._numbers >= self._fit_at:
            self._costs = self._fit()
            self._fit_at = self._numbers + max(_EVERY, min(self._numbers // 16, _SELDOM))
        _, own, shared, expert = self._costs
        spread, apart = self.spread, 1.0 - self.spread.overlap
        features = self._features(rows, 0, self.pool)
        untouched = max(0.0, spread.experts - features[3])
        return RowPrices(self._seconds(features), own, shared, expert, untouched, spread.kept**apart)

    def _features(self, rows: float, drafted: float, pool: float) -> Features:
        alone = rows + pool - drafted * self.spread.overlap
        return 1.0, rows, rows + pool, self.spread.touched(alone)

    def _seconds(self, features: Features) -> float:
        return sum(cost * feature for cost, feature in zip(self._costs, features, strict=True))

    def _fit(self) -> Features:
        """Least squares of relative errors, with no share below 0, and a little of the prior."""
        kinds = list(self._kinds.values())
        now = self._numbers
        weights = [min(k.count, 8.0) / 8.0 * 0.5 ** ((now - k.seen) / _STALE) for k in kinds]
        every = [self._features(k.rows, k.drafted, k.pool) for k in kinds]
        total = sum(weights)
        usual = sum(w * k.seconds for w, k in zip(weights, kinds, strict=True)) / total
        scale = [
            max(1e-9, sum(w * f[i] for w, f in zip(weights, every, strict=True)) / total) for i in range(4)
        ]
        square = [[_TRUST * (i == j) for j in range(4)] for i in range(4)]
        goal = [_TRUST * share for share in _PRIOR]
        for weight, kind, features in zip(weights, kinds, every, strict=True):
            x = [feature / s * usual / kind.seconds for feature, s in zip(features, scale, strict=True)]
            for i in range(4):
                goal[i] += weight * x[i]
                for j in range(4):
                    square[i][j] += weight * x[i] * x[j]
        shares = _solve(square, goal)
        base, own, shared, expert = (share * usual / s for share, s in zip(shares, scale, strict=True))
        return base, own, shared, expert


def _solve(square: list[list[float]], goal: list[float]) -> list[float]:
    """Of a positive definite system; what would be below 0 is 0, the lowest first, and the others are solved anew."""
    used, found = list(range(len(goal))), [0.0] * len(goal)
    while used:
        lines = [[*(square[i][j] for j in used), goal[i]] for i in used]
        for at, line in enumerate(lines):
            lines[at] = line = [value / line[at] for value in line]
            for other, further in enumerate(lines):
                if other != at:
                    lines[other] = [b - further[at] * a for a, b in zip(line, further, strict=True)]
        shares = [line[-1] for line in lines]
        if min(shares) >= 0.0:
            for i, share in zip(used, shares, strict=True):
                found[i] = share
            break
        del used[shares.index(min(shares))]
    return found


def _size(rows: float) -> int:
    """The same for about as many rows: exact up to 8, then within an eighth or so."""
    return int(rows) if rows < 8.0 else 8 + int(6.0 * math.log2(rows / 8.0))
