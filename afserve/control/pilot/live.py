"""A running deployment as a pilot sees it: what nodes and gateways said last, added up by pool. It changes nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import fields

from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.roster import Member
from afserve.control.pilot.observed import Observed, PoolLoad
from afserve.control.pilot.sizes import PoolSizes
from afserve.control.wire.load_values import ClassCounts, GatewayLoad, LoadCounts, added, grown
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.member import MODEL_ROLES, AttentionPhase, NodeId, Role

_PREFILL, _DECODE, _EXPERTS = range(3)
_BUSY = "prefill_busy", "decode_busy", "experts_busy"
_SUMS = {each.name for each in fields(PoolLoad)} & {each.name for each in fields(LoadCounts)}
_POOLS = {"prefill": _PREFILL, "decode": _DECODE, "attention": _DECODE, "experts": _EXPERTS}


class LiveView:
    """Nodes that have gone keep their part of all sums. What anybody did before it was first seen is no part of them: a
    controller that takes the place of another meets gateways and nodes that have worked for long."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._lives: dict[object, tuple[float, int]] = {}  # seconds that each was busy, and its steps
        self._busy, self._steps = [0.0, 0.0, 0.0], 0
        self._begun: dict[object, GatewayLoad] = {}  # what each gateway said first

    def observe(self, at: float, members: Iterable[Member], loads: Mapping[object, GatewayLoad]) -> Observed:
        """`loads`: of each life of a gateway."""
        running = queued = 0.0
        for member in members:
            if isinstance(member.stats, AttentionStats | ExpertStats):
                self._note_work(member.id, self._pool(member.node), member.stats)
            if isinstance(member.stats, AttentionStats) and member.serving:
                if self._pool(member.node) == _DECODE:  # others read prompts still
                    running += member.stats.running
                queued += member.stats.queued_tokens
        for gateway, said in loads.items():
            self._begun.setdefault(gateway, said)
        load, begun = added(loads.values()), added(self._begun[gateway] for gateway in loads)
        sums = {name: getattr(load.total, name) - getattr(begun.total, name) for name in _SUMS}
        classes = {
            name: grown(now, begun.classes.get(name, ClassCounts())) for name, now in load.classes.items()
        }
        total = PoolLoad(**sums, **dict(zip(_BUSY, self._busy, strict=True)), decode_steps=self._steps)
        return Observed(at, self.sizes(), total, self.settled(), running, queued, classes)

    def _note_work(self, life: object, pool: int, stats: AttentionStats | ExpertStats) -> None:
        """What a node did in another pool before stays that pool's."""
        steps = stats.steps if isinstance(stats, AttentionStats) else 0
        before, stepped = self._lives.get(life, (stats.busy_seconds, steps))
        self._busy[pool] += max(stats.busy_seconds - before, 0.0)
        self._steps += max(steps - stepped, 0) * (pool == _DECODE)
        self._lives[life] = stats.busy_seconds, steps

    def _pool(self, node: NodeId) -> int:
        if node.role is Role.EXPERT:
            return _EXPERTS
        return _PREFILL if self._state.phase_of(node.index) is AttentionPhase.PREFILL else _DECODE

    def names(self, pool: str) -> list[str]:
        """Of the nodes that stay, of a pool by its name."""
        wanted = _POOLS[pool]
        staying = self._state.staying()
        return [str(node) for node in staying if node.role in MODEL_ROLES and self._pool(node) == wanted]

    def sizes(self) -> PoolSizes:
        """Nodes that serve and stay."""
        counts = [0, 0, 0]
        for role in (Role.ATTENTION, Role.EXPERT):
            for node in self._state.serving(role):
                counts[self._pool(node)] += node not in self._state.leaving
        return PoolSizes(*counts)

    def settled(self) -> bool:
        """Everyone who is wanted serves, and nobody leaves."""
        state = self._state
        if not state.settled or state.leaving or state.renewals.awaits_process:
            return False
        views = [state.members.role_view(role) for role in (Role.ATTENTION, Role.EXPERT)]
        return not any(view.vacancies or view.unready for view in views)
