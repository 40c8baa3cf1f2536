"""Where experts go at the moment their nodes are lost: a pure function, quick enough to be asked while requests wait.

What stands on survivors stays where it is. Only experts that lived nowhere else are placed anew, so as little as
possible is loaded before serving goes on; the rebalancer may improve on it later. It knows no transfers and no clock.

Shapes in names: L layers, E experts, N nodes, S slots per node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.placement import FREE, LayerPlacement, Placement

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ROUNDING = 1e-12  # of a sum of shares
LayerExpert = tuple[int, int]
Barred = Mapping[LayerExpert, frozenset[int]]  # expert nodes that cannot hold it now


@dataclass(frozen=True, slots=True)
class Recovered:
    """`placement` is the target, one epoch on. `order`: (layer, expert) to load, biggest load first.

    `homeless` experts found no slot on any survivor. `placement` still names them on the lost nodes, so that it stays
    valid; nobody can compute them until a node comes.
    """

    placement: Placement
    order: tuple[LayerExpert, ...]
    homeless: tuple[LayerExpert, ...]


def homeless(placement: Placement, serving: frozenset[int]) -> tuple[LayerExpert, ...]:
    """Each (layer, expert) that no node of `serving` holds."""
    there = [node for node in sorted(serving) if node < placement.nodes]
    held_LE = np.zeros(
        (len(placement.layers), placement.experts + 1), np.bool_
    )  # the last column is for FREE
    held_LE[np.arange(len(held_LE))[:, None, None], placement.slot_array()[:, there]] = True
    return tuple((int(layer), int(expert)) for layer, expert in np.argwhere(~held_LE[:, :-1]))


def recovered(
    placement: Placement,
    lost: frozenset[int],
    slots: int,
    load_LE: Floats | None = None,
    barred: Barred | None = None,
) -> Recovered:
    """The placement without the nodes `lost`: each expert that lived only there gets a slot of a survivor.

    `slots` are the physical ones per node and layer, spare ones included. `load_LE` are rows per expert; None, or a
    layer without rows, counts all experts alike. Experts are placed by falling load, each on the survivor with the
    least load among those with a free slot in that layer. Where no slot is free, the replica with the fewest rows gives
    way whose expert has another copy on a survivor. Shares of an expert's remaining replicas keep their ratio. `barred`
    nodes get no slot of that expert.
    """
    load_LE = _loads(placement, load_LE)
    slot_LNS, share_LNS = _survivors(placement, lost, slots)
    usable_NS = np.arange(slot_LNS.shape[2]) < np.where(_alive(placement, lost), slots, 0)[:, None]
    order: list[LayerExpert] = []
    homeless: list[LayerExpert] = []
    layers = []
    for number, (layer, *was) in enumerate(
        zip(placement.layers, placement.slot_array(), placement.share_array(), strict=True)
    ):
        table = _Layer(slot_LNS[number], share_LNS[number], usable_NS, load_LE[number])
        for expert in table.orphans():
            apart = (barred or {}).get((number, expert), frozenset())
            (order if table.place(expert, apart) else homeless).append((number, expert))
        layers.append(table.finish(layer, *was))
    return Recovered(
        replace(placement, epoch=placement.epoch + 1, layers=tuple(layers)),
        _by_load(order, load_LE),
        _by_load(homeless, load_LE),
    )


def in_parts(before: Placement, found: Recovered, most: int) -> tuple[Placement, ...]:
    """Targets from `before` to `found.placement`, each with `most` more of the lost experts, biggest load first.

    So what is asked for most often is served again before the rest is loaded. What comes in a later part still stands
    on the lost nodes by name; a replica that gives way does so in the first part.
    """
    assert most > 0, "a part of nothing"
    ends = range(most, len(found.order), most)
    return (*(_without(before, found, found.order[end:]) for end in ends), found.placement)


def _without(before: Placement, found: Recovered, later: tuple[LayerExpert, ...]) -> Placement:
    """The recovered placement where these experts have not been placed yet."""
    missing: dict[int, set[int]] = {}
    for number, expert in later:
        missing.setdefault(number, set()).add(expert)
    layers = list(found.placement.layers)
    for number, experts in missing.items():
        slots = [[FREE if e in experts else e for e in row] for row in layers[number].slots]
        rows = zip(slots, layers[number].share, strict=True)
        shares = [[0.0 if e == FREE else s for e, s in zip(*row, strict=True)] for row in rows]
        _name(before.layers[number], experts, slots, shares)
        layers[number] = LayerPlacement(tuple(map(tuple, slots)), tuple(map(tuple, shares)))
    return replace(found.placement, layers=tuple(layers))


def _name(
    before: LayerPlacement, experts: set[int], slots: list[list[int]], shares: list[list[float]]
) -> None:
    """Write these experts where they stood, on lost nodes."""
    for node, (row, parts) in enumerate(zip(before.slots, before.share, strict=True)):
        for place, (expert, part) in enumerate(zip(row, parts, strict=True)):
            if expert in experts:
                slots[node][place], shares[node][place] = expert, part


def _loads(placement: Placement, load_LE: Floats | None) -> Floats:
    shape = (len(placement.layers), placement.experts)
    if load_LE is None:
        return np.ones(shape)
    assert load_LE.shape == shape, f"loads of {load_LE.shape} for a placement of {shape}"
    loads: Floats = np.where(load_LE.sum(1, keepdims=True) > 0, load_LE, 1.0)
    return loads


def _alive(placement: Placement, lost: frozenset[int]) -> NDArray[np.bool_]:
    return np.array([node not in lost for node in range(placement.nodes)])


def _survivors(placement: Placement, lost: frozenset[int], slots: int) -> tuple[Ints, Floats]:
    """slot_LNS and share_LNS, as wide as the physical slots, without what stood on lost nodes."""
    slot_LNS, share_LNS = placement.slot_array(), placement.share_array()
    more = ((0, 0), (0, 0), (0, max(0, slots - slot_LNS.shape[2])))
    slot_LNS = np.pad(slot_LNS, more, constant_values=FREE)
    share_LNS = np.pad(share_LNS, more)
    gone = ~_alive(placement, lost)
    slot_LNS[:, gone], share_LNS[:, gone] = FREE, 0.0
    return slot_LNS, share_LNS


def _by_load(found: list[LayerExpert], load_LE: Floats) -> tuple[LayerExpert, ...]:
    """Biggest part of its layer's rows first."""
    part_LE = load_LE / load_LE.sum(1, keepdims=True)
    return tuple(sorted(found, key=lambda at: (-part_LE[at], at)))


