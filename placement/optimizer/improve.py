"""Better placements by few moves: local search that cools the hottest node, in all layers at once, round by round.

A *copy* gives an expert of the hottest node one more replica on a cool node, in an empty slot or over a replica that
can be spared (one move). A *trade* swaps two experts (two moves). A candidate's score is the 8-norm of the node levels
(the load of a node over the mean), which follows the hottest node but still sees the others; it is computed as if the
two nodes shared their traffic evenly. The best candidate is made, the traffic around it is split again, and it stays
only if the norm really fell. A layer that finds nothing has its traffic split exactly and tries once more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.bound import lower_bound
from afserve.placement.optimizer.domains import DomainSpans
from afserve.placement.optimizer.problem import Floats, Ints, Throttle, unthrottled
from afserve.placement.optimizer.split import count_replicas, split
from afserve.placement.placement import FREE

Flags = NDArray[np.bool_]

_ENOUGH = 1e-6  # a smaller fall of the norm, relative to the number of nodes, is not worth a move
_SCORES = 80_000  # trades scored in a round: the cool nodes tried are as many as that allows, at least 4
_TRIES = 3  # failures before a layer is split exactly, and again before it is left alone
_EXACT_NODES = 128  # above, an exact split costs more than it finds


@dataclass(frozen=True, slots=True)
class SlotExchange:
    """The best candidate of each layer `row`: slot `take` of node `cool` gets the expert in slot `give` of node `hot`.

    In a trade the other way round too.
    """

    row: Ints
    gain: Floats
    moves: Ints
    trade: Flags
    hot: Ints
    give: Ints
    cool: Ints
    take: Ints

    def better(self, other: "SlotExchange") -> "SlotExchange":
        """Per layer the larger gain per move."""
        mine = self.gain / self.moves >= other.gain / other.moves
        return SlotExchange(*(np.where(mine, getattr(self, f), getattr(other, f)) for f in self.__slots__))

    def select(self, which: Flags) -> "SlotExchange":
        return SlotExchange(*(getattr(self, f)[which] for f in self.__slots__))


class Search:
    """Owns the slots, and the traffic in them per scenario, while they change. `spans`: copies must stay apart."""

    def __init__(
        self,
        slot_LNS: Ints,
        load_CLE: Floats,
        weights: Floats,
        pace_N: Floats,
        least_LE: Ints,
        room_N: Ints,
        squarings: int = 3,
        throttle: Throttle = unthrottled,
        spans: DomainSpans | None = None,
    ) -> None:
        self._spans = spans
        self.slot = slot_LNS.copy()
        scale_LC = np.maximum(load_CLE.sum(2).T / pace_N[room_N > 0].sum(), 1e-300)
        self._load = load_CLE.transpose(1, 0, 2) / scale_LC[:, :, None]
        self._weight_C1, self._squarings, self._throttle = weights[:, None], squarings, throttle
        self._pace, self._least, self._room = pace_N, least_LE, room_N
        bound_LC = np.stack([lower_bound(load_LE, room_N, pace_N) for load_LE in load_CLE], axis=1)
        self._floor_LC = bound_LC / scale_LC * (1 - _ENOUGH)
        self._usable = np.arange(slot_LNS.shape[2]) < room_N[:, None]
        self._copies = count_replicas(self.slot, load_CLE.shape[2])
        layer, who = np.arange(len(slot_LNS))[:, None, None], np.maximum(self.slot, 0)
        even = np.where(self.slot == FREE, 0, 1 / np.maximum(self._copies[layer, who], 1))
        self.rows = self._load[layer, :, who].transpose(0, 3, 1, 2) * even[:, None]
        self.level = self.rows.sum(3) / self._pace  # level_LCN, kept in step with the rows
        self._few = max(4, _SCORES // (len(self.slot) * len(weights) * self.slot.shape[2] ** 2))
        self._refused = np.zeros(self.slot.shape[:2], dtype=bool)
        self._failed = np.zeros(len(self.slot), dtype=np.int64)

    def _power(self, level: Floats, row: Ints | None = None) -> Floats:
        """A high power of levels (layer x scenario x anything). With `row`, nothing counts below the layers' bounds.

        No placement takes the fullest node below the bound, so to cool a node further is not worth a move.
        """
        if row is not None:
            floor = self._floor_LC[row]
            level = np.maximum(level, floor.reshape(floor.shape + (1,) * (level.ndim - 2)))
        for _ in range(self._squarings):
            level = level * level
        return level

    def norm(self, row: Ints) -> Floats:
        """norm_L: sum over nodes and weighted scenarios of speed * level^(2^squarings)."""
        norm: Floats = (self._power(self.level[row], row) * self._pace * self._weight_C1).sum((1, 2))
        return norm

    def run(self, budget: int, *, copies: bool = True, rounds: int = 10_000) -> int:
        """Makes exchanges until the budget is spent or nothing helps. Returns the moves made.

        Without `copies` every expert keeps its number of replicas: experts only change places.
        """
        used = 0
        self._failed[:] = 0
        for _ in range(rounds):
            self._throttle()
            row = np.flatnonzero(self._failed < 2 * _TRIES)
            if used >= budget or len(row) == 0:
                break
            found = self._best(row, copies)
            hopeful = found.gain > _ENOUGH * len(self._pace)
            self._fail(row[~hopeful], _TRIES)
            chosen = found.select(hopeful & _affordable(hopeful, found, budget - used))
            if len(chosen.row) == 0 and not hopeful.any():
                continue
            if len(chosen.row) == 0:
                break
            kept = self._attempt(chosen)
            used += int(chosen.moves[kept].sum())
            self._failed[chosen.row[kept]] = 0
            self._refused[chosen.row[kept]] = False
            self._refused[chosen.row[~kept], chosen.hot[~kept]] = True
            self._fail(chosen.row[~kept], 1)
        return used

    def _fail(self, row: Ints, count: int) -> None:
        """Counts failures; at the first limit a layer's traffic is split exactly, which opens new ways."""
        before = self._failed[row] // _TRIES
        self._failed[row] += count
        stuck = row[(before == 0) & (self._failed[row] >= _TRIES)]
        self._failed[stuck] = _TRIES
        if len(stuck) and len(self._pace) <= _EXACT_NODES:
            self._refused[stuck] = False
            load_KE = self._load[stuck].reshape(-1, self._load.shape[2])  # layer and scenario together
            slot = np.repeat(self.slot[stuck], self._load.shape[1], 0)
            share = split(slot, load_KE, self._pace, tolerance=1e-4)
            rows = share * load_KE[np.arange(len(slot))[:, None, None], np.maximum(slot, 0)]
            self.rows[stuck] = rows.reshape(self.rows[stuck].shape)
            self.level[stuck] = self.rows[stuck].sum(3) / self._pace

    def _best(self, row: Ints, copies: bool) -> SlotExchange:
        level = self.level[row]
        heat = (self._power(level, row) * self._weight_C1).sum(1)
        hot = np.where(self._refused[row], -1.0, heat).argmax(1)
        few = min(2 * self._few, len(self._pace))
        chill = np.where(self._room > 0, (self._power(level) * self._weight_C1).sum(1), np.inf)
        cool_LK = np.argpartition(chill, few - 1, axis=1)[:, :few]
        if not copies:
            return self._trade(row, level, hot, cool_LK)
        copy = self._copy(row, level, hot, cool_LK)
        few = min(self._few, len(self._pace))
        coldest = np.argpartition(np.take_along_axis(chill, cool_LK, 1), few - 1, axis=1)[:, :few]
        return copy.better(self._trade(row, level, hot, np.take_along_axis(cool_LK, coldest, 1)))

    def _copy(self, row: Ints, level: Floats, hot: Ints, cool_LK: Ints) -> SlotExchange:
        """A further replica of an expert of `hot` on a cool node. Arrays are layer x scenario x slot x cool node."""
        line, pace_1, pace_K = np.arange(len(row)), self._pace[hot][:, None, None, None], self._pace[cool_LK]
        pace_K = pace_K[:, None, None]
        victim_LK, lost_LCK, penalty_LK = self._victims(row, cool_LK)
        own, theirs = self.slot[row, hot], self.slot[row[:, None], cool_LK]
        present = (theirs[:, None] == own[:, :, None, None]).any(3) | (own == FREE)[:, :, None]
        top = level[line, :, hot][:, :, None, None]
        cold = level[line[:, None], :, cool_LK].transpose(0, 2, 1)[:, :, None]
        base = cold - lost_LCK[:, :, None] / pace_K
        shift = np.clip((top - base) / (1 / pace_1 + 1 / pace_K), 0, self.rows[row, :, hot][:, :, :, None])
        fall = (self._power(top, row) - self._power(top - shift / pace_1, row)) * pace_1
        fall += (self._power(cold, row) - self._power(base + shift / pace_K, row)) * pace_K
        gain = (fall * self._weight_C1[:, :, None]).sum(1) - penalty_LK[:, None]
        gain = np.where(present | (victim_LK < 0)[:, None], -np.inf, gain)
        (give, near), best = _argmax(gain)
        one = np.ones(len(row), dtype=np.int64)
        return SlotExchange(row, best, one, one == 0, hot, give, cool_LK[line, near], victim_LK[line, near])

    def _victims(self, row: Ints, cool_LK: Ints) -> tuple[Ints, Floats, Floats]:
        """Per cool node the slot that is missed least: empty, or a replica whose others take its traffic best."""
        at = row[:, None]
        slot, rows = self.slot[at, cool_LK], self.rows[at, :, cool_LK].transpose(0, 2, 1, 3)
        who = np.maximum(slot, 0)
        spare = (slot == FREE) | (
            self._copies[at[:, :, None], who] > np.maximum(self._least[at[:, :, None], who], 1)
        )
        spare &= self._usable[cool_LK]
        if self._spans is not None:
            spare &= ~self._spans.needed(at[:, :, None], cool_LK[:, :, None], slot)
        refuge = self._refuge(row, cool_LK, who)[:, None]
        fall = (
            (self._power(refuge + rows, row) - self._power(refuge, row)) * self._weight_C1[:, :, None]
        ).sum(1)
        penalty = np.where(slot == FREE, 0.0, fall)
        victim = np.where(spare, penalty, np.inf).argmin(2)
        lost = np.take_along_axis(rows, victim[:, None, :, None], 3)[..., 0]
        return (
            np.where(spare.any(2), victim, -1),
            lost,
            np.take_along_axis(penalty, victim[:, :, None], 2)[:, :, 0],
        )

    def _refuge(self, row: Ints, cool_LK: Ints, expert_LKS: Ints) -> Floats:
        """level_LKS of the coolest other node that holds each expert of the nodes `cool`."""
        line, experts = np.arange(len(row))[:, None, None], self._load.shape[2]
        mean_LN = (self.level[row] * self._weight_C1).sum(1)
        order_LN = np.argsort(-mean_LN, axis=1)
        held = np.where(self.slot[row] == FREE, experts, self.slot[row])
        coolest = np.zeros((len(row), experts + 1), dtype=np.int64)
        coolest[line, np.take_along_axis(held, order_LN[:, :, None], 1)] = order_LN[:, :, None]
        others = np.where(coolest[line, held] == np.arange(len(self._pace))[:, None], experts, held)
        second = coolest.copy()
        second[line, np.take_along_axis(others, order_LN[:, :, None], 1)] = order_LN[:, :, None]
        first_LKS, second_LKS = coolest[line, expert_LKS], second[line, expert_LKS]
        refuge: Floats = mean_LN[line, np.where(first_LKS == cool_LK[:, :, None], second_LKS, first_LKS)]
        return refuge

    def _trade(self, row: Ints, level: Floats, hot: Ints, cool_LK: Ints) -> SlotExchange:
        """An expert of `hot` and one of a cool node change places, or it goes into an empty slot there.

        Arrays are layer x scenario x slot of hot x cool node x slot there.
        """
        line = np.arange(len(row))
        own, theirs = self.slot[row, hot], self.slot[row[:, None], cool_LK]
        step = self.rows[row, :, hot][:, :, :, None, None]
        step = step - self.rows[row[:, None], :, cool_LK].transpose(0, 2, 1, 3)[:, :, None]
        top = level[line, :, hot][:, :, None, None, None]
        cold = level[line[:, None], :, cool_LK].transpose(0, 2, 1)[:, :, None, :, None]
        pace_1, pace_K = (
            self._pace[hot][:, None, None, None, None],
            self._pace[cool_LK][:, None, None, :, None],
        )
        fall = (self._power(top, row) - self._power(top - step / pace_1, row)) * pace_1
        fall += (self._power(cold, row) - self._power(cold + step / pace_K, row)) * pace_K
        gain = (fall * self._weight_C1[:, :, None, None]).sum(1)
        same = (own[:, :, None, None] == theirs[:, None]) & (own != FREE)[:, :, None, None]
        barred = same.any(3)[..., None] | same.any(1)[:, None] | (own == FREE)[:, :, None, None]
        barred |= ((cool_LK == hot[:, None])[:, :, None] | ~self._usable[cool_LK])[:, None]
        if self._spans is not None:
            barred |= self._parted(self._spans, row, hot, cool_LK)
        (give, near, take), best = _argmax(np.where(barred, -np.inf, gain))
        cool = cool_LK[line, near]
        moves = np.where(self.slot[row, cool, take] == FREE, 1, 2)
        return SlotExchange(row, best, moves, np.ones(len(row), dtype=bool), hot, give, cool, take)

    def _parted(self, spans: DomainSpans, row: Ints, hot: Ints, cool_LK: Ints) -> Flags:
        """Trades that would leave an expert in too few domains: layer x slot of hot x cool node x slot there."""
        own, theirs = self.slot[row, hot][:, :, None], self.slot[row[:, None], cool_LK]
        (at, from_1, to_1K) = row[:, None, None], hot[:, None, None], cool_LK[:, None, :]
        near = spans.domain[hot][:, None] == spans.domain[cool_LK]
        goes = near[:, None] | spans.helps(at, to_1K, own) | ~spans.needed(at, from_1, own)
        comes = spans.helps(at, from_1, theirs) | ~spans.needed(at, cool_LK[:, :, None], theirs)
        comes |= near[:, :, None] | (theirs == FREE)
        parted: Flags = ~goes[..., None] | ~comes[:, None]
        return parted

    def _attempt(self, made: SlotExchange) -> Flags:
        """Makes the exchanges, undoes those that do not help. Flags those kept."""
        row = made.row
        arrays = [self.slot, self.rows, self.level, self._copies]
        arrays += [] if self._spans is None else [self._spans.held, self._spans.span]
        saved = [array[row] for array in arrays]
        before = self.norm(row)
        own, theirs = self.slot[row, made.hot, made.give], self.slot[row, made.cool, made.take]
        self._put(row, made.cool, made.take, own)
        back = made.select(made.trade)
        self._put(back.row, back.hot, back.give, theirs[made.trade])
        for expert in (theirs, own, self._movable(row, made.hot)):
            self._pour(row, expert)
        kept = self.norm(row) < before - _ENOUGH * len(self._pace)
        for array, old in zip(arrays, saved, strict=True):
            array[row[~kept]] = old[~kept]
        return kept

    def _put(self, row: Ints, node: Ints, place: Ints, expert: Ints) -> None:
        """Another expert in a slot, without traffic yet."""
        old = self.slot[row, node, place]
        self._copies[row[old != FREE], old[old != FREE]] -= 1
        self._copies[row[expert != FREE], expert[expert != FREE]] += 1
        if self._spans is not None:
            self._spans.replace(row, node, old, expert)
        self.level[row, :, node] -= self.rows[row, :, node, place] / self._pace[node][:, None]
        self.slot[row, node, place] = expert
        self.rows[row, :, node, place] = 0.0

    def _movable(self, row: Ints, node: Ints) -> Ints:
        """The replicated expert with most traffic on `node`, FREE where there is none."""
        own = self.slot[row, node]
        rows = (self.rows[row, :, node] * self._weight_C1).sum(1)
        rows = np.where((own != FREE) & (self._copies[row[:, None], np.maximum(own, 0)] > 1), rows, -1.0)
        pick, line = rows.argmax(1), np.arange(len(row))
        return np.where(rows[line, pick] >= 0, own[line, pick], FREE)

    def _pour(self, row: Ints, expert_L: Ints) -> None:
        """Water-fills one expert per layer over its replicas, for every scenario, the others as they are."""
        held = (self.slot[row] == expert_L[:, None, None]) & (expert_L != FREE)[:, None, None]
        index, node = np.nonzero(held.any(2))
        layer, place = row[index], held[index, node].argmax(1)
        base = np.full((len(row), len(self._weight_C1), len(self._pace)), np.inf)
        old = self.rows[layer, :, node, place]
        base[index, :, node] = self.level[layer, :, node] - old / self._pace[node][:, None]
        amount = self._load[row, :, np.maximum(expert_L, 0)][:, :, None]
        part = _fill(base, amount, self._pace)[index, :, node]
        self.rows[layer, :, node, place] = part
        self.level[layer, :, node] += (part - old) / self._pace[node][:, None]


