"""What the controller and a node say to each other, as plain frozen values; how they travel is `messages.py`.

`Run` is what the controller is told to serve. Requests are numbers on this plane: the frontend hands them out.
Nothing here knows gRPC, torch or processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from afserve.config import EngineConfig, ModelSource
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import AfserveError

PROTOCOL = 1
ROLES = ("attention", "expert")


def node_name(role: str, index: int) -> str:
    return f"{role}-{index}"


@dataclass(frozen=True, slots=True)
class Run:
    """One thing to serve, by which nodes. No expert nodes means colocated; `placement` is JSON.

    With a `trace_folder` every node writes its part of a trace there at its end.
    """

    source: ModelSource
    engine: EngineConfig
    attention_nodes: int
    expert_nodes: int
    fingerprint: str
    placement: str
    transport: str = "shm"
    heartbeat_seconds: float = 1.0
    trace_folder: str = ""

    @property
    def members(self) -> tuple[str, ...]:
        attention = [node_name("attention", i) for i in range(self.attention_nodes)]
        return (*attention, *(node_name("expert", i) for i in range(self.expert_nodes)))

    def count(self, role: str) -> int:
        return self.attention_nodes if role == "attention" else self.expert_nodes


# ---- node to controller


@dataclass(frozen=True, slots=True)
class Register:
    """The first message of a stream. `index` None asks for any free place of the role."""

    role: str
    index: int | None
    pid: int
    host: str
    version: str
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`agreed` names every field both sides of the data plane must have in common."""

    address: str
    agreed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Progress:
    fraction: float
    what: str


@dataclass(frozen=True, slots=True)
class Ready:
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    resident_bytes: int
    stats: AttentionStats | ExpertStats


@dataclass(frozen=True, slots=True)
class Tokens:
    """All events of one step. Their `request_id` is the request's number, as text."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    request: int
    error: AfserveError


@dataclass(frozen=True, slots=True)
class Drained:
    """No request is left."""


@dataclass(frozen=True, slots=True)
class Filled:
    """An expert node holds everything that the placement `epoch` names on it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """An attention node routes by `epoch` and has nothing under way that was routed before."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The node cannot go on and is about to exit."""

    error: AfserveError


# ---- controller to node


@dataclass(frozen=True, slots=True)
class Assigned:
    role: str
    index: int
    run: Run


@dataclass(frozen=True, slots=True)
class Peers:
    """The expert nodes' mailboxes, in order."""

    addresses: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Submit:
    """`request.request_id` is the request's number, as text."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    request: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, accept nothing new, then say `Drained`."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Exit now."""


@dataclass(frozen=True, slots=True)
class FillSlots:
    """To expert nodes: load what `placement` (JSON) adds into free slots, then say `Filled`."""

    epoch: int
    placement: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """To attention nodes: route by `placement` (JSON) from the next step on, then say `Adopted`."""

    epoch: int
    placement: str


@dataclass(frozen=True, slots=True)
class Retire:
    """To expert nodes: nothing routed under `epoch` will come any more."""

    epoch: int


FromNode = (
    Register
    | Endpoint
    | Progress
    | Ready
    | Heartbeat
    | Tokens
    | Refused
    | Drained
    | Failed
    | Filled
    | Adopted
)
ToNode = Assigned | Peers | Submit | Cancel | Drain | Shutdown | FillSlots | Adopt | Retire
