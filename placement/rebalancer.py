"""When to act on the routing counts, and how: values in, a decision and its reason out. No clock, no migration.

Three thresholds keep it calm. What stands must be clearly out of balance on the fastest window, beyond what so
few rows would show by chance; that must hold for `patience` checks in a row; and after acting it rests. A shift
of shares moves no weights and is tried first; weights move where that is not enough and the gain pays for the
transfer. A lost node is answered at once.
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from afserve.placement.balance import balance
from afserve.placement.plan import Placement
from afserve.placement.problem import Floats, MovePrice, Nodes, Problem, scenarios
from afserve.placement.split import node_load
from afserve.placement.stats import RoutingStats


class Action(StrEnum):
    STAY = "stay"
    SHARES = "shares"
    MOVE = "move"
    RESCUE = "rescue"


@dataclass(frozen=True, slots=True)
class Rules:
    """enter: the max/mean that starts it. least_gain: the fraction that new shares or moves must save.

    interval_s: between checks. patience: bad checks in a row before it acts. rest_s: from one action to the next.
    """

    interval_s: float = 0.5
    enter: float = 1.08
    least_gain: float = 0.03
    patience: int = 2
    rest_s: float = 2.0
    moves_per_layer: int = 8
    burst: float = 4.0  # rows of one text come together: as noisy as a quarter of them would be
    price: MovePrice | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`placement` is None when nothing changes. Imbalances: mean over layers of max/mean, on the fastest window."""

    now: float
    action: Action
    reason: str
    before: float
    after: float
    moves: int = 0
    placement: Placement | None = None


