"""The cluster as the controller sees it, for those who look: nodes, incidents, balance. Values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from afserve.engine.stats import Stats
from afserve.member import Role


@dataclass(frozen=True, slots=True)
class NodeView:
    """One member as the controller sees it. Ages and times in seconds; a gateway has no `stats`. `phase` is an
    attention node's, empty for the others; `isa` is the instruction set of a node's kernels on a CPU."""

    name: str
    role: str
    state: str
    pid: int
    heartbeat_age: float
    resident_bytes: int
    stats: Stats | None
    phase: str = ""
    isa: str = ""


@dataclass(frozen=True, slots=True)
class IncidentView:
    """What happened to a node, in this life of it, `at` which time (Unix seconds), why, and what was done.

    `seconds`: how long it took. `stall`: how long work that was under way there stood still: rows of an expert node
    on average, requests of an attention node at most. Zero where it is not known, or nothing waited.
    """

    at: float
    what: str
    node: str
    role: str
    generation: int = 0
    cause: str = ""
    why: str = ""
    did: str = ""
    seconds: float = 0.0
    stall: float = 0.0

    def __str__(self) -> str:
        """Without the time, which readers draw in their own zone."""
        cause = f" ({self.cause})" if self.cause else ""
        after = f" after {self.seconds * 1e3:,.0f} ms" if self.seconds else ""
        parts = [f"{self.node} {self.what}{cause}{after}: {self.why}", self.did]
        waited = "its rows waited" if self.role == Role.EXPERT else "its requests waited"
        parts.append(f"{waited} {self.stall * 1e3:,.0f} ms" if self.stall else "")
        return "; ".join(filter(None, parts))


IN_TIME = "in_time_"  # before a class of service, in a pilot's figures
COMPARED = "compared_"  # before ttft or tpot and from, to or measured: of the newest advice that was compared


@dataclass(frozen=True, slots=True)
class PilotView:
    """Of a pilot: whether it acts or only advises; its last advices and what came of them, in words, oldest first; how
    many nodes of each pool it advised last; how often it advised, was followed, was judged and was right; its figures:
    requests per second now and soon, by what factor its intervals reach to either side, which share of each class of
    service was in time lately, and what was expected and measured of the newest advice that was compared."""

    mode: str
    advices: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    advised: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """`balance` is max / mean load of the expert nodes per MoE layer; `decisions` are in words, oldest first.

    `routed[l][e]` are rows routed per MoE layer and expert since the start, over all attention nodes. `incidents` are
    the last ones, oldest first; `lost` counts nodes by role and cause, `wanted` those that there should be by role,
    `stalled` has seconds by cause. Of the gateway that is asked: requests that wait for an attention node, and those
    that went on at another one, by why; `stalled["moved"]` is how long these had no token. `absent` says of
    each node that is gone why, `refusing` why this gateway refuses new requests, where it does;
    `refused` counts those that it refused because they would have been too late, by reason.
    """

    epoch: int
    nodes: tuple[NodeView, ...]
    picked: Mapping[str, str] = field(default_factory=dict)
    balance: tuple[float, ...] = ()
    decisions: tuple[str, ...] = ()
    moves: int = 0
    routed: tuple[tuple[int, ...], ...] = ()
    waiting: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)
    incidents: tuple[IncidentView, ...] = ()
    lost: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reloaded_bytes: int = 0
    resent_rows: int = 0
    stalled: Mapping[str, float] = field(default_factory=dict)
    wanted: Mapping[str, int] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    refusing: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)
    pilot: PilotView | None = None