class _Layer:
    """One layer while it changes. Owns the survivors' slots and shares, and changes them in place."""

    def __init__(self, slot_NS: Ints, share_NS: Floats, usable_NS: NDArray[np.bool_], load_E: Floats) -> None:
        self._slot, self._share, self._usable, self._load = slot_NS, share_NS, usable_NS, load_E
        self._copies = np.bincount(slot_NS[slot_NS != FREE], minlength=len(load_E))
        self._kept: set[int] = set()  # experts without a home: the lost nodes' replicas stay named
        self._rescale()
        self._level = self._rows().sum(1)

    def orphans(self) -> list[int]:
        """Experts that no survivor holds, biggest load first."""
        missing = np.flatnonzero(self._copies == 0)
        return [int(e) for e in missing[np.argsort(-self._load[missing], kind="stable")]]

    def place(self, expert: int, barred: frozenset[int] = frozenset()) -> bool:
        """Whether a slot was found, on a node that is not `barred`. It never holds another expert's only copy."""
        usable = self._usable
        if barred:
            usable = usable.copy()
            usable[[node for node in barred if node < len(usable)]] = False
        found = self._free(usable) or self._give_way(usable)
        if found is None:
            self._kept.add(expert)
            return False
        self._slot[found], self._share[found] = expert, 1.0
        self._copies[expert] = 1
        self._level[found[0]] += self._load[expert]
        return True

    def finish(self, before: LayerPlacement, slot_NS: Ints, share_NS: Floats) -> LayerPlacement:
        """As a value; `before` is the layer that this began with, of which the arrays are the tables. What was proved
        of it no longer holds. Rows that are as they were stay the same objects."""
        ragged = min(map(len, before.slots)) < self._slot.shape[1]
        if self._kept or ragged or slot_NS.shape != self._slot.shape:
            slots, shares = self._slot.tolist(), self._share.tolist()
            _name(before, self._kept, slots, shares)
            return LayerPlacement(tuple(map(tuple, slots)), tuple(map(tuple, shares)))
        slot_N, share_N = list(before.slots), list(before.share)
        for node in np.flatnonzero(((slot_NS != self._slot) | (share_NS != self._share)).any(1)):
            slot_N[node] = tuple(self._slot[node].tolist())
            share_N[node] = tuple(self._share[node].tolist())
        return LayerPlacement(tuple(slot_N), tuple(share_N))

    def _free(self, usable: NDArray[np.bool_]) -> tuple[int, int] | None:
        """A free slot of the survivor with the least load, then with the fewest experts, then the first."""
        free = (self._slot == FREE) & usable
        open_N = np.flatnonzero(free.any(1))
        if not len(open_N):
            return None
        held = (self._slot[open_N] != FREE).sum(1)
        node = int(open_N[np.lexsort((held, self._level[open_N]))[0]])
        return node, int(free[node].argmax())

    def _give_way(self, usable: NDArray[np.bool_]) -> tuple[int, int] | None:
        """The slot of the replica with the fewest rows that can be spared; its rows go to the other copies."""
        spared = usable & (self._slot != FREE) & (self._copies[self._slot] > 1)
        if not spared.any():
            return None
        rows = np.where(spared, self._rows(), np.inf)
        node, place = divmod(int(rows.argmin()), rows.shape[1])
        self._copies[self._slot[node, place]] -= 1
        self._slot[node, place], self._share[node, place] = FREE, 0.0
        self._rescale()
        self._level = self._rows().sum(1)
        return node, place

    def _rows(self) -> Floats:
        """rows_NS: what each replica gets."""
        rows: Floats = self._share * self._load[self._slot]  # FREE reads any expert: its share is 0
        return rows

    def _rescale(self) -> None:
        """Shares of what is held sum to 1 per expert again; replicas that had none share alike.

        Where they do but for rounding they stay, so that a loss changes no row that it does not concern.
        """
        held = self._slot != FREE
        total_E = np.bincount(self._slot[held], self._share[held], minlength=len(self._load))
        total_E[np.abs(total_E - 1.0) < ROUNDING] = 1.0
        total, copies = total_E[self._slot], np.maximum(self._copies[self._slot], 1)
        share = np.where(total > 0, self._share / np.where(total > 0, total, 1.0), 1.0 / copies)
        self._share = np.where(held, share, 0.0)
