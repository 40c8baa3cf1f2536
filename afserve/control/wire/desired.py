"""What should run: models by name, each with its source, how many nodes of each role, and where its experts stand.

A value. Beside it stands what is observed (`members.py`); `membership/membership.py` turns the difference into effects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from afserve.config import SAMPLES, EngineConfig, ModelSource
from afserve.errors import ConfigError
from afserve.member import MOST_GATEWAYS, MOST_NODES, AttentionPhase, NodeId, Role
from afserve.placement.placement import Placement

SILENCE_SECONDS = 1.0
MOST_HEARTBEATS = 900  # per second of all nodes: more would keep the controller busy with them


def shortest_silence(nodes: int) -> float:
    """Seconds in which each of `nodes` can say three heartbeats. Example: 300 nodes 1 s, 2,000 nodes 6.7 s."""
    return 3 * nodes / MOST_HEARTBEATS


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model. No expert nodes means colocated: every attention node holds all experts.

    `placement` is the one that expert nodes are to be started with; its epoch is the version that was decided last.
    With a `trace_folder` every node writes its part of a trace there at its end; with `trace_sent` nodes, which may be
    on other hosts, send what they draw to the controller, which does. `verify` says how copies of the checkpoint are
    compared. A node that owes its peers work and says nothing for `silence` seconds is lost.
    `most_attention` is how many attention nodes expert nodes keep mailboxes for. `phases` has the attention nodes that
    do not do both, by index.
    `log_level` and `log_format` are how attention and expert nodes log, and `otlp_endpoint` is where they send spans.
    """

    source: ModelSource
    engine: EngineConfig
    counts: Mapping[Role, int]
    fingerprint: str
    placement: Placement
    transport: str = "shm"
    trace_folder: str = ""
    trace_sent: bool = False
    log_level: str = "warning"
    log_format: str = "text"
    otlp_endpoint: str = ""
    verify: str = SAMPLES
    silence: float = SILENCE_SECONDS
    most_attention: int = 0
    phases: Mapping[int, AttentionPhase] = field(default_factory=dict)

    def count(self, role: Role) -> int:
        return self.counts.get(role, 0)

    def most(self, role: Role) -> int:
        """How many nodes of a role there may ever be."""
        if role is Role.ATTENTION and not self.colocated:
            return max(self.most_attention, self.count(role))
        if role is Role.EXPERT:
            return min(MOST_NODES, self.placement.experts)
        return MOST_GATEWAYS if role is Role.GATEWAY else MOST_NODES

    @property
    def colocated(self) -> bool:
        return not self.count(Role.EXPERT)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The places of a run that nobody has left: attention nodes first, each role from 0."""
        return tuple(NodeId(role, index) for role in Role for index in range(self.count(role)))

    def wants(self, node: NodeId) -> bool:
        """Whether this is one of `nodes`."""
        return node.index < self.count(node.role)

    def scaled(self, role: Role, count: int) -> "Deployment":
        return replace(self, counts={**self.counts, role: count})

    def phase(self, index: int) -> AttentionPhase:
        """Of an attention node."""
        return self.phases.get(index, AttentionPhase.BOTH)

    def in_phase(self, index: int, phase: AttentionPhase) -> "Deployment":
        """With an attention node in another phase; BOTH also stands for a place that is not there."""
        phases = {other: now for other, now in self.phases.items() if other != index}
        if phase is not AttentionPhase.BOTH:
            phases[index] = phase
        return replace(self, phases=phases)


@dataclass(frozen=True, slots=True)
class Desired:
    """All models, by the name that clients call them. One is served today; nothing else here assumes it."""

    models: Mapping[str, Deployment]

    @property
    def only(self) -> Deployment:
        """The one model. Raises ConfigError where there are several."""
        if len(self.models) != 1:
            raise ConfigError(f"model: one is served, these are asked for: {', '.join(sorted(self.models))}")
        (deployment,) = self.models.values()
        return deployment

    def scaled(self, role: Role, count: int) -> "Desired":
        """The one model with another number of nodes of a role."""
        return Desired({name: self.only.scaled(role, count) for name in self.models})

    def in_phase(self, index: int, phase: AttentionPhase) -> "Desired":
        """The one model with an attention node in another phase."""
        return Desired({name: self.only.in_phase(index, phase) for name in self.models})
