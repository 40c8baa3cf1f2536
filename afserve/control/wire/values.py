"""What the controller, nodes and gateways say to each other of who is there and what each is to do, as plain frozen
values; `messages.py` is how they travel. What is said of requests is in `request_values.py`, what of
placements in `placement_values.py`.

Nothing here knows gRPC, torch or processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from afserve.control.wire.desired import Deployment
from afserve.control.wire.load_values import GatewayLoad
from afserve.control.wire.placement_values import Adopt, Adopted, Filled, FillSlots, Retire, Routed, Unfilled
from afserve.engine.stats import Stats
from afserve.errors import AfserveError
from afserve.member import AttentionLife, AttentionPhase, ExpertLife, Life, NodeId
from afserve.placement.placement import Placement

PROTOCOL = 8


# ---- node to controller


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`agreed` names every field both sides of the data plane must have in common. `address` is where an expert node's
    mailboxes are, and an attention node's KV blocks."""

    address: str
    agreed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Identity:
    """What this node's host has of the checkpoint: names of things, each with a digest. Sent before Ready."""

    things: Mapping[str, str]


class NodeStage(StrEnum):
    """How far a node is, by what it has said and was told. An expert node is never told that it serves."""

    LOADING = "loading"
    LOADED = "loaded"
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node is, said when it opens its stream to the controller again, which may be another one by now.

    `held` are placements by which an attention node routes (one) or whose experts are all on an expert node. `asked`
    are those that it was told to adopt or to fill, and has not answered for. A gateway has none. `newest` is the last
    epoch that it has ever heard of. `isa` as it said in Ready.
    """

    generation: int
    stage: NodeStage
    resident_bytes: int = 0
    endpoint: Endpoint | None = None
    identity: Identity | None = None
    held: tuple[Placement, ...] = ()
    asked: tuple[Placement, ...] = ()
    newest: int = 0
    isa: str = ""

    @property
    def loaded(self) -> bool:
        return self.stage is not NodeStage.LOADING


@dataclass(frozen=True, slots=True)
class Register:
    """The first message of a stream. `index` None asks for any free place of the role.

    A node that had a place until its stream broke says with `standing` what it is.
    """

    role: str
    index: int | None
    pid: int
    host: str
    version: str
    protocol: int = PROTOCOL
    standing: Standing | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    fraction: float
    what: str


@dataclass(frozen=True, slots=True)
class Ready:
    """`expert_error`: relative, where this node rounded expert weights to fewer bits as it loaded them; `dense_error`:
    the same of its other linear maps. `isa`: the instruction set of its kernels, on a CPU."""

    resident_bytes: int
    expert_error: float | None = None
    dense_error: float | None = None
    isa: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    resident_bytes: int
    stats: Stats | None = None  # of a gateway: none


@dataclass(frozen=True, slots=True)
class Query:
    """A gateway wants to know `what`; the answer has the same number."""

    number: int
    what: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Stuck:
    """An expert node has owed this attention node an answer for so many seconds.

    They are counted while the attention node itself was running. `unreachable`: it did not even take a connection.
    """

    life: ExpertLife
    seconds: float
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Unheard:
    """A gateway has requests at an attention node, and has heard nothing for so many seconds.

    They are counted while the gateway itself was running.
    """

    life: AttentionLife
    seconds: float


@dataclass(frozen=True, slots=True)
class Noted:
    """A line for the run's log, at level info, or a `warning`: nodes have none that a user sees."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """To an attention or expert node: draw what you do for so many seconds from now on, and answer with this number.

    One at a time: the next one takes the place of one that is not answered.
    """

    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """The answer to `Record`: a packed `afserve.tracing.recording.Recording`, which the controller only passes on."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Traced:
    """A packed `afserve.tracing.trace_part.TracePart`, which the controller only keeps."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The node cannot go on and is about to exit."""

    error: AfserveError


@dataclass(frozen=True, slots=True)
class Drained:
    """No request is left."""


# ---- controller to node


@dataclass(frozen=True, slots=True)
class Assigned:
    """A node's place, which of its lives this is, and what it is to run."""

    life: Life
    deployment: Deployment

    @property
    def node(self) -> NodeId:
        return self.life.node


@dataclass(frozen=True, slots=True)
class ExpertPeer:
    """Where the mailboxes of an expert node are."""

    life: ExpertLife
    address: str


@dataclass(frozen=True, slots=True)
class Peers:
    """To attention nodes: the expert nodes to send rows to, in order of index. Whoever is not among them is lost."""

    experts: tuple[ExpertPeer, ...] = ()


@dataclass(frozen=True, slots=True)
class Gateways:
    """To attention nodes: (index, address) of every gateway. An empty address is the controller's own."""

    gateways: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionPeer:
    """How an attention node is. One that is not `accepting` gets nothing new, and what it has is moved."""

    life: AttentionLife
    accepting: bool
    address: str = ""  # where other attention nodes reach its KV blocks
    phase: AttentionPhase = AttentionPhase.BOTH


@dataclass(frozen=True, slots=True)
class AttentionNodes:
    """To gateways and to attention nodes: all attention nodes that serve. Who is not
    among them is lost.

    `refusing` says why new requests are refused; empty, they are taken. `serves`, in the first of these messages to a
    gateway: the run serves already, so the gateway has no need to say that it is starting.
    """

    nodes: tuple[AttentionPeer, ...] = ()
    refusing: str = ""
    serves: bool = False


@dataclass(frozen=True, slots=True)
class Serve:
    """To gateways: everyone is ready, take requests."""


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """To a gateway: what it asked for, or why it cannot have it."""

    number: int
    body: bytes = b""
    error: AfserveError | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, accept nothing new, then say `Drained`. `ends`: the run does, not only this node's life.

    Where it does not, a gateway refuses nobody: who is connected is answered, new connections are for others.
    """

    ends: bool = False


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Exit now. `error` is why the run ends, where it does not end by wish; a gateway answers open requests with it."""

    error: AfserveError | None = None


FromNode = (
    Register
    | Endpoint
    | Identity
    | Progress
    | Ready
    | Heartbeat
    | Routed
    | Drained
    | Failed
    | Filled
    | Unfilled
    | Adopted
    | Query
    | Stuck
    | Unheard
    | Noted
    | Recorded
    | Traced
    | GatewayLoad
)
ToNode = (
    Assigned
    | Peers
    | Gateways
    | AttentionNodes
    | Drain
    | Shutdown
    | FillSlots
    | Adopt
    | Retire
    | Serve
    | QueryAnswer
    | Record
)
