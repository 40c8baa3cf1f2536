"""A placement for one known load where no construction is optimal: too few spare slots, or unequal nodes.

It searches from several starts: all replicas set, single replicas with the spare slots empty, and the best result so
far with a few experts shuffled. The shuffles are seeded, so the same load gives the same answer. It knows no scenarios
and no current placement.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.bound import lower_bound
from afserve.placement.optimizer.improve import Search
from afserve.placement.optimizer.problem import Floats, Ints
from afserve.placement.optimizer.robust import replicate, spread
from afserve.placement.optimizer.split import count_replicas, node_load, split
from afserve.placement.placement import FREE

_WORK = 20_000_000  # candidate scores of one search: bounds its time alike on every machine
_SHUFFLES = 8
_SHUFFLE_SIZE = 4_000  # slots of all layers: a larger problem is searched from its constructions only
_CLOSE = 1e-6

Answer = tuple[Ints, Floats]  # slot_LNS, share_LNS


class LocalSearch:
    """Owns the best answer so far, layer by layer."""

    def __init__(self, load_LE: Floats, least_LE: Ints, room_N: Ints, pace_N: Floats, rack_N: Ints) -> None:
        self._load, self._least, self._room, self._pace, self._rack = (
            load_LE,
            least_LE,
            room_N,
            pace_N,
            rack_N,
        )
        self._goal_L = lower_bound(load_LE, room_N, pace_N) * (1 + _CLOSE)
        self._top_L = np.full(len(load_LE), np.inf)
        self.slot = np.full((len(load_LE), len(room_N), int(room_N.max(initial=1))), FREE)
        self.share = np.zeros(self.slot.shape)

    def run(self) -> Answer:
        for start in self._starts():
            rest = np.flatnonzero(self._top_L > self._goal_L)
            if len(rest) == 0:
                break
            self._follow(start(rest), rest)
        return self.slot, self.share

    def _starts(self) -> Iterator[Callable[[Ints], Ints]]:
        yield self._full
        yield self._single
        rng = np.random.default_rng(0)
        for _ in range(_SHUFFLES if self.slot.size <= _SHUFFLE_SIZE else 0):
            yield lambda rest: shuffled(self.slot[rest], self._room, rng)

    def _full(self, rest: Ints) -> Ints:
        live = int((self._room > 0).sum())
        replicas = replicate(self._load[rest], self._least[rest], int(self._room.sum()), live)
        return self._spread(rest, replicas)

    def _single(self, rest: Ints) -> Ints:
        return self._spread(rest, self._least[rest])

    def _spread(self, rest: Ints, replicas: Ints) -> Ints:
        return spread(self._load[None, rest], np.ones(1), replicas, self._room, self._pace, self._rack)

    def _follow(self, slot: Ints, rest: Ints) -> None:
        """Even shares, then exact ones, then a search, each only for layers that are not at the bound yet."""
        layer = np.arange(len(rest))[:, None, None]
        copies = count_replicas(slot, self._load.shape[1])[layer, np.maximum(slot, 0)]
        self._keep(slot, np.where(slot == FREE, 0.0, 1.0 / np.maximum(copies, 1)), rest)
        for searched in (False, True):
            left = self._top_L[rest] > self._goal_L[rest]
            if not left.any():
                return
            part, found = rest[left], slot[left]
            if searched:
                search = Search(
                    found, self._load[None, part], np.ones(1), self._pace, self._least[part], self._room
                )
                search.run(found.size, rounds=rounds(search.slot))
                found = search.slot
            self._keep(found, split(found, self._load[part], self._pace), part)

    def _keep(self, slot: Ints, share: Floats, rest: Ints) -> None:
        top = (node_load(slot, share, self._load[rest]) / self._pace)[:, self._room > 0].max(1)
        better = top < self._top_L[rest]
        at = rest[better]
        self.slot[at], self.share[at], self._top_L[at] = slot[better], share[better], top[better]


def rounds(slot_LNS: Ints) -> int:
    """How many rounds a search of this size may take."""
    return int(max(20, _WORK // (slot_LNS.size * slot_LNS.shape[2])))


def shuffled(slot_LNS: Ints, room_N: Ints, rng: np.random.Generator) -> Ints:
    """A few random slots of different nodes change places, where that puts no expert twice on a node."""
    slot, layer = slot_LNS.copy(), np.arange(len(slot_LNS))
    usable = np.argwhere(np.arange(slot.shape[2]) < room_N[:, None])
    for _ in range(max(2, len(usable) // 12)):
        (a, at), (b, by) = (usable[rng.integers(len(usable), size=len(slot))].T for _ in range(2))
        mine, yours = slot[layer, a, at], slot[layer, b, by]
        fits: NDArray[np.bool_] = (a != b) & ((slot[layer, b] != mine[:, None]).all(1) | (mine == FREE))
        fits &= (slot[layer, a] != yours[:, None]).all(1) | (yours == FREE)
        on = layer[fits]
        slot[on, a[fits], at[fits]], slot[on, b[fits], by[fits]] = yours[fits], mine[fits]
    return slot
