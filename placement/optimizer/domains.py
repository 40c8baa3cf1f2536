"""Copies of one expert in different failure domains: which exchanges keep that, and how to get there by few changes.

A domain is a node, a host or a rack: `Nodes.domains` says which. `apart` changes slots along paths, as a bipartite
matching grows. An expert takes a slot in a domain that is new to it, the expert that stood there moves on, until a
slot is reached that nobody needs. Such a path exists whenever a solution does. It knows no shares.

Shapes in names: L layers, E experts, N nodes, S slots per node, D domains.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.problem import Floats, Ints
from afserve.placement.placement import FREE

Flags = NDArray[np.bool_]


class DomainSpans:
    """Owns how many replicas each expert has in each domain, and in how many domains it is, while slots change."""

    def __init__(self, slot_LNS: Ints, experts: int, copies: int, domain_N: Ints) -> None:
        self.domain, self._copies = domain_N, copies
        self.held = np.zeros((len(slot_LNS), experts, int(domain_N.max()) + 1), dtype=np.int16)
        layer, node, place = np.nonzero(slot_LNS != FREE)
        np.add.at(self.held, (layer, slot_LNS[layer, node, place], domain_N[node]), 1)
        self.span = (self.held > 0).sum(2)

    def needed(self, row: Ints, node: Ints, expert: Ints) -> Flags:
        """Whether `expert`, which stands on `node`, would have fewer domains than copies without it; FREE is not."""
        who = np.maximum(expert, 0)
        alone = self.held[row, who, self.domain[node]] == 1
        needed: Flags = (expert != FREE) & alone & (self.span[row, who] <= self._copies)
        return needed

    def helps(self, row: Ints, node: Ints, expert: Ints) -> Flags:
        """Whether `node` is in a domain without `expert`."""
        helps: Flags = self.held[row, np.maximum(expert, 0), self.domain[node]] == 0
        return helps

    def replace(self, row: Ints, node: Ints, old: Ints, new: Ints) -> None:
        """On `node` of layer `row`, `new` takes the place of `old`; either may be FREE. One change per layer."""
        for expert, step in ((old, -1), (new, 1)):
            on = expert != FREE
            at = row[on], expert[on], self.domain[node[on]]
            self.held[at] += step
            self.span[at[:2]] += step * (self.held[at] == (step > 0))


def apart(slot_LNS: Ints, load_LE: Floats, copies: int, domain_N: Ints, room_N: Ints) -> Ints:
    """slot_LNS with every expert in at least `copies` domains, by few changes; as many as there is room for."""
    spans = DomainSpans(slot_LNS, load_LE.shape[1], copies, domain_N)
    short_L = (spans.span < copies).any(1)
    slot = slot_LNS.copy()
    for layer in np.flatnonzero(short_L):
        _Layer(slot[layer], spans.held[layer], load_LE[layer], copies, domain_N, room_N).run()
    return slot


@dataclass(frozen=True, slots=True)
class _Step:
    """`expert` takes slot `place` of `node`, from `before`'s way there (None: it has come new)."""

    expert: int
    node: int
    place: int
    before: "_Step | None"


_Entry = tuple[int, int, _Step | None]  # an expert, the domain that it is to enter, the way there


class _Layer:
    """One layer while its experts are moved apart. Changes the slots and counts that it is given."""

    def __init__(
        self, slot_NS: Ints, held_ED: Ints, load_E: Floats, copies: int, domain_N: Ints, room_N: Ints
    ) -> None:
        self._slot, self._held, self._load, self._copies = slot_NS, held_ED, load_E / copies, copies
        self._usable = np.arange(slot_NS.shape[1]) < room_N[:, None]
        self._nodes = [np.flatnonzero(domain_N == d) for d in range(held_ED.shape[1])]
        self._domain = domain_N
        self._level = np.where(slot_NS == FREE, 0.0, self._load[slot_NS]).sum(1)

    def run(self) -> None:
        """Experts without any copy first, then the hottest."""
        span_E = (self._held > 0).sum(1)
        for expert in np.lexsort((-self._load, span_E)):
            for _ in range(self._copies - int(span_E[expert])):
                if not self._extend(int(expert)):
                    break

    def _extend(self, expert: int) -> bool:
        """One more domain for `expert`: the shortest path, the one that ends at the coolest place."""
        reached = np.zeros(self._held.shape[1], dtype=bool)
        frontier = self._entries(expert, None, reached)
        while frontier:
            ends = [end for entry in frontier if (end := self._end(*entry)) is not None]
            if ends:
                self._follow(min(ends, key=lambda end: end[0])[1])
                return True
            frontier = [step for entry in frontier for step in self._onward(*entry, reached)]
        return False

    def _entries(self, expert: int, before: _Step | None, reached: Flags) -> list[_Entry]:
        """(expert, domain, way) of every domain that is new to `expert` and to the search."""
        new = np.flatnonzero((self._held[expert] == 0) & ~reached)
        reached[new] = True
        return [(expert, int(domain), before) for domain in new]

    def _end(self, expert: int, domain: int, before: _Step | None) -> tuple[tuple[bool, float], _Step] | None:
        """(cost, step) into the domain's best slot that nobody needs: a free one, else the least loaded spare replica.

        `expert` stands on no node of the domain, so any slot of it will do.
        """
        nodes = self._nodes[domain]
        held = self._slot[nodes]
        free = held == FREE
        span = (self._held[held] > 0).sum(2)
        spare = free | (self._held[held, domain] > 1) | (span > self._copies)
        spare &= self._usable[nodes]
        if not spare.any():
            return None
        cost = np.where(free, self._level[nodes][:, None], self._load[held])
        if (free & spare).any():
            spare &= free
        at, place = divmod(int(np.where(spare, cost, np.inf).argmin()), held.shape[1])
        step = _Step(expert, int(nodes[at]), place, before)
        return (not bool(free[at, place]), float(cost[at, place])), step

    def _onward(self, expert: int, domain: int, before: _Step | None, reached: Flags) -> list[_Entry]:
        """Whoever stands in the domain may make room by moving on to another one."""
        found = []
        for node in self._nodes[domain]:
            for place in np.flatnonzero(self._usable[node]):
                step = _Step(expert, int(node), int(place), before)
                found += self._entries(int(self._slot[node, place]), step, reached)
        return found

    def _follow(self, step: _Step | None) -> None:
        """The last step first, so that each slot is left before it is taken."""
        while step is not None:
            old = int(self._slot[step.node, step.place])
            domain = self._domain[step.node]
            if old != FREE:
                self._held[old, domain] -= 1
                self._level[step.node] -= self._load[old]
            self._slot[step.node, step.place] = step.expert
            self._held[step.expert, domain] += 1
            self._level[step.node] += self._load[step.expert]
            step = step.before
