"""The smallest pools that keep what is wanted under a demand, within limits. It asks a model and knows no time."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from afserve.control.pilot.observed import SeenWindow
from afserve.control.pilot.sizes import Demand, Expected, Limits, PoolSizes, TargetTimes, counted_up

_ROUNDS = 2  # in which readers and decoding are fitted to each other
_SHARES = tuple(0.9**power for power in range(12))  # of a demand that is too large
_RATE, _LENGTH = math.log(1.04), math.log(1.15)  # steps in which rates and lengths are told apart
_PATIENCE = 3  # counts of experts that may be worse, one after another


class PoolModel(Protocol):
    """What pools of some sizes make of a demand: measured rates live, the planner's stage times in a replay."""

    @property
    def ready(self) -> bool:
        """Whether enough is known to say anything."""

    def learn_rates(self, window: SeenWindow) -> bool:
        """From what was measured meanwhile. Whether `expect` says something else from now on."""

    def expect(self, sizes: PoolSizes, demand: Demand, wanted: TargetTimes) -> Expected: ...


class Planner:
    """Keeps what it has found: within a day demands come again."""

    def __init__(self, model: PoolModel, wanted: TargetTimes, limits: Limits) -> None:
        self.model, self.wanted, self.limits = model, wanted, limits
        self._known: dict[tuple[int, ...], PoolSizes | None] = {}
        self._last: PoolSizes | None = None

    def expect(self, sizes: PoolSizes, demand: Demand, wanted: TargetTimes) -> Expected:
        return self.model.expect(sizes, demand, wanted)

    def learn_rates(self, window: SeenWindow) -> None:
        if self.model.learn_rates(window):
            self._known.clear()

    def smallest(self, demand: Demand, wanted: TargetTimes | None = None) -> PoolSizes | None:
        """The fewest nodes that meet it; None where nothing inside the limits does. Rates are rounded up by 4 % at
        most; what was found for lengths and times within 7 % is taken again where it is enough."""
        wanted = wanted or self.wanted
        power = math.ceil(math.log(max(demand.rate, 1e-6)) / _RATE - 1e-9)
        others = (demand.prompt, demand.answer, demand.computed, wanted.ttft, wanted.tpot, wanted.busy)
        firsts = (
            each
            for one in wanted.classes
            for each in (_power(one.ttft), round(10 * one.ahead), round(10 * one.upto))
        )
        key = power, *(_power(each) for each in others), *firsts
        if not self._knows(key, demand, wanted):
            rounded = replace(demand, rate=math.exp(power * _RATE))
            found = _Search(self.model, self.limits, rounded, wanted).smallest(self._last)
            self._known[key], self._last = found, found or self._last
        return self._known[key]

    def _knows(self, key: tuple[int, ...], demand: Demand, wanted: TargetTimes) -> bool:
        """Of demands that are as good as equal one may need more than another did."""
        found = self._known.get(key)
        if found is None:
            return key in self._known
        return self.model.expect(found, demand, wanted).meets(wanted)

    def best_effort(self, demand: Demand, wanted: TargetTimes | None = None) -> PoolSizes:
        """The same, or what meets as much of it as can be met within the limits; where no size meets the times at any
        load, what is only not too busy."""
        wanted = wanted or self.wanted
        for kept in (wanted, TargetTimes(busy=wanted.busy)):
            for share in _SHARES:
                found = self.smallest(demand.times(share), kept)
                if found is not None:
                    return found
        return self.limits.nearest(self.limits.most)


class _Search:
    """For one demand. More of one pool is taken never to hurt; what comes of it is checked as a whole."""

    def __init__(self, model: PoolModel, limits: Limits, demand: Demand, wanted: TargetTimes) -> None:
        self._model, self._limits, self._demand, self._wanted = model, limits, demand, wanted

    def smallest(self, near: PoolSizes | None) -> PoolSizes | None:
        """From sizes on that were found for a demand like it: fewer experts, and more, until several are worse."""
        least, most = self._limits.least, self._limits.most
        tried = list(counted_up(least.experts, most.experts))
        hint = near or least
        middle = min(range(len(tried)), key=lambda at: abs(tried[at] - hint.experts))
        best = self._best_of(tried[middle::-1], hint, None)
        best = self._best_of(tried[middle + 1 :], best or hint, best)
        return best and self._trimmed(best)

    def _best_of(self, experts: Sequence[int], hint: PoolSizes, best: PoolSizes | None) -> PoolSizes | None:
        worse = 0
        for count in experts:
            hint = self._with_experts(hint._replace(experts=count))
            fine = self._limits.allow(hint) and self._meets(hint)
            if fine and (best is None or hint.total < best.total):
                best, worse = hint, 0
            elif best is not None:
                worse += 1
                if worse == _PATIENCE:
                    break
        return best

    def _with_experts(self, found: PoolSizes) -> PoolSizes:
        for _ in range(_ROUNDS):
            before = found
            found = self._fewest(found, "decode")
            found = self._fewest(found, "prefill")
            if found == before:
                break
        return found

    def _fewest(self, sizes: PoolSizes, pool: str) -> PoolSizes:
        """Away from a hint in steps that double, then by halves. What this pool cannot mend is left to the other."""
        least: int = getattr(self._limits.least, pool)
        most: int = getattr(self._limits.most, pool)

        def enough(count: int) -> bool:
            return self._pool_meets(sizes._replace(**{pool: count}), pool)

        low, high, step = least, getattr(sizes, pool), 1
        if enough(high):
            while high - step > least and enough(high - step):
                high, step = high - step, 2 * step
            low = max(least, high - step)
        else:
            while high < most and not enough(high):
                low, high, step = high + 1, min(high + step, most), 2 * step
        while low < high:
            middle = (low + high) // 2
            if enough(middle):
                high = middle
            else:
                low = middle + 1
        return sizes._replace(**{pool: high})

    def _pool_meets(self, sizes: PoolSizes, pool: str) -> bool:
        """Whether what hangs on this pool is met."""
        found, wanted = self._expect(sizes), self._wanted
        if pool == "prefill":
            return found.late <= wanted.late and found.busy[0] <= wanted.busy
        return found.fits and found.tpot <= wanted.tpot and found.busy[1] <= wanted.busy

    def _trimmed(self, sizes: PoolSizes) -> PoolSizes:
        """One node fewer of any pool where that is enough too."""
        while True:
            for place in (2, 1, 0):
                fewer = PoolSizes(*(own - (at == place) for at, own in enumerate(sizes)))
                if self._limits.allow(fewer) and self._meets(fewer):
                    sizes = fewer
                    break
            else:
                return sizes

    def _expect(self, sizes: PoolSizes) -> Expected:
        return self._model.expect(sizes, self._demand, self._wanted)

    def _meets(self, sizes: PoolSizes) -> bool:
        return self._expect(sizes).meets(self._wanted)


def _power(value: float) -> int:
    """Of 1.15, that is nearest to it."""
    return round(math.log(max(value, 1e-6)) / _LENGTH) if value < math.inf else 0
