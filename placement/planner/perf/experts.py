"""Expert popularity and its cost: how many distinct experts a device reads, and how many rows the fullest one gets.

With small batches the expert half takes as long as reading the distinct experts that are chosen, each once. With large
batches it takes as long as the rows of the most loaded device. Example: 64 rows that each choose 8 of 256 equally
popular experts touch 256 * (1 - (1 - 8/256)^64) = 222 of them. Replicas of hot experts even out rows and add experts to
read.
"""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from afserve.errors import ConfigError

Array = NDArray[np.float64]
_GRID = np.unique(np.concatenate([np.arange(1, 17), np.round(np.geomspace(17, 2**22, 80))])).astype(
    np.float64
)


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts. `zipf` 0 is uniform; `counts`, when given, are measured selections per expert.
    `redundant`: spare slots given to replicas of hot experts over all devices, beside `copies` of every expert, each on
    a device of its own. `counted_layers`: of how many layers the counts are the mean."""

    zipf: float = 0.0
    counts: tuple[float, ...] = ()
    redundant: int = 0
    copies: int = 1
    counted_layers: int = 0

    def slots(self, experts: int) -> int:
        """Of a layer, over all devices."""
        return experts * self.copies + self.redundant

    def popularity(self, experts: int) -> Array:
        """Chance that one selection is expert e; sums to 1."""
        if self.counts:
            if len(self.counts) != experts:
                raise ConfigError(
                    f"routing counts are for {len(self.counts)} experts, the model has {experts}"
                )
            weight = np.asarray(self.counts, dtype=np.float64)
        else:
            weight = np.arange(1, experts + 1, dtype=np.float64) ** -self.zipf
        return np.asarray(weight / weight.sum())


def active_experts(routing: Routing, experts: int, top_k: float, tokens: Array) -> Array:
    """Expected number of distinct experts that `tokens` tokens choose, out of `experts`."""
    table = _active_table(routing, experts, top_k)
    return np.interp(tokens, _GRID, table)


@lru_cache(maxsize=256)
def _active_table(routing: Routing, experts: int, top_k: float) -> Array:
    chosen = _inclusion(routing.popularity(experts), top_k)
    missed = np.exp(_GRID[:, None] * np.log1p(-np.minimum(chosen, 1 - 1e-12))[None, :])
    return np.asarray((1 - missed).sum(axis=1))


def _inclusion(popularity: Array, top_k: float) -> Array:
    """Chance that a token's top-k holds each expert: k times the popularity, capped at 1, the cap's excess spread."""
    chosen = np.minimum(top_k * popularity, 1.0)
    for _ in range(8):
        short = top_k - chosen.sum()
        free = chosen < 1.0
        if short <= 1e-9 or not free.any():
            break
        chosen[free] = np.minimum(chosen[free] * (1 + short / chosen[free].sum()), 1.0)
    return chosen


@lru_cache(maxsize=4096)
def imbalance(routing: Routing, experts: int, devices: int) -> float:
    """Rows on the most loaded device over the mean, hot experts replicated and packed largest first.

    Greedy, as a real balancer would do on the same counts; drift between counting and serving is not in it.
    """
    groups = min(devices, routing.slots(experts))
    spare = max(routing.redundant, devices - experts * routing.copies, 0)
    popularity = routing.popularity(experts)
    replicas = _replicas(popularity, spare, routing.copies)
    slots = -(-int(replicas.sum()) // groups)
    if slots == 1:
        return float((popularity / replicas).max()) * groups
    return _pack(np.repeat(popularity / replicas, replicas), groups, slots) * groups


def _replicas(popularity: Array, spare: int, copies: int) -> NDArray[np.int64]:
    """Slots of each expert after each spare slot went to the one with the highest load per replica."""
    replicas = np.full_like(popularity, copies)
    if popularity.max() - popularity.min() < 1e-15:
        replicas[: spare % len(popularity)] += 1
        replicas += spare // len(popularity)
    else:
        replicas = np.maximum(replicas, _first_replicas(popularity, spare, copies))
        for _ in range(spare - int((replicas - copies).sum())):
            replicas[np.argmax(popularity / replicas)] += 1
    return replicas.astype(np.int64)


def _first_replicas(popularity: Array, spare: int, copies: int) -> Array:
    """Where the spare slots that come first go, without taking them one by one: as long as any load per replica is
    above some level, no slot goes to an expert below it."""
    level, finer = 1.0 / max(spare, 1), 1 + len(popularity) / max(spare, len(popularity))
    while True:
        replicas = np.maximum(np.ceil(popularity / level), copies)
        if (replicas - copies).sum() <= spare:
            return np.asarray(replicas)
        level *= finer


def _pack(loads: Array, groups: int, slots: int) -> float:
    """The largest group's load, packing the largest load first into the lightest group with a free slot."""
    if len(loads) > _MANY_LOADS:
        return _pack_runs(loads, groups, slots)
    falling = np.sort(loads)[::-1].tolist()
    lightest = [
        (load, group, 1) for group, load in enumerate(falling[:groups])
    ]  # one for each, the largest first
    heapify(lightest)
    fullest: float = falling[0]
    for load in falling[groups:]:
        total, group, held = lightest[0]
        total += load
        fullest = max(fullest, total)
        if held + 1 < slots:
            heapreplace(lightest, (total, group, held + 1))
        else:
            heappop(lightest)
    return fullest