class Rebalancer:
    """Owns the placement that is wanted, the streak of bad checks and the last decisions."""

    def __init__(self, placement: Placement, nodes: Nodes, rules: Rules | None = None) -> None:
        self.placement, self.nodes, self.rules = placement, nodes, rules or Rules()
        self.decisions: deque[Decision] = deque(maxlen=64)
        self._streak = 0
        self._next = self._rested = float("-inf")
        self._unsettled: int | None = None

    def settle(self, epoch: int) -> None:
        """Every attention node has acknowledged `epoch`: the next move may be decided."""
        if self._unsettled is not None and epoch >= self._unsettled:
            self._unsettled = None

    def lose(self, node: int, now: float, stats: RoutingStats) -> Decision:
        """A node died: its experts go elsewhere at once, whatever is under way. STAY means nothing can hold them."""
        self.nodes = replace(self.nodes, dead=self.nodes.dead | {node})
        return self._answer(now, stats, Action.RESCUE, f"node {node} is lost")

    def regain(self, node: int) -> None:
        """A lost node is back, empty. The next decision may use it."""
        self.nodes = replace(self.nodes, dead=self.nodes.dead - {node})

    def decide(self, now: float, stats: RoutingStats) -> Decision | None:
        """None between checks and while a move is under way; else a decision, most often to stay."""
        if now < self._next or self._unsettled is not None:
            return None
        self._next = now + self.rules.interval_s
        fast = stats.load(0)
        before, limit = imbalance(self.placement, fast, self.nodes), self._limit(fast)
        if before <= limit:
            self._streak = 0
            return self._stay(now, before, f"balanced: {before:.3f} is within {limit:.3f}")
        self._streak += 1
        if self._streak < self.rules.patience:
            return self._stay(
                now,
                before,
                f"{before:.3f} is over {limit:.3f}, check {self._streak} of {self.rules.patience}",
            )
        if now < self._rested:
            return self._stay(
                now, before, f"{before:.3f} is over {limit:.3f}, resting until {self._rested:.1f} s"
            )
        return self._answer(now, stats, Action.MOVE, f"{before:.3f} is over {limit:.3f}")

    def _limit(self, load_LE: Floats) -> float:
        """The imbalance that is let be: `enter`, and what the fullest of N nodes shows by chance with so few rows."""
        live = len(self.nodes) - len(self.nodes.dead)
        rows = load_LE.sum(1) / live / self.rules.burst
        chance = np.sqrt(2 * np.log(max(live, 2)) / np.maximum(rows, 1e-9))
        return self.rules.enter + float(chance.mean())

    def _answer(self, now: float, stats: RoutingStats, action: Action, why: str) -> Decision:
        fast = stats.load(0)
        before = imbalance(self.placement, fast, self.nodes)
        room, experts = int(self.nodes.room().clip(max=self.placement.experts).sum()), self.placement.experts
        if room < experts:
            return self._stay(
                now, before, f"{why}, and the live nodes' {room} slots cannot hold {experts} experts"
            )
        shares = self._reshared(self.placement, fast)
        after, forced = imbalance(shares, fast, self.nodes), self.placement.diff(shares).moves
        reshare = Decision(
            now, Action.SHARES, f"{why}: new shares reach {after:.3f}", before, after, forced, shares
        )
        if action is Action.RESCUE:
            reason = f"{why}: {forced} experts are filled elsewhere"
            return self._take(replace(reshare, action=action, reason=reason))
        if after <= self._limit(fast):
            return self._take(reshare)
        moved = self._moved(stats, fast)
        moves, best = self.placement.diff(moved).moves, imbalance(moved, fast, self.nodes)
        if moves and best <= after * (1 - self.rules.least_gain):
            return self._take(
                Decision(now, action, f"{why}: {moves} moves reach {best:.3f}", before, best, moves, moved)
            )
        if after <= before * (1 - self.rules.least_gain):
            return self._take(reshare)
        return self._stay(now, before, f"{why}, but no plan gains {self.rules.least_gain:.0%}")

    def _reshared(self, placement: Placement, load_LE: Floats) -> Placement:
        """The same slots (but for lost experts) with the shares that suit the load of now."""
        asked = Problem(load_LE[None], self.nodes, current=placement, moves=0)
        return balance(asked).placement(self.placement.epoch + 1)

    def _moved(self, stats: RoutingStats, fast: Floats) -> Placement:
        """Slots for what is now and what was: mostly the fastest window, so that a switch of domain is followed."""
        loads = [stats.load(window) for window in range(len(stats.half_lives))]
        loads = [fast, *(load for load in loads[1:] if load.sum() > 0)]
        rest = len(loads) - 1
        weights = (1.0,) if rest == 0 else (0.8, *([0.2 / rest] * rest))
        budget, price = self.rules.moves_per_layer * len(fast), self.rules.price
        asked = Problem(scenarios(loads), self.nodes, weights, self.placement, budget, price, prior=0.0)
        return self._reshared(balance(asked).placement(), fast)

    def _stay(self, now: float, before: float, reason: str) -> Decision:
        decision = Decision(now, Action.STAY, reason, before, before)
        self.decisions.append(decision)
        return decision

    def _take(self, decision: Decision) -> Decision:
        assert decision.placement is not None
        self.placement = decision.placement
        self._streak, self._rested = 0, decision.now + self.rules.rest_s
        self._unsettled = decision.placement.epoch
        self.decisions.append(decision)
        return decision


def imbalance(placement: Placement, load_LE: Floats, nodes: Nodes) -> float:
    """Mean over layers of max/mean node load under the placement's own shares; 1 without rows."""
    return float(np.mean(imbalances(placement, load_LE, nodes)))


def imbalances(placement: Placement, load_LE: Floats, nodes: Nodes) -> Floats:
    """max/mean per layer, loads divided by the nodes' speeds."""
    level_LN = node_load(placement.slot_array(), placement.share_array(), load_LE) / nodes.pace()
    live = np.flatnonzero(nodes.room() > 0)
    mean_L = load_LE.sum(1) / nodes.pace()[live].sum()
    ratio: Floats = np.where(mean_L > 0, level_LN.max(1) / np.where(mean_L > 0, mean_L, 1.0), 1.0)
    return ratio
