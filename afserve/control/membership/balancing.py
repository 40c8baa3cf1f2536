"""Live placement: routing counts in, decisions out, as events that the membership carries through.

The slow loop beside serving. It feeds what attention nodes have routed to the statistics, asks the rebalancer, and
keeps the last decisions with their reasons. It reads the migration and never steers it. No sockets; times are passed
in.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from afserve.control.membership.events import Place
from afserve.control.membership.migration import Migration, PlacementRoute
from afserve.errors import ConfigError, ProtocolError
from afserve.placement.optimizer.problem import Nodes
from afserve.placement.placement import FREE, LayerPlacement, Placement
from afserve.placement.rebalance.rebalancer import Decision, Rebalancer, RebalanceRules, imbalances
from afserve.placement.rebalance.record import encode_header, encode_record
from afserve.placement.rebalance.stats import DECODE, PREFILL, RoutedRows, RoutingStats
from afserve.placement.recovery import Barred, in_parts, recovered

log = logging.getLogger("afserve.control")
AT_ONCE = 128  # of a large model some 6 GB, seconds of reading; nano's are one part
_WORK_S, _PAUSE_S = 0.001, 0.004  # of a thread beside serving


@dataclass(frozen=True, slots=True)
class BalanceRules:
    """`every` None: the rebalancer decides when; else it re-plans every so many seconds. `act` False only counts.

    `copies` of every expert stand on different nodes, on different `hosts` (one number per expert node; none: all
    alike) where there is room. `spare` slots per node and layer stay empty until a node is lost. Then what nobody holds
    is loaded and served again in parts, biggest load first: `at_once` experts for each of the others.
    """

    act: bool = False
    every: float | None = None
    copies: int = 1
    spare: int = 0
    hosts: tuple[int, ...] = ()
    at_once: int = AT_ONCE

    def rules(self) -> RebalanceRules:
        if self.every is None:
            return RebalanceRules(copies=self.copies)
        return RebalanceRules(interval_s=self.every, forced=True, least_gain=0.0, copies=self.copies)

    def nodes(self, count: int, slots: int, dead: frozenset[int] = frozenset()) -> Nodes:
        """Expert nodes as the optimizer sees them. A node that came later is on a host of its own."""
        known = self.hosts[:count]
        later = range(max(known, default=-1) + 1, max(known, default=-1) + 1 + count - len(known))
        return Nodes((slots,) * count, dead=dead, host=(*known, *later) if known else ())


class RoutingRecorder:
    """Counts since `start`, as the documented bytes of a routing recording."""

    def __init__(self, model: str, layers: int, experts: int) -> None:
        self._header = encode_header(model, layers, experts)
        self._records: list[bytes] | None = None
        self._began = 0.0

    @property
    def running(self) -> bool:
        return self._records is not None

    def start_recording(self, now: float) -> None:
        self._records, self._began = [], now

    def stop_recording(self) -> bytes:
        """What was recorded; recording ends."""
        data, self._records = self.dump(), None
        return data

    def dump(self) -> bytes:
        return self._header + b"".join(self._records or ())

    def note_counts(
        self, now: float, kind: int, counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> None:
        if self._records is not None and counts.any():
            self._records.append(encode_record(now - self._began, kind, counts))


class Throttle:
    """Called between steps of one thread's work: pauses once the thread has used a millisecond of processor time.

    So a long thought takes a fifth of one core, and no token waits for more than a step of it. Without pauses a
    thought of 20 ms slowed every token of 100 ms (bench/LOG.md).
    """

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self) -> None:
        used = time.thread_time() - self._since
        if not 0 <= used < _WORK_S:  # below 0: another thread than last time
            time.sleep(_PAUSE_S)
            self._since = time.thread_time()


class Balancing:
    """Owns statistics and rebalancer of one model; `migration` says what is in force.

    `holders` are the expert nodes that may hold experts now; by default those that serve. What the rebalancer is asked
    about is made anew from these two, so that it never knows other nodes than there are.
    """

    def __init__(
        self,
        model: str,
        migration: Migration,
        rules: BalanceRules,
        holders: Callable[[], frozenset[int]] | None = None,
    ) -> None:
        placement = migration.placement
        layers, experts = len(placement.layers), placement.experts
        self.stats = RoutingStats(layers, experts)
        self.recorder = RoutingRecorder(model, layers, experts)
        self.moves = 0
        self._migration = migration
        self._rules = rules
        # One physical slot a node is never planned with, so that there is always somewhere to fill.
        self._widest = placement.slots_per_node() - (1 if rules.act else 0)
        self._wide = self._widest - rules.spare
        nodes = rules.nodes(placement.nodes, self._wide)
        self._rebalancer = Rebalancer(compact(placement, self._wide), nodes, rules.rules(), Throttle())
        self._holders = holders or migration.serving_experts
        self._known: Placement | None = None  # what the rebalancer was told is in force
        self._thinking = threading.Lock()  # two threads may think: about balance, and about other nodes
        self._route: PlacementRoute | None = None  # thought out together with the decision

    def count_rows(self, rows: RoutedRows, now: float) -> None:
        """An attention node routed so many rows since it last said so. Raises ProtocolError on another model's."""
        ours = (self.stats.layers, self.stats.experts)
        if rows.decode_LE.shape != ours:
            raise ProtocolError(f"counts of {rows.decode_LE.shape} layers and experts, this model has {ours}")
        for kind, counts_LE in ((PREFILL, rows.prefill_LE), (DECODE, rows.decode_LE)):
            self.stats.merge(counts_LE, kind)
            self.recorder.note_counts(now, kind, counts_LE)

    def routed(self) -> tuple[tuple[int, ...], ...]:
        """All rows so far, per MoE layer and expert."""
        return tuple(tuple(row) for row in self.stats.everything().tolist())

    def age(self, now: float) -> RoutingStats | None:
        """Age the statistics; what to think about, if anything: not while a node that holds experts is away."""
        self.stats.advance_windows(now)
        if not self._rules.act or not self._migration.steady or not self.stats.window_load(0).any():
            return None
        holders = self._holders()
        if self._thinking.locked() or not self._migration.holding <= holders:
            return None
        self._settle(holders)
        return deepcopy(self.stats)

    def think(self, stats: RoutingStats, now: float) -> Decision | None:
        """The only long step, up to a second for large models; may run in another thread, one at a time."""
        with self._thinking:
            decision = self._rebalancer.decide(now, stats)
        if decision is None or decision.placement is None or not self._migration.steady:
            return decision
        try:
            self._route = self._migration.plan_route(decision.placement)
        except (
            ConfigError
        ) as error:  # where every slot of a node holds something, as after a move that was given up
            log.info("the experts stay where they are: %s", error.message)
            self._known = None
            return None
        return decision

    def decided(self, decision: Decision | None) -> Place | None:
        """What was thought out, as an event, unless something else has begun meanwhile."""
        if decision is None or decision.placement is None:
            return None
        if not self._migration.steady:
            self._known = None
            return None
        return self._place(decision.placement)

    def asked(self, placement: Placement) -> Place:
        """A placement that somebody else decided. Raises ConfigError where it does not fit this run."""
        current = self._migration.placement
        placement.check_shape(layers=len(current.layers), experts=current.experts, nodes=current.nodes)
        widest = placement.most_held()
        if widest > self._wide:
            raise ConfigError(
                f"the placement puts {widest} experts of a layer on one node, there is room for {self._wide}; "
                "start with more --redundant-experts"
            )
        return self._place(placement)

    def plan_over(self, holders: frozenset[int], now: float) -> Place:
        """Where experts stand when these expert nodes hold them all. Takes as long as `think`.

        Spare slots are used where the others do not hold every expert as often as was asked for. Raises ConfigError
        where they have no room for all experts.
        """
        current = self._migration.placement
        wanted = current.experts * min(self._rules.copies, len(holders))
        wide = min(max(self._wide, -(-wanted // max(1, len(holders)))), self._widest)
        nodes = self._nodes(holders, current.nodes, wide)
        here = compact(current.with_nodes(len(nodes)), wide)
        with self._thinking:
            decision = self._rebalancer.replace_nodes(nodes, here, now, self.stats)
        if decision.placement is None:
            raise ConfigError(
                f"expert nodes {sorted(holders)} have no room for all experts: {decision.reason}"
            )
        return self._place(decision.placement, holders)

    def plan_without(
        self, lost: frozenset[int], holders: frozenset[int], now: float, barred: Barred | None = None
    ) -> Place | None:
        """Where experts go that lived on lost nodes only, in which parts; all others stay. None where nobody has room.

        `holders` are the expert nodes that serve, `barred` those that cannot read an expert. It thinks about lost
        experts only, so it takes milliseconds.
        """
        count = max(self._migration.placement.nodes, max(holders, default=-1) + 1)
        current = self._migration.placement.with_nodes(count)
        others = frozenset(range(count)) - holders  # who has left, or leaves, takes nothing over either
        found = recovered(current, lost | others, self._widest, self.stats.window_load(0), barred)
        if len(found.homeless) and not found.order:
            return None
        targets = in_parts(current, found, max(1, self._rules.at_once * len(holders)))
        self._route = self._migration.route_by(targets)
        return replace(self._place(found.placement, holders), urgent=bool(found.order))

    def _nodes(self, holders: frozenset[int], known: int, wide: int) -> Nodes:
        """All that there ever were, of which only `holders` may hold experts, each in `wide` slots."""
        count = max(known, max(holders, default=-1) + 1)
        return self._rules.nodes(count, wide, frozenset(range(count)) - holders)

    def _place(self, target: Placement, holders: frozenset[int] | None = None) -> Place:
        nodes = max(target.nodes, self._migration.placement.nodes)
        self.moves += self._migration.placement.with_nodes(nodes).diff(target.with_nodes(nodes)).moves
        self._known = None
        route, self._route = self._route, None
        return Place(target, holders, route)

    def _settle(self, holders: frozenset[int]) -> None:
        """Tell the rebalancer what is in force, and who may hold experts, where either is another than it knows."""
        in_force = self._migration.placement
        # After a loss spare slots may be used: what stands there is no reason to think that there is no room for it.
        wide = min(max(self._wide, in_force.most_held()), self._widest)
        nodes = self._nodes(holders, in_force.nodes, wide)
        if in_force is not self._known or nodes != self._rebalancer.nodes:
            self._known, self._rebalancer.nodes = in_force, nodes
            self._rebalancer.settle(compact(in_force.with_nodes(len(nodes)), wide))

    def imbalance(self) -> tuple[float, ...]:
        """max / mean node load per layer, of what is in force, over the fastest window; 1 where nobody holds any."""
        placement = self._migration.placement
        holders = self._holders() or self._migration.holding
        if not holders:
            return (1.0,) * len(placement.layers)
        nodes = self._nodes(holders, placement.nodes, self._wide)
        placement = placement.with_nodes(len(nodes))
        return tuple(imbalances(placement, self.stats.window_load(0), nodes).tolist())

    @property
    def decisions(self) -> Sequence[Decision]:
        """The last ones that changed something, and the newest of all; oldest first."""
        kept = list(self._rebalancer.decisions)
        return [d for d in kept[:-1] if d.placement is not None][-5:] + kept[-1:]


def compact(placement: Placement, slots: int) -> Placement:
    """The same replicas in the first `slots` slots of each node, as the optimizer wants to see them."""

    def row(held: Sequence[int], share: Sequence[float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        kept = [(e, s) for e, s in zip(held, share, strict=True) if e != FREE]
        kept += [(FREE, 0.0)] * (slots - len(kept))
        return tuple(e for e, _ in kept), tuple(s for _, s in kept)

    layers = []
    for layer in placement.layers:
        rows = [row(held, share) for held, share in zip(layer.slots, layer.share, strict=True)]
        layers.append(LayerPlacement(tuple(r[0] for r in rows), tuple(r[1] for r in rows)))
    return Placement(placement.epoch, placement.nodes, placement.experts, tuple(layers))