_MANY_LOADS, _ROUNDS = 16384, 8


def _pack_runs(loads: Array, groups: int, slots: int) -> float:
    """The same for many loads of few sizes: all loads of one size at once."""
    total, free = np.zeros(groups), np.full(groups, slots)
    sizes, counts = np.unique(loads, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count and size:  # loads of nothing are the last
            taken = _lightest(total, free, size, count)
            total, free, count = total + size * taken, free - taken, count - int(taken.sum())
    return float(total.max())


def _lightest(total: Array, free: NDArray[np.int64], size: float, count: int) -> NDArray[np.int64]:
    """How many of the next `count` loads of one size each group takes; maybe not of all of them. A group is picked
    when its load with what it has taken is the least, so the least of these loads say who takes."""
    most = count // int((free > 0).sum()) + _ROUNDS
    steps = np.arange(most)
    before = np.where(steps < free[:, None], total[:, None] + size * steps, np.inf)
    further = np.where(free > most, total + size * most, np.inf).min()  # a load that is not among them
    sorted_ = np.sort(before, axis=None)[: count + 1]
    level = min(float(further), float(sorted_[count]) if count < len(sorted_) else np.inf)
    taken = (before < level).sum(axis=1)
    ties = count - int(taken.sum())
    equal = np.flatnonzero((before == level).any(axis=1)) if np.isfinite(level) else np.zeros(0, np.int64)
    taken[equal[:ties]] += 1
    return np.asarray(taken)


def largest_normal(samples: Array) -> Array:
    """Expected maximum of n independent standard normals (Blom's approximation; 0 for one sample)."""
    n = np.maximum(np.asarray(samples, dtype=np.float64), 1.0)
    if n.size and float(n.max()) < _MANY:
        return np.asarray(_NORMALS[n.astype(np.int64)])
    return _blom(n)


def _blom(n: Array) -> Array:
    chance = (n - 0.375) / (n + 0.25)
    upper = np.sqrt(-2 * np.log(np.maximum(1 - chance, 1e-300)))
    quantile = upper - (2.515517 + 0.802853 * upper + 0.010328 * upper**2) / (
        1 + 1.432788 * upper + 0.189269 * upper**2 + 0.001308 * upper**3
    )
    return np.asarray(np.where(n <= 1, 0.0, quantile))


_MANY = 1024
_NORMALS = _blom(np.arange(_MANY, dtype=np.float64).clip(1))
