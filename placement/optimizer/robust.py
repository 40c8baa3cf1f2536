"""A placement for loads that are not known exactly: replicas by expected need, where traffic can be shifted later.

Each replica goes to the node where it raises the 4-norm of the node loads least, summed over the scenarios. Further
replicas of an expert avoid nodes that already share an expert with its first ones. So each node shares experts with
many different nodes, and a later split of the traffic can level a load that no scenario showed. It knows no current
placement.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.problem import Floats, Ints
from afserve.placement.placement import FREE

_OVERLAP = 0.3  # against the dearest node = 1; from bench/placement.py on recorded domains
_SAME_RACK = 10.0
_GRAPH_NODES = 256  # above, who shares with whom is not tracked: neighbours are rarely the same by chance


def replicate(load_LE: Floats, least_LE: Ints, slots: int, nodes: int) -> Ints:
    """replicas_LE >= least_LE: the slots go where load per replica is largest, at most one replica a node.

    Minimises max_e load_e / replicas_e. Uses all slots unless every expert stands on every node.
    """
    slots = min(slots, nodes * load_LE.shape[1])
    replicas_LE = least_LE + _by_threshold(load_LE, least_LE, slots, nodes)
    row = np.arange(len(load_LE))
    while True:
        short = replicas_LE.sum(1) < slots
        if not short.any():
            return replicas_LE
        ratio_LE = np.where(replicas_LE < nodes, load_LE / replicas_LE, -1.0)
        replicas_LE[row[short], ratio_LE.argmax(1)[short]] += 1


def _by_threshold(load_LE: Floats, least_LE: Ints, slots: int, nodes: int) -> Ints:
    """Most of the way at once: replicas beyond `least_LE` by bisection on load per replica. Never too many."""
    low, high = np.zeros(len(load_LE)), load_LE.max(1) + 1e-300
    extra: Ints = np.zeros_like(least_LE)
    for _ in range(30):
        middle = (low + high) / 2
        need = np.ceil(load_LE / np.maximum(middle, 1e-300)[:, None]).clip(0, nodes).astype(np.int64)
        need = np.maximum(need, least_LE) - least_LE
        feasible = (least_LE + need).sum(1) <= slots
        high, low = np.where(feasible, middle, high), np.where(feasible, low, middle)
        extra = np.where(feasible[:, None], need, extra)
    return extra


def spread(
    load_CLE: Floats,
    weights: Floats,
    replicas_LE: Ints,
    room_N: Ints,
    pace_N: Floats,
    rack_N: Ints,
    *,
    whole_first: bool = False,
) -> Ints:
    """slot_LNS with replicas_LE replicas of each expert (equal sums in every layer), never two on a node.

    `whole_first` deals experts with one replica before all others: no split can shift their rows later, so the
    fullest node of an unforeseen load is nearly always one of theirs.
    """
    layers = load_CLE.shape[1]
    need_LE = np.tensordot(weights, load_CLE, 1) / replicas_LE
    rank_LE = need_LE + np.where(replicas_LE == 1, need_LE.max(), 0.0) if whole_first else need_LE
    order_LE = np.argsort(-rank_LE, axis=1, kind="stable")
    row = np.arange(layers)[:, None]
    items_LK = np.repeat(order_LE.ravel(), replicas_LE[row, order_LE].ravel()).reshape(layers, -1)
    part_CLE = load_CLE / replicas_LE * len(room_N) / np.maximum(load_CLE.sum(2, keepdims=True), 1e-300)
    table = _Table(layers, room_N, rack_N)
    powers = _Powers(weights, layers, pace_N)
    again_LK = np.zeros(items_LK.shape, dtype=bool)
    again_LK[:, 1:] = items_LK[:, 1:] == items_LK[:, :-1]
    for k in range(items_LK.shape[1]):
        expert_L = items_LK[:, k]
        part_LC = part_CLE[:, row[:, 0], expert_L].T
        node_L = table.choose(expert_L, powers.rise(part_LC), again_LK[:, k])
        powers.add(part_LC, node_L)
    return table.finish()


class _Powers:
    """x, x^2 and x^3 of every node's rows, so that what (x + p)^4 adds to x^4 is one matrix product for all nodes."""

    def __init__(self, weights: Floats, layers: int, pace_N: Floats) -> None:
        self._count = len(weights)
        self._power_LKN = np.zeros((layers, 3 * self._count, len(pace_N)))
        self._weight_K = np.concatenate([4 * weights, 6 * weights, 4 * weights])
        self._weight_C, self._speed_N = weights, 1 / pace_N**3
        self._layer = np.arange(layers)

    def rise(self, part_LC: Floats) -> Floats:
        """rise_LN of the weighted fourth powers when each node in turn gets `part` more rows."""
        square = part_LC * part_LC
        factor_LK = np.concatenate([part_LC * square, square, part_LC], axis=1) * self._weight_K
        rise: Floats = np.matmul(factor_LK[:, None], self._power_LKN)[:, 0]
        rise += ((square * square) @ self._weight_C)[:, None]
        rise *= self._speed_N
        return rise

    def add(self, part_LC: Floats, node_L: Ints) -> None:
        rows = self._power_LKN[self._layer, : self._count, node_L] + part_LC
        square = rows * rows
        self._power_LKN[self._layer, :, node_L] = np.concatenate([rows, square, rows * square], axis=1)


