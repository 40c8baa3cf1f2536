"""The seam between HTTP and the engine. `control/frontend.py` implements it over processes; tests may not."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from afserve.control.admission import Objectives
from afserve.control.changes import Change, Changed
from afserve.control.requests import Taker
from afserve.control.wire.keeping import Keep
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.engine.stats import Stats
from afserve.member import Role


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the model. `path` is the checkpoint folder (tokenizer, chat template).

    Answers have its `name`; requests may also say one of the `aliases`.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    created: int
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One member as the controller sees it. Ages and times in seconds; a gateway has no `stats`. `phase` is an
    attention node's, empty for the others."""

    name: str
    role: str
    state: str
    pid: int
    heartbeat_age: float
    resident_bytes: int
    stats: Stats | None
    phase: str = ""


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


class Opened(Protocol):
    """One sequence of a request that may outlive its connection. One of the last three is said at its end."""

    def events(self) -> AsyncGenerator[TokenEvent, None]:
        """As those of `Backend.generate`; closing the iterator early changes nothing."""
        ...

    def halt(self) -> None:
        """It needs no more tokens; what there is stays kept."""
        ...

    def close(self) -> None:
        """Nobody wants it any more."""
        ...

    def leave(self) -> None:
        """This gateway goes; another one may ask for it."""
        ...


class Kept(Protocol):
    """One sequence that another gateway began, as it was found. `about` is what that one left with it.

    Of its `count` tokens the last `unheard` came when no gateway was there.
    """

    about: bytes
    choice: int
    choices: int
    prompt_ids: tuple[int, ...]
    count: int
    unheard: int
    ended: bool

    def open(self, request: GenerationRequest) -> Opened:
        """Go on with it, where it was taken. `request` is what it was asked for."""
        ...


class Backend(Protocol):
    model: ServedModel

    def generate(
        self, request: GenerationRequest, taker: Taker | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Events of one request until one has a finish_reason. Their handle is the backend's own, not the request's.

        A backend may ask `taker` for events between the first and the last while the iterator is waited for; those that
        it takes are not yielded.

        Raises RequestError before the first event when the engine refuses it, OverloadedError when queues are
        full, PeerLost when no other node takes over from one that was lost. Closing the iterator early cancels the
        request and frees its blocks.
        """
        ...

    def keep(self, request: GenerationRequest, keep: Keep) -> Opened:
        """Begin one that may outlive its connection and this gateway."""
        ...

    async def find(self, id: str, *, take: bool) -> Sequence[Kept]:
        """What there is of a request that any gateway began; with `take` it is this gateway's from now on.

        Raises UnavailableError where not everybody could say.
        """
        ...

    def ready(self) -> bool:
        """Whether a request would be computed at once."""
        ...

    def check(self) -> None:
        """Raises why new requests are not taken now."""
        ...

    def admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives) -> None:
        """Raises OverloadedError where a request of these prompts would be too late for what it asks for."""
        ...

    def draw_counts(self, name: str, values: Mapping[str, int]) -> None:
        """What this gateway counts, into the trace of a run that is drawn."""
        ...

    async def view(self) -> ClusterView: ...

    async def placement(self) -> str:
        """The placement in force, as its JSON file."""
        ...

    async def apply_placement(self, text: str) -> None:
        """Go to another placement while serving. Raises ConfigError where it does not fit."""
        ...

    async def record_routing(self, on: bool) -> bytes:
        """Start recording routing counts, or stop and return what was recorded."""
        ...

    async def recorded_routing(self) -> bytes:
        """What was recorded so far; recording goes on."""
        ...

    async def change(self, change: Change) -> Changed:
        """Other numbers of nodes, one fewer, or new processes; what is asked has begun when this returns.

        Raises ConfigError, NotFoundError or DoesNotFitError for what cannot be.
        """
        ...

    async def recordings(self) -> Sequence[bytes]:
        """What some attention and expert nodes do for a moment from now on, as `Recording.pack` makes it.

        Nodes that do not answer in time are left out. Nothing is recorded while nobody asks.
        """
        ...
