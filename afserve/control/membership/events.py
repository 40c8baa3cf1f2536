"""What the membership is told, and what it wants done: plain values, in and out.

A node that comes back is another member: same node id, next generation. Whatever an earlier life still says is dropped,
and nothing is ever sent to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from afserve.control.membership.silence import HostLoad
from afserve.control.wire.values import Assigned, FromNode, Register, ToNode, Unheard
from afserve.errors import AfserveError
from afserve.member import AttentionPhase, Life, NodeId, Role
from afserve.placement.placement import Placement
from afserve.placement.recovery import Barred

if TYPE_CHECKING:
    from afserve.control.membership.migration import PlacementRoute


# ---- events


@dataclass(frozen=True, slots=True)
class Begun:
    """The run begins: nobody is there yet."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another controller ran this until now, and everyone served. Those who are still there will say so."""


@dataclass(frozen=True, slots=True)
class Rejoined:
    """Somebody who has a place already opened a stream: the `register` says with its `standing` what it is."""

    connection: int
    register: Register


@dataclass(frozen=True, slots=True)
class Joined:
    """Somebody opened a stream and said who it is. `connection` names the stream until it is admitted or refused."""

    connection: int
    register: Register


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A stream ended before it was admitted or refused."""

    connection: int


@dataclass(frozen=True, slots=True)
class Said:
    """A member said something."""

    member: Life
    value: FromNode


@dataclass(frozen=True, slots=True)
class Left:
    """A member's stream ended."""

    member: Life
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of a node ended, as whoever started it saw."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; several times a second. `load` is what the controller knows of itself and its host."""

    load: HostLoad = field(default_factory=HostLoad)


@dataclass(frozen=True, slots=True)
class Scale:
    """Another number of nodes of a role is wanted, or of attention nodes in one phase."""

    role: Role
    count: int
    phase: AttentionPhase | None = None


@dataclass(frozen=True, slots=True)
class ChangePhase:
    """An attention node is in this phase from now on. What runs on it ends there."""

    node: NodeId
    phase: AttentionPhase


@dataclass(frozen=True, slots=True)
class DrainNode:
    """This node is to go, and one fewer of its role is wanted."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class RestartNodes:
    """These nodes are to get new processes, one after another, each once the one before serves."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """This node is to go, and one of this role to start where it was."""

    node: NodeId
    role: Role


@dataclass(frozen=True, slots=True)
class Broken:
    """The process of this node was broken on purpose: what comes of it does not count against its place."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Waited:
    """The gateway in the controller's own process has requests at an attention node that says nothing."""

    said: Unheard


@dataclass(frozen=True, slots=True)
class Place:
    """Go to another placement. `nodes` are the expert nodes that it was thought out for, where they changed.

    `route` saves thinking out the way there again. `urgent` where rows wait for experts that nobody holds.
    """

    placement: Placement
    nodes: frozenset[int] | None = None
    route: "PlacementRoute | None" = None
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """What the controller's own copy of the checkpoint is: names of things, each with a digest."""

    things: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DrainAll:
    """Take nothing new, finish what runs."""


Wish = Scale | DrainNode | RestartNodes | ChangeRole | ChangePhase | Place
Event = (
    Begun
    | TakenOver
    | Rejoined
    | Joined
    | Withdrawn
    | Said
    | Left
    | Exited
    | Ticked
    | Wish
    | Broken
    | Waited
    | Known
    | DrainAll
)


# ---- effects


@dataclass(frozen=True, slots=True)
class Admit:
    """The stream `connection` belongs to `member` from now on. One that is back knows what it was `assigned`."""

    connection: int
    member: Life
    assigned: Assigned | None


@dataclass(frozen=True, slots=True)
class Refuse:
    connection: int
    error: AfserveError


@dataclass(frozen=True, slots=True)
class Tell:
    member: Life
    value: ToNode


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process that takes this place; where somebody else starts it, do nothing.

    `instead` of a node that has gone for it: on its host and device, and once nothing is left of its process.
    """

    node: NodeId
    instead: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End this member's stream, with the reason; its process goes by itself when its stream ends."""

    member: Life
    error: AfserveError


@dataclass(frozen=True, slots=True)
class Replan:
    """Think out where experts stand when these expert nodes hold them; the answer is `Place` with the same `nodes`.

    `lost` are those that hold experts by the placement in force and are gone. `barred`: who cannot read an expert.
    """

    nodes: frozenset[int]
    lost: frozenset[int] = frozenset()
    barred: Barred = field(default_factory=dict)


class Happening(StrEnum):
    """What people and metrics are told of."""

    LOST = "lost"
    FAILING = "keeps failing"
    RETURNED = "returned"
    RELOADED = "loaded experts"
    COVERED = "made up for"
    UNREAD = "cannot read experts"


class Cause(StrEnum):
    """What a loss was noticed by."""

    ENDED = "ended"  # its stream ended, as that of a process that is gone
    SILENT = "silent"
    SLOW = "slow"
    FAILED = "failed"  # it said so
    REFUSED = "refused"  # it said what no node of this run says, or not in time


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that a running deployment went through: who, in which life, why, and what was done.

    `seconds`: how long it took, where that is known. `cause` of a loss, `bytes` of weights that were read.
    """

    what: Happening
    who: NodeId
    why: str
    seconds: float = 0.0
    generation: int = 0
    cause: Cause | None = None
    did: str = ""
    bytes: int = 0

    def __str__(self) -> str:
        after = f" after {self.seconds:.2f} s" if self.seconds else ""
        cause = f" ({self.cause})" if self.cause else ""
        return f"{self.who} {self.what}{cause}{after}: {self.why}" + (f"; {self.did}" if self.did else "")


@dataclass(frozen=True, slots=True)
class Settled:
    """Everyone who is wanted serves; said once."""


@dataclass(frozen=True, slots=True)
class AllDrained:
    """No attention node and no gateway has a request left."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run cannot go on; said once, with the first reason."""

    error: AfserveError


Effect = Admit | Refuse | Tell | Start | Dismiss | Replan | Incident | Settled | AllDrained | EndRun