def _argmax(gain: Floats) -> tuple[tuple[NDArray[np.intp], ...], Floats]:
    """Indices and value of the largest entry of each layer."""
    flat = gain.reshape(len(gain), -1)
    pick = flat.argmax(1)
    return np.unravel_index(pick, gain.shape[1:]), flat[np.arange(len(flat)), pick]


def _affordable(hopeful: Flags, found: SlotExchange, left: int) -> Flags:
    """The layers with the largest gain per move, as many as `left` moves pay for."""
    if found.moves[hopeful].sum() <= left:
        return hopeful
    order = np.argsort(np.where(hopeful, -found.gain / found.moves, np.inf), kind="stable")
    cost = np.cumsum(np.where(hopeful[order], found.moves[order], 0))
    chosen = np.zeros_like(hopeful)
    chosen[order[cost <= left]] = True
    return chosen


def _fill(base_LCN: Floats, amount_LC1: Floats, pace_N: Floats) -> Floats:
    """rows_LCN >= 0 summing to `amount` that level the speed-scaled loads from `base` (inf = not allowed)."""
    order = np.argsort(base_LCN, axis=2)
    base, speed = np.take_along_axis(base_LCN, order, 2), pace_N[order]
    finite = np.isfinite(base)
    total = np.cumsum(np.where(finite, speed, 0.0), 2)
    height = (amount_LC1 + np.cumsum(np.where(finite, base, 0.0) * speed, 2)) / np.maximum(total, 1e-300)
    wet = np.maximum((height > base).sum(2, keepdims=True) - 1, 0)
    surface = np.take_along_axis(height, wet, 2)
    part: Floats = np.where(np.isfinite(base_LCN), np.maximum(surface - base_LCN, 0.0) * pace_N, 0.0)
    return part