class _Table:
    """Slots being filled: one expert per layer at a time, its replicas one after the other."""

    def __init__(self, layers: int, room_N: Ints, rack_N: Ints) -> None:
        nodes = len(room_N)
        self._slot = np.full((layers, nodes, int(room_N.max())), FREE)
        self._used = np.zeros((layers, nodes), dtype=np.int64)
        self._room = room_N
        self._same_rack = (rack_N[:, None] == rack_N) * _SAME_RACK if np.ptp(rack_N) else None
        self._shared = np.zeros((layers, nodes, nodes)) if nodes <= _GRAPH_NODES else None
        self._holding = np.zeros((layers, nodes))  # nodes that hold the expert being placed
        self._row = np.arange(layers)
        self._late: list[tuple[int, int]] = []

    def choose(self, expert_L: Ints, cost_LN: Floats, again_L: NDArray[np.bool_]) -> Ints:
        self._holding[~again_L] = 0.0
        open_LN = (self._used < self._room) & (self._holding == 0)
        if again_L.any():
            dearest = np.where(open_LN, cost_LN, 0.0).max(1, keepdims=True)
            cost_LN = cost_LN / np.maximum(dearest, 1e-300) + self._crowding()
        node_L: Ints = np.where(open_LN, cost_LN, np.inf).argmin(1)
        done = open_LN[self._row, node_L]
        self._late += [(int(layer), int(expert_L[layer])) for layer in np.flatnonzero(~done)]
        on, at = self._row[done], node_L[done]
        self._slot[on, at, self._used[on, at]] = expert_L[done]
        self._used[on, at] += 1
        if again_L.any() and self._shared is not None:
            self._shared[on, at] += self._holding[on]
            self._shared[on, :, at] += self._holding[on]
        self._holding[on, at] = 1.0
        return node_L

    def _crowding(self) -> Floats:
        """How much each node already shares with the nodes that hold this expert; racks count far more."""
        crowd_LN = np.zeros(self._holding.shape)
        if self._shared is not None:
            crowd_LN += _OVERLAP * np.matmul(self._holding[:, None, :], self._shared)[:, 0]
        if self._same_rack is not None:
            crowd_LN += self._holding @ self._same_rack
        return crowd_LN

    def finish(self) -> Ints:
        for layer, expert in self._late:
            _squeeze(self._slot[layer], self._used[layer], self._room, expert)
        return self._slot


def _squeeze(slot_NS: Ints, used_N: Ints, room_N: Ints, expert: int) -> None:
    """Every open node holds `expert` already: another node passes one of its experts on and takes it."""
    without = np.flatnonzero((slot_NS != expert).all(1) & (room_N > 0))
    for to in np.flatnonzero(used_N < room_N):
        for node in without:
            passing = np.flatnonzero(~np.isin(slot_NS[node, : used_N[node]], slot_NS[to]))
            if len(passing):
                slot_NS[to, used_N[to]] = slot_NS[node, passing[0]]
                slot_NS[node, passing[0]] = expert
                used_N[to] += 1
                return
