"""Decides when to change the placement, and how: routing counts in, a decision with its reason out.

Three rules keep it calm. The imbalance must be clearly larger than so few rows would show by chance; it must last for
`patience` checks in a row; and after each change there is a pause. It judges the newest rows first, then all rows since
the last change. It tries other shares first, since those move no weights. It moves experts where shares are not enough
and the gain pays for the transfer. The loss of a node is answered at once. It has no clock and migrates nothing.
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.problem import (
    Floats,
    MovePrice,
    Nodes,
    Problem,
    Throttle,
    scenarios,
    unthrottled,
)
from afserve.placement.optimizer.split import count_replicas, node_load
from afserve.placement.placement import Placement
from afserve.placement.rebalance.stats import RoutingStats


class Action(StrEnum):
    STAY = "stay"
    SHARES = "shares"
    MOVE = "move"
    RESCUE = "rescue"


@dataclass(frozen=True, slots=True)
class RebalanceRules:
    """enter: the max/mean that starts it. least_gain: the fraction that new shares or moves must save.

    interval_s: between checks. patience: bad checks in a row before it acts. rest_s: from one action to the next.
    era_s: how long rows are gathered into one picture while nothing changes. forced: re-plan at every check,
    whatever the balance. copies: nodes that hold each expert; where too few are left, as many as there is room for.
    """

    interval_s: float = 0.5
    enter: float = 1.08
    least_gain: float = 0.03
    patience: int = 2
    rest_s: float = 2.0
    moves_per_layer: int = 8
    era_s: float = 120.0
    burst: float = 4.0  # rows of one text come together: as noisy as a quarter of them would be
    price: MovePrice | None = None
    forced: bool = False
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """`placement` is None when nothing changes. `before` and `after`: mean over layers of max/mean."""

    now: float
    action: Action
    reason: str
    before: float
    after: float
    moves: int = 0
    placement: Placement | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """Some loads, how far the placement is from balancing them, and how far it may be."""

    name: str
    load_LE: Floats
    ratio: float
    limit: float


class Rebalancer:
    """Owns the placement that is wanted, the streak of bad checks and the last decisions."""

    def __init__(
        self,
        placement: Placement,
        nodes: Nodes,
        rules: RebalanceRules | None = None,
        throttle: Throttle = unthrottled,
    ) -> None:
        self.placement, self.nodes, self.rules = placement, nodes, rules or RebalanceRules()
        self._throttle = throttle
        self.decisions: deque[Decision] = deque(maxlen=64)
        self._streak = 0
        self._next = self._rested = float("-inf")
        self._unsettled = False
        self._epoch = placement.epoch  # the highest ever given out
        self._era: Floats | None = None  # all rows before this era began
        self._era_began = float("-inf")

    def settle(self, in_force: Placement) -> None:
        """A move was made, or given up: `in_force` is what every node truly holds, and the next one may be decided. It
        gets a new epoch."""
        self.placement, self._unsettled = in_force, False
        self._epoch = max(self._epoch, in_force.epoch)

    def replace_nodes(self, nodes: Nodes, in_force: Placement, now: float, stats: RoutingStats) -> Decision:
        """Other nodes are to hold the experts from now on: the way there, at once. STAY means there is no room."""
        self.nodes = nodes
        self.settle(in_force)
        why = f"{len(nodes) - len(nodes.dead)} nodes are to hold the experts"
        return self._answer(now, stats, self._view("now", stats.window_load(0)), Action.RESCUE, why)

    def decide(self, now: float, stats: RoutingStats) -> Decision | None:
        """None between checks and while a move is under way; else a decision, most often to stay."""
        if now < self._next or self._unsettled:
            return None
        self._next = now + self.rules.interval_s
        newest, seen = self._look(now, stats)
        if self.rules.forced:
            self._open_era(now, stats)
            why = f"asked to re-plan every {self.rules.interval_s:g} s, {newest.ratio:.3f} now"
            return self._answer(now, stats, newest, Action.MOVE, why)
        if seen.ratio <= seen.limit:
            self._streak = 0
            return self._stay(now, seen, f"balanced: {seen.ratio:.3f} is within {seen.limit:.3f}")
        self._streak += 1
        why = f"{seen.ratio:.3f} is over {seen.limit:.3f} {seen.name}"
        if self._streak < self.rules.patience:
            return self._stay(now, seen, f"{why}, check {self._streak} of {self.rules.patience}")
        if now < self._rested:
            return self._stay(now, seen, f"{why}, resting until {self._rested:.1f} s")
        if seen is newest:
            self._open_era(now, stats)
        return self._answer(now, stats, seen, Action.MOVE, why)

    def _look(self, now: float, stats: RoutingStats) -> tuple[_View, _View]:
        """The newest rows, and what to judge by: those if they are out of balance, else everything of this era.

        An era begins when the newest rows ask for another placement. It gathers more rows than the fastest window
        holds, so chance hides less and a smaller imbalance counts.
        """
        newest = self._view("in the newest rows", stats.window_load(0))
        if self._era is None or now - self._era_began > self.rules.era_s:
            self._open_era(now, stats)
        assert self._era is not None
        era = self._view("since the last change", np.maximum(stats.total_counts() - self._era, 0.0))
        return newest, newest if newest.ratio > newest.limit or era.limit >= newest.limit else era

    def _open_era(self, now: float, stats: RoutingStats) -> None:
        """What the fastest window still knows is the beginning of the new era."""
        self._era, self._era_began = stats.total_counts() - stats.window_load(0), now

    def _view(self, name: str, load_LE: Floats) -> _View:
        """The limit is `enter`, and what the fullest of N nodes shows by chance with so few rows."""
        live = len(self.nodes) - len(self.nodes.dead)
        rows = load_LE.sum(1) / live / self.rules.burst
        chance = float(np.sqrt(2 * np.log(max(live, 2)) / np.maximum(rows, 1e-9)).mean())
        ratio = imbalance(self.placement, load_LE, self.nodes)
        return _View(name, load_LE, ratio, self.rules.enter + chance)

    def _answer(self, now: float, stats: RoutingStats, seen: _View, action: Action, why: str) -> Decision:
        room, experts = (
            int(self.nodes.usable_slots().clip(max=self.placement.experts).sum()),
            self.placement.experts,
        )
        if room < experts:
            return self._stay(
                now, seen, f"{why}, and the live nodes' {room} slots cannot hold {experts} experts"
            )
        shares = self._reshared(self.placement, seen.load_LE)
        after, forced = imbalance(shares, seen.load_LE, self.nodes), self.placement.diff(shares).moves
        reason = f"{why}: new shares reach {after:.3f}"
        reshare = Decision(now, Action.SHARES, reason, seen.ratio, after, forced, shares)
        if action is Action.RESCUE:
            reason = f"{why}: {forced} experts are filled elsewhere"
            return self._take(replace(reshare, action=action, reason=reason))
        if after <= seen.limit and not self.rules.forced:
            return self._take(reshare)
        moved = self._moved(stats, seen.load_LE)
        moves, best = self.placement.diff(moved).moves, imbalance(moved, seen.load_LE, self.nodes)
        if moves and best <= after * (1 - self.rules.least_gain):
            reason = f"{why}: {moves} moves reach {best:.3f}"
            return self._take(Decision(now, action, reason, seen.ratio, best, moves, moved))
        if after <= seen.ratio * (1 - self.rules.least_gain):
            return self._take(reshare)
        return self._stay(now, seen, f"{why}, but no plan gains {self.rules.least_gain:.0%}")

    def _reshared(self, placement: Placement, load_LE: Floats) -> Placement:
        """The same slots (but for lost experts) with the shares that suit `load_LE`."""
        copies, protect = self._copies(load_LE)
        asked = Problem(load_LE[None], self.nodes, current=placement, moves=0, copies=copies, protect=protect)
        return balance(asked, self._throttle).placement(self._epoch + 1)

    def _moved(self, stats: RoutingStats, load_LE: Floats) -> Placement:
        """Slots for what was seen, and a little for everything else that the windows remember."""
        others = [stats.window_load(window) for window in range(len(stats.half_lives))]
        others = [load for load in others if load.sum() > 0]
        weights = (0.8, *([0.2 / len(others)] * len(others)))
        budget, price = self.rules.moves_per_layer * len(load_LE), self.rules.price
        loads = scenarios([load_LE, *others])
        copies, protect = self._copies(load_LE)
        asked = Problem(
            loads,
            self.nodes,
            weights,
            self.placement,
            budget,
            price,
            prior=0.0,
            copies=copies,
            protect=protect,
        )
        return self._reshared(balance(asked, self._throttle).placement(), load_LE)

    def _copies(self, load_LE: Floats) -> tuple[int, frozenset[tuple[int, int]]]:
        """(copies of every expert that there is room for, experts to be held twice where that is one).

        Those that are held twice already come first, then the hottest.
        """
        layers, experts = load_LE.shape
        each = np.arange(len(self.nodes))
        wanted = range(self.rules.copies, 1, -1)
        copies = next((c for c in wanted if self.nodes.holds(experts, c, each)), 1)
        room_N = self.nodes.usable_slots().clip(max=experts)
        room = int(room_N.sum()) - experts
        if copies > 1 or self.rules.copies == 1 or (room_N > 0).sum() < 2:
            return copies, frozenset()
        once_LE = count_replicas(self.placement.slot_array(), experts) < 2
        order_LK = np.lexsort((-load_LE, once_LE))[:, :room]
        return copies, frozenset((y, int(e)) for y in range(layers) for e in order_LK[y])

    def _stay(self, now: float, seen: _View, reason: str) -> Decision:
        decision = Decision(now, Action.STAY, reason, seen.ratio, seen.ratio)
        self.decisions.append(decision)
        return decision

    def _take(self, decision: Decision) -> Decision:
        assert decision.placement is not None
        self.placement, self._epoch = decision.placement, decision.placement.epoch
        self._streak, self._rested = 0, decision.now + self.rules.rest_s
        self._unsettled = True
        self.decisions.append(decision)
        return decision


def imbalance(placement: Placement, load_LE: Floats, nodes: Nodes) -> float:
    """Mean over layers of max/mean node load under the placement's own shares; 1 without rows."""
    return float(np.mean(imbalances(placement, load_LE, nodes)))


def imbalances(placement: Placement, load_LE: Floats, nodes: Nodes) -> Floats:
    """max/mean per layer, loads divided by the nodes' speeds; never below 1, were it by rounding."""
    level_LN = node_load(placement.slot_array(), placement.share_array(), load_LE) / nodes.pace()
    live = np.flatnonzero(nodes.usable_slots() > 0)
    mean_L = load_LE.sum(1) / nodes.pace()[live].sum()
    ratio: Floats = np.where(mean_L > 0, level_LN.max(1) / np.where(mean_L > 0, mean_L, 1.0), 1.0)
    return np.maximum(ratio, 1.0)
