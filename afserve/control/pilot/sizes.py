"""What a pilot talks about: how large three pools are, what is asked of them, what is wanted, what is to be expected.

Values. A size counts nodes live and devices in a replay; a deployment whose attention nodes do both has no readers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_HOST = 8  # devices of a host, as most have them


class PoolSizes(NamedTuple):
    """Nodes that read prompts, that decode, that hold experts. `prefill` is 0 where those that decode read as well."""

    prefill: int
    decode: int
    experts: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.experts

    def __str__(self) -> str:
        return ":".join(map(str, self if self.prefill else self[1:]))

    def covers(self, other: "PoolSizes") -> bool:
        """Whether no pool is smaller."""
        return all(own >= theirs for own, theirs in zip(self, other, strict=True))

    def at_least(self, other: "PoolSizes") -> "PoolSizes":
        return PoolSizes(*map(max, self, other))

    def at_most(self, other: "PoolSizes") -> "PoolSizes":
        return PoolSizes(*map(min, self, other))

    def turns(self, new: "PoolSizes") -> int:
        """How many of those that read prompts decode in `new` sizes, where fewer read and more decode; below 0 the
        other way round."""
        less, more = self.prefill - new.prefill, new.decode - self.decode
        if not (self.prefill and new.prefill) or less * more <= 0:
            return 0
        return min(less, more) if less > 0 else max(less, more)

    def turned(self, new: "PoolSizes") -> "PoolSizes":
        """Once they have, and before anybody comes or goes."""
        count = self.turns(new)
        return self._replace(prefill=self.prefill - count, decode=self.decode + count)


class Limits(NamedTuple):
    """Between which sizes a pilot may move; how many nodes there may be in all, and that read or decode. `prices` are
    dollars an hour of a node of each pool, of which there may be `usd` in all."""

    least: PoolSizes
    most: PoolSizes
    budget: int
    attention: int = 1 << 30
    prices: tuple[float, float, float] = (0.0, 0.0, 0.0)
    usd: float = float("inf")

    def cost(self, sizes: PoolSizes) -> float:
        """Dollars an hour."""
        return sum(price * count for price, count in zip(self.prices, sizes, strict=True))

    def affords(self, sizes: PoolSizes) -> bool:
        return sizes.total <= self.budget and self.cost(sizes) <= self.usd

    def allow(self, sizes: PoolSizes) -> bool:
        inside = sizes.covers(self.least) and self.most.covers(sizes)
        return inside and self.affords(sizes) and sizes.prefill + sizes.decode <= self.attention

    def nearest(self, sizes: PoolSizes) -> PoolSizes:
        """Inside the limits. Where there are too many in all, the pool that is furthest above its least gives way."""
        found = sizes.at_least(self.least).at_most(self.most)
        while not self.allow(found) and found != self.least:
            above = [own - least for own, least in zip(found, self.least, strict=True)]
            if self.affords(found):
                above[2] = 0  # only attention nodes are too many
            pool = above.index(max(above))
            found = PoolSizes(*(own - (place == pool) for place, own in enumerate(found)))
        return found


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests per second, and of a request: prompt tokens, those that no cache has (`computed`), answer tokens.
    `variation` is the squared coefficient of variation of what is computed of prompts."""

    rate: float
    prompt: float
    answer: float
    computed: float
    variation: float = 1.0

    @property
    def context(self) -> float:
        """Tokens that a request in decode has, on average."""
        return self.prompt + self.answer / 2

    @property
    def longest(self) -> float:
        """Tokens of nearly the longest prompts, as of a normal tail (99 %)."""
        return self.computed * (1 + 2.33 * math.sqrt(self.variation))

    def times(self, factor: float) -> "Demand":
        return Demand(self.rate * factor, self.prompt, self.answer, self.computed, self.variation)


@dataclass(frozen=True, slots=True)
class FirstTokenTarget:
    """Seconds to a first token of those whose turn comes behind the share `ahead` of all requests; with their own it is
    `upto`."""

    ttft: float
    ahead: float
    upto: float


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """Seconds to a first token and between tokens, at most; infinity asks for nothing. Of requests the share `late`
    may wait for its first token for longer, also of those that `classes` are about. No pool is to be busy for more than
    `busy` of the time."""

    ttft: float = float("inf")
    tpot: float = float("inf")
    late: float = 0.01
    busy: float = 0.85
    classes: tuple[FirstTokenTarget, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """Of some sizes under some demand: mean seconds to the first token and between tokens, the share of first tokens
    that come too late, and for how much of the time each pool is busy; above 1 a pool falls behind."""

    ttft: float
    tpot: float
    late: float
    busy: tuple[float, float, float]
    fits: bool = True

    def meets(self, wanted: TargetTimes) -> bool:
        return (
            self.fits
            and self.late <= wanted.late
            and self.tpot <= wanted.tpot
            and max(self.busy) <= wanted.busy
        )


def counted_up(least: int, most: int) -> Iterator[int]:
    """Sizes of a pool that are tried: all small ones, then each an eighth larger than the one before, or up to the
    next whole host where that is less: of those many spread experts evenly."""
    size = least
    while size < most:
        yield size
        size = min(size + max(1, size // 8), (size // _HOST + 1) * _HOST)
    yield most
