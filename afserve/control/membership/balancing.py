"""Live placement: routing counts from heartbeats in, decisions out, carried through by the migration.

The slow loop beside serving. It remembers what each attention node has counted, feeds the differences to the
statistics, asks the rebalancer, and keeps the last decisions with their reasons. No sockets; times are passed in.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from afserve.control.membership.throttle import Breath
from afserve.control.migration import Crew, Migration, Outgoing, Route
from afserve.errors import ConfigError, ProtocolError
from afserve.placement.optimizer.problem import Nodes
from afserve.placement.placement import FREE, LayerPlacement, Placement
from afserve.placement.rebalancer import Decision, Rebalancer, Rules, imbalances
from afserve.placement.record import encode_header, encode_record
from afserve.placement.stats import DECODE, PREFILL, RoutedRows, RoutingStats


@dataclass(frozen=True, slots=True)
class BalanceRules:
    """`every` None: the rebalancer decides when; else it re-plans every so many seconds. `act` False only counts."""

    act: bool = False
    every: float | None = None

    def rules(self) -> Rules:
        if self.every is None:
            return Rules()
        return Rules(interval_s=self.every, forced=True, least_gain=0.0)


class Recorder:
    """Counts since `start`, as the documented bytes of a routing recording."""

    def __init__(self, model: str, layers: int, experts: int) -> None:
        self._header = encode_header(model, layers, experts)
        self._records: list[bytes] | None = None
        self._began = 0.0

    @property
    def running(self) -> bool:
        return self._records is not None

    def start(self, now: float) -> None:
        self._records, self._began = [], now

    def stop(self) -> bytes:
        """What was recorded; recording ends."""
        data, self._records = self.dump(), None
        return data

    def dump(self) -> bytes:
        return self._header + b"".join(self._records or ())

    def note(self, now: float, kind: int, counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        if self._records is not None and counts.any():
            self._records.append(encode_record(now - self._began, kind, counts))


class Balancing:
    """Owns statistics, rebalancer and migration of one run."""

    def __init__(self, model: str, placement: Placement, crew: Crew, rules: BalanceRules) -> None:
        layers, experts = len(placement.layers), placement.experts
        self.stats = RoutingStats(layers, experts)
        self.recorder = Recorder(model, layers, experts)
        self.migration = Migration(placement, crew)
        self._rules = rules
        # One physical slot a node stays spare, so that there is always somewhere to fill.
        wide = placement.slots_per_node() - (1 if rules.act else 0)
        self._nodes = Nodes((wide,) * placement.nodes)
        self._rebalancer = Rebalancer(compact(placement, wide), self._nodes, rules.rules(), Breath())
        self._settled = True
        self._route: Route | None = None  # thought out together with the decision
        self.moves = 0

    def heard(self, rows: RoutedRows, now: float) -> None:
        """An attention node routed so many rows since it last said so. Raises ProtocolError on another model's."""
        ours = (self.stats.layers, self.stats.experts)
        if rows.decode_LE.shape != ours:
            raise ProtocolError(f"counts of {rows.decode_LE.shape} layers and experts, this model has {ours}")
        for kind, counts_LE in ((PREFILL, rows.prefill_LE), (DECODE, rows.decode_LE)):
            self.stats.merge(counts_LE, kind)
            self.recorder.note(now, kind, counts_LE)

    def routed(self) -> tuple[tuple[int, ...], ...]:
        """All rows so far, per MoE layer and expert."""
        return tuple(tuple(row) for row in self.stats.everything().tolist())

    def tick(self, now: float) -> list[Outgoing]:
        """All three steps of the slow loop at once."""
        stats = self.age(now)
        return [] if stats is None else self.act_on(self.think(stats, now), now)

    def age(self, now: float) -> RoutingStats | None:
        """Age the statistics; what to think about, if anything. Raises DeadlineError when a migration is stuck."""
        self.stats.tick(now)
        self.migration.check(now)
        if not self._rules.act or not self.migration.steady or not self.stats.load(0).any():
            return None
        self._settle()
        return deepcopy(self.stats)

    def think(self, stats: RoutingStats, now: float) -> Decision | None:
        """The only long step, up to a second for large models; may run in another thread, one at a time."""
        decision = self._rebalancer.decide(now, stats)
        if decision is not None and decision.placement is not None and self.migration.steady:
            self._route = self.migration.route(decision.placement)
        return decision

    def act_on(self, decision: Decision | None, now: float) -> list[Outgoing]:
        """Begin what was decided, unless something else has begun meanwhile."""
        if decision is None or decision.placement is None:
            return []
        if not self.migration.steady:
            self._settled = False
            return []
        return self._carry_out(decision.placement, now)

    def apply(self, placement: Placement, now: float) -> list[Outgoing]:
        """Go to a placement that somebody else decided. Raises ConfigError where it does not fit this run."""
        current = self.migration.placement
        placement.check_shape(layers=len(current.layers), experts=current.experts, nodes=current.nodes)
        widest = max(sum(e != FREE for e in row) for layer in placement.layers for row in layer.slots)
        if widest > min(self._nodes.slots):
            raise ConfigError(
                f"the placement puts {widest} experts of a layer on one node, there is room for "
                f"{min(self._nodes.slots)}; start with more --redundant-experts"
            )
        return self._carry_out(placement, now)

    def _carry_out(self, target: Placement, now: float) -> list[Outgoing]:
        self.moves += self.migration.placement.diff(target).moves
        self._settled = False
        route, self._route = self._route, None
        return self.migration.begin(target, now, route)

    def _settle(self) -> None:
        """Tell the rebalancer what is in force, once a migration is over."""
        if not self._settled:
            self._settled = True
            self._rebalancer.abandon(compact(self.migration.placement, self._nodes.slots[0]))

    def imbalance(self) -> tuple[float, ...]:
        """max / mean node load per layer, of what is in force, over the fastest window."""
        return tuple(imbalances(self.migration.placement, self.stats.load(0), self._nodes).tolist())

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
