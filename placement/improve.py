"""Better placements by few moves: exchanges that lower the hottest node, all layers at once, round by round.

An exchange fills one slot (a replica of a hot node's expert goes to a cooler node, over a spare replica or an empty slot: one move)
or two (two experts change places). Candidates are scored by the eighth-power norm of the node levels, averaged over the scenarios, as if
traffic were then levelled between the two nodes; the chosen one is made, its experts' traffic is poured again, and it stays only if
the norm truly fell. Levels are in units of the mean, so 1 is perfect. Knows prices only as a number of moves.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.plan import FREE
from afserve.placement.problem import Floats, Ints
from afserve.placement.split import count_replicas

Flags = NDArray[np.bool_]

_ENOUGH = 1e-9
_COOL = 4  # nodes tried as partners of a two-move exchange
_TRIES = 3  # failed candidates before a layer is left alone


@dataclass(frozen=True, slots=True)
class Exchange:
    """The best candidate per layer: slot `take` of node `cool` gets the expert in slot `give` of node `hot`.

    In a trade the other way round too; otherwise it is a further replica.
    """

    gain: Floats
    moves: Ints
    trade: Ints
    hot: Ints
    give: Ints
    cool: Ints
    take: Ints

    def better(self, other: "Exchange") -> "Exchange":
        """Per layer the larger gain per move."""
        mine = self.gain / self.moves >= other.gain / other.moves
        return Exchange(*(np.where(mine, getattr(self, f), getattr(other, f)) for f in self.__slots__))


class Search:
    """Owns the slots and the traffic in them while they change."""

    def __init__(
        self, slot_LNS: Ints, load_CLE: Floats, weights: Floats, pace_N: Floats, least_LE: Ints, room_N: Ints
    ) -> None:
        self.slot = slot_LNS.copy()
        scale_LC = np.maximum(load_CLE.sum(2).T / pace_N[room_N > 0].sum(), 1e-300)
        self._load = load_CLE.transpose(1, 0, 2) / scale_LC[:, :, None]
        self._weight = weights[:, None]
        self._pace, self._least, self._room = pace_N, least_LE, room_N
        self._row = np.arange(len(slot_LNS))
        self._usable = np.arange(slot_LNS.shape[2]) < room_N[:, None]
        self._copies = count_replicas(self.slot, self._load.shape[2])
        spare = np.take_along_axis(self._copies, np.maximum(self.slot, 0).reshape(len(self.slot), -1), 1)
        even = np.where(self.slot == FREE, 0, 1 / np.maximum(spare.reshape(self.slot.shape), 1))
        who = np.maximum(self.slot, 0)
        self.rows = self._load[self._row[:, None, None], :, who].transpose(0, 3, 1, 2) * even[:, None]
        self._refused = np.zeros(self.slot.shape[:2], dtype=bool)

    def level(self) -> Floats:
        level: Floats = self.rows.sum(3) / self._pace
        return level

    def norm(self) -> Floats:
        """norm_L: sum over nodes and weighted scenarios of speed * level^8."""
        norm: Floats = (_eighth(self.level()) * self._pace * self._weight).sum((1, 2))
        return norm

    def run(self, budget: int, *, copies: bool = True) -> int:
        """Makes exchanges until the budget is spent or nothing helps. Returns the moves made.

        Without `copies` every expert keeps its number of replicas: experts only change places.
        """
        used, failed = 0, np.zeros(len(self.slot), dtype=np.int64)
        while used < budget and (failed < _TRIES).any():
            found = self._best(copies)
            willing = (found.gain > _ENOUGH) & (failed < _TRIES)
            willing = _afford(willing, found, budget - used)
            if not willing.any():
                break
            kept = self._attempt(found, willing)
            used += int(found.moves[kept].sum())
            failed = np.where(kept, 0, failed + 1)
            self._refused[kept] = False
        return used

    def _best(self, copies: bool) -> Exchange:
        level = self.level()
        heat = (_eighth(level) * self._weight).sum(1)
        hot = np.where(self._refused, -1.0, heat).argmax(1)
        swap = self._trade(level, heat, hot)
        return self._copy(level, hot).better(swap) if copies else swap

    def _copy(self, level: Floats, hot: Ints) -> Exchange:
        """A further replica of an expert of `hot` on another node."""
        row, pace = self._row, self._pace
        victim_LN, lost_LCN, penalty_LN = self._victims()
        own_S = self.slot[row, hot]
        absent_LSN = ~(self.slot[:, None] == own_S[:, :, None, None]).any(3) & (own_S != FREE)[:, :, None]
        top = level[row, :, hot][:, :, None, None]
        base = (level - lost_LCN / pace)[:, :, None, :]
        rate = 1 / (1 / pace[hot][:, None] + 1 / pace)
        shift = np.clip((top - base) * rate[:, None, None, :], 0, self.rows[row, :, hot][:, :, :, None])
        after = _eighth(top - shift / pace[hot][:, None, None, None]) * pace[hot][:, None, None, None]
        after += _eighth(base + shift / pace) * pace
        before = _eighth(top) * pace[hot][:, None, None, None] + (_eighth(level) * pace)[:, :, None, :]
        gain = ((before - after) * self._weight[:, :, None]).sum(1) - penalty_LN[:, None]
        gain = np.where(absent_LSN & (victim_LN >= 0)[:, None], gain, -np.inf)
        give, cool, best = _argmax2(gain)
        one = np.ones_like(give)
        return Exchange(best, one, 0 * one, hot, give, cool, victim_LN[row, cool])

    def _victims(self) -> tuple[Ints, Floats, Floats]:
        """Per node the slot that is missed least: an empty one, or a replica that its expert can spare."""
        who = np.maximum(self.slot, 0)
        at = self._row[:, None, None]
        spare = (self.slot == FREE) | (self._copies[at, who] > np.maximum(self._least[at, who], 1))
        spare &= self._usable
        rows = (self.rows * self._weight[:, :, None]).sum(1)
        victim = np.where(spare, rows, np.inf).argmin(2)
        picked = np.take_along_axis(self.rows, victim[:, None, :, None], 3)[..., 0]
        penalty = ((_eighth(1 + picked) - 1) * self._weight).sum(1)
        return np.where(spare.any(2), victim, -1), picked, penalty

    def _trade(self, level: Floats, heat: Floats, hot: Ints) -> Exchange:
        """An expert of `hot` and one of a cool node change places, or it goes into an empty slot there."""
        row, pace = self._row, self._pace
        few = min(_COOL, level.shape[2])
        cool_LK = np.argpartition(np.where(self._room > 0, heat, np.inf), few - 1, axis=1)[:, :few]
        own, theirs = self.slot[row, hot], self.slot[row[:, None], cool_LK]
        mine = self.rows[row, :, hot][:, :, :, None, None]
        yours = self.rows[row[:, None], :, cool_LK].transpose(0, 2, 1, 3)[:, :, None]
        top, low = level[row, :, hot][:, :, None, None, None], level[row[:, None], :, cool_LK]
        low = low.transpose(0, 2, 1)[:, :, None, :, None]
        step = mine - yours
        hot_pace, low_pace = pace[hot][:, None, None, None, None], pace[cool_LK][:, None, None, :, None]
        change = (_eighth(top) - _eighth(top - step / hot_pace)) * hot_pace
        change = change + (_eighth(low) - _eighth(low + step / low_pace)) * low_pace
        gain = (change * self._weight[:, :, None, None]).sum(1)
        same = (own[:, :, None, None] == theirs[:, None]) & (own != FREE)[:, :, None, None]
        barred = same.any(3)[..., None] | same.any(1)[:, None] | (own == FREE)[:, :, None, None]
        barred |= ((cool_LK == hot[:, None])[:, :, None] | ~self._usable[cool_LK])[:, None]
        gain = np.where(barred, -np.inf, gain)
        flat = gain.reshape(len(row), -1)
        pick = flat.argmax(1)
        give, near, take = np.unravel_index(pick, gain.shape[1:])
        cool = cool_LK[row, near]
        moves = np.where(self.slot[row, cool, take] == FREE, 1, 2)
        return Exchange(flat[row, pick], moves, np.ones_like(moves), hot, give, cool, take)

    def _attempt(self, found: Exchange, willing: Flags) -> Flags:
        """Makes the exchanges of willing layers, undoes those that do not help. kept_L."""
        before, slot, rows, copies = self.norm(), self.slot.copy(), self.rows.copy(), self._copies.copy()
        own = self.slot[self._row, found.hot, found.give]
        theirs = self.slot[self._row, found.cool, found.take]
        swap = willing & (found.trade == 1)
        self._put(willing, found.cool, found.take, own)
        self._put(swap, found.hot, found.give, theirs)
        self._copies = count_replicas(self.slot, self._load.shape[2])
        self._pour(theirs)
        self._pour(own)
        kept = willing & (self.norm() < before * (1 - 1e-6))
        undo = ~kept
        self.slot[undo], self.rows[undo], self._copies[undo] = slot[undo], rows[undo], copies[undo]
        self._refused[self._row[willing & undo], found.hot[willing & undo]] = True
        return kept

    def _put(self, where: Flags, node: Ints, slot: Ints, expert: Ints) -> None:
        on, at, place = self._row[where], node[where], slot[where]
        self.slot[on, at, place] = expert[where]
        self.rows[on, :, at, place] = 0.0

    def _pour(self, expert_L: Ints) -> None:
        """Water-fills one expert per layer over its replicas, for every scenario, the others as they are."""
        held_LNS = (self.slot == expert_L[:, None, None]) & (expert_L != FREE)[:, None, None]
        held_LCN = held_LNS.any(2)[:, None]
        self.rows[np.broadcast_to(held_LNS[:, None], self.rows.shape)] = 0.0
        amount = self._load[self._row, :, np.maximum(expert_L, 0)][:, :, None]
        part = _fill(np.where(held_LCN, self.level(), np.inf), amount, self._pace)
        self.rows += part[..., None] * held_LNS[:, None]


def _eighth(x: Floats) -> Floats:
    square = x * x
    fourth = square * square
    eighth: Floats = fourth * fourth
    return eighth


def _argmax2(gain_LSN: Floats) -> tuple[Ints, Ints, Floats]:
    flat = gain_LSN.reshape(len(gain_LSN), -1)
    pick = flat.argmax(1)
    first, second = np.divmod(pick, gain_LSN.shape[2])
    return first, second, flat[np.arange(len(flat)), pick]


def _afford(willing: Flags, found: Exchange, left: int) -> Flags:
    """The layers with the largest gain per move, as many as `left` moves pay for."""
    if found.moves[willing].sum() <= left:
        return willing
    order = np.argsort(np.where(willing, -found.gain / found.moves, np.inf), kind="stable")
    cost = np.cumsum(np.where(willing[order], found.moves[order], 0))
    chosen = np.zeros_like(willing)
    chosen[order[cost <= left]] = True
    return chosen & willing


def _fill(base_LCN: Floats, amount_LC1: Floats, pace_N: Floats) -> Floats:
    """rows_LCN >= 0 summing to `amount` that level speed-scaled loads from `base` (inf = not allowed)."""
    order = np.argsort(base_LCN, axis=2)
    base = np.take_along_axis(base_LCN, order, 2)
    speed = pace_N[order]
    finite = np.where(np.isfinite(base), base, 0.0)
    total = np.cumsum(np.where(np.isfinite(base), speed, 0.0), 2)
    height = (amount_LC1 + np.cumsum(finite * speed, 2)) / np.maximum(total, 1e-300)
    wet = np.maximum((height > base).sum(2, keepdims=True) - 1, 0)
    surface = np.take_along_axis(height, wet, 2)
    part: Floats = np.where(np.isfinite(base_LCN), np.maximum(surface - base_LCN, 0.0) * pace_N, 0.0)
    return part
