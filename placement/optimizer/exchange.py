"""Few moves where every slot is taken: experts swap places, and a move is an expert that does not end on its old node.

Without a spare slot one swap costs two moves, so making one best swap after another (`improve`) wastes the budget. A
ring is cheaper: A to B's node, B to C's, C to A's balances three experts for three moves, and each further one adds one
move. To find rings, many searches run side by side, each with another price of a move. Moving on an expert that already
left its node is free, and bringing it home pays its price back. For each number of moves the best state that any search
passed is kept; the budget is then divided over the layers exactly. Knows one load, equal nodes and no traffic shares.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.problem import Floats, Ints, Throttle, unthrottled
from afserve.placement.placement import FREE

_PRICES = 48  # of a move, against the norm of levels in units of the mean
_CHEAPEST, _DEAREST = 1e-4, 1.0
_SQUARINGS = (2, 3, 4, 5)  # norms: sums of 4th to 32nd powers
_FEWEST = 8  # searches per layer and norm, below which this is not worth its time
_SCORES = 150_000  # candidates of one step, over all searches
_WORK = 6_000_000  # candidates of all steps of one norm: bounds the time alike on every machine
_LEAST_WORK = 10_000  # that a step counts for
_FAR = 3  # times a layer's part of the budget: searches that strayed farther are given up
_TINY = 1e-9


def applies(slot_LNS: Ints, load_LE: Floats, room_N: Ints, pace_N: Floats) -> bool:
    """Whether every expert stands once, on equal nodes without a free slot, and the problem is small enough."""
    nodes, width = slot_LNS.shape[1:]
    whole = nodes * width == load_LE.shape[1] and bool((slot_LNS != FREE).all())
    even = bool((room_N == width).all()) and float(np.ptp(pace_N)) == 0.0
    return whole and even and nodes > 1 and _searches(slot_LNS) >= _FEWEST


def exchanged(
    slot_LNS: Ints, load_LE: Floats, budgets: list[int], throttle: Throttle = unthrottled
) -> list[Ints]:
    """For each budget the slots, at most so many moves from slot_LNS, whose fullest nodes sum to least over layers."""
    home_LE = _homes(slot_LNS)
    scale_L1 = np.maximum(load_LE.sum(1, keepdims=True), 1e-300) / slot_LNS.shape[1]
    front = _Front(slot_LNS)
    prices = np.append(0.0, np.geomspace(_CHEAPEST, _DEAREST, _PRICES))
    chosen = prices[np.linspace(0, _PRICES, _searches(slot_LNS)).round().astype(np.int64)]
    farthest = _FAR * max(budgets) // len(slot_LNS)
    for squarings in _SQUARINGS:
        _Chains(slot_LNS, load_LE / scale_L1, home_LE, chosen, squarings).run(front, farthest, throttle)
    return [front.within(budget, scale_L1[:, 0]) for budget in budgets]


def _searches(slot_LNS: Ints) -> int:
    """How many searches of each layer and norm the time allows."""
    return min(int(_SCORES // (slot_LNS.size * slot_LNS.shape[2])), _PRICES + 1)


def _homes(slot_LNS: Ints) -> Ints:
    layers, nodes, width = slot_LNS.shape
    home_LE = np.empty((layers, nodes * width), dtype=np.int64)
    np.put_along_axis(home_LE, slot_LNS.reshape(layers, -1), np.repeat(np.arange(nodes), width)[None], 1)
    return home_LE


class _Front:
    """Per layer and number of moves the lowest fullest node that was seen, and the slots that have it."""

    def __init__(self, slot_LNS: Ints) -> None:
        layers, nodes, width = slot_LNS.shape
        self._top_LK = np.full((layers, nodes * width + 1), np.inf)
        self._slot_LKNS = np.repeat(slot_LNS[:, None], nodes * width + 1, 1)

    def keep_better(self, layer_B: Ints, moves_B: Ints, top_B: Floats, slot_BNS: Ints) -> None:
        for at in np.flatnonzero(top_B < self._top_LK[layer_B, moves_B] - _TINY):
            place = layer_B[at], moves_B[at]
            if top_B[at] < self._top_LK[place]:
                self._top_LK[place], self._slot_LKNS[place] = top_B[at], slot_BNS[at]

    def within(self, budget: int, scale_L: Floats) -> Ints:
        """Exact: the least sum of fullest nodes over the layers for every number of moves, layer by layer."""
        cost_LK = self._top_LK * scale_L[:, None]
        least = np.zeros(budget + 1)
        picks = []
        for cost_K in cost_LK:
            moves = np.flatnonzero(np.isfinite(cost_K))
            moves = moves[moves <= budget]
            sums = np.full((len(moves), budget + 1), np.inf)
            for line, count in enumerate(moves.tolist()):
                sums[line, count:] = least[: budget + 1 - count] + cost_K[count]
            picks.append(moves[sums.argmin(0)])
            least = sums.min(0)
        slots, left = [], budget
        for layer in range(len(cost_LK) - 1, -1, -1):
            count = int(picks[layer][left])
            slots.append(self._slot_LKNS[layer, count])
            left -= count
        return np.array(slots[::-1])


@dataclass(frozen=True, slots=True)
class _Trade:
    """In search `at`, slot `give` of node `hot` and slot `take` of node `cool` change places."""

    at: NDArray[np.intp]
    hot: Ints
    give: Ints
    cool: Ints
    take: Ints


class _Chains:
    """Searches of one norm, every layer with every price: the best trade of the hottest node, until none helps."""

    def __init__(
        self, slot_LNS: Ints, load_LE: Floats, home_LE: Ints, prices: Floats, squarings: int
    ) -> None:
        layers, self._nodes, _ = slot_LNS.shape
        self._layer = np.repeat(np.arange(layers), len(prices))
        self._price = np.tile(prices, layers)
        self._squarings = squarings
        self._slot, load, home = slot_LNS[self._layer], load_LE[self._layer], home_LE[self._layer]
        line = np.arange(len(self._layer))[:, None, None]
        self._load, self._home = load[line, self._slot], home[line, self._slot]  # of what is in each slot now
        self._refused = np.zeros(self._slot.shape[:2], dtype=bool)

    def run(self, front: _Front, farthest: int, throttle: Throttle) -> None:
        work = 0
        while len(self._layer) and work < _WORK:
            throttle()
            away = (self._home != np.arange(self._nodes)[:, None]).sum((1, 2))
            front.keep_better(self._layer, away, self._load.sum(2).max(1), self._slot)
            self._drop(self._refused.all(1) | (away > farthest))
            work += max(self._slot.size * self._slot.shape[2], _LEAST_WORK)
            if len(self._layer):
                self._make(self._best())

    def _drop(self, over: NDArray[np.bool_]) -> None:
        """Searches that are over, once they are many."""
        if over.sum() > len(over) // 8 or over.all():
            for name in ("_layer", "_price", "_slot", "_load", "_home", "_refused"):
                setattr(self, name, getattr(self, name)[~over])

    def _best(self) -> _Trade:
        """Refuses the hottest nodes whose best trade is none."""
        line, level = np.arange(len(self._layer)), self._load.sum(2)
        hot = np.where(self._refused, -1.0, level).argmax(1)
        top = level[line, hot][:, None, None, None]
        step = self._load[line, hot][:, :, None, None] - self._load[:, None]  # search x give x cool x take
        rise = self._power(top - step)
        rise += self._power(level[:, None, :, None] + step)
        rise -= self._power(top) + self._power(level)[:, None, :, None]
        rise += self._price[:, None, None, None] * self._strays(line, hot)
        rise[line, :, hot] = 0.0
        flat = rise.reshape(len(rise), -1)
        pick = flat.argmin(1)
        helps = flat[line, pick] < -_TINY * self._power(level.max(1))  # beyond rounding
        self._refused[line[~helps], hot[~helps]] = True
        give, cool, take = np.unravel_index(pick[helps], rise.shape[1:])
        return _Trade(line[helps], hot[helps], give, cool, take)

    def _power(self, level: Floats) -> Floats:
        for _ in range(self._squarings):
            level = level * level
        return level

    def _strays(self, line: Ints, hot: Ints) -> Floats:
        """How many more experts would be away from home: search x give x cool x take."""
        node, mine = np.arange(self._nodes), self._home[line, hot]
        goes = (mine[:, :, None] != node) * 1.0 - (mine != hot[:, None])[:, :, None]
        comes = (self._home != hot[:, None, None]) * 1.0 - (self._home != node[:, None])
        strays: Floats = goes[:, :, :, None] + comes[:, None]
        return strays

    def _make(self, trade: _Trade) -> None:
        one, other = (trade.at, trade.hot, trade.give), (trade.at, trade.cool, trade.take)
        for array in (self._slot, self._load, self._home):
            array[one], array[other] = array[other], array[one]
        self._refused[trade.at] = False
