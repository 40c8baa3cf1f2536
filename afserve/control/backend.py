"""The seam between HTTP and the engine. `control/frontend.py` implements it over processes; tests may not."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from afserve.control.admission import Objectives
from afserve.control.requests import Taker
from afserve.control.wire.cache_values import KeptCache
from afserve.control.wire.change_values import Change, Changed
from afserve.control.wire.keeping import Keep
from afserve.control.wire.view_values import ClusterView
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the model. `path` is the checkpoint folder (tokenizer, chat template).

    Answers have its `name`; requests may also say one of the `aliases`. `drafts`: its nodes verify what is guessed. A
    token's experts are `routed_bytes`. Prompts are found in caches as far as whole blocks of `block_size` tokens.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    created: int
    aliases: tuple[str, ...] = ()
    drafts: bool = False
    routed_bytes: int = 0
    block_size: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Opened(Protocol):
    """One sequence that is computed. Of one that is kept, one of the last three is said at its end."""

    def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Until one has a finish_reason. Their handle is the backend's own, not the request's.

        Closing the iterator early cancels the sequence and frees its blocks; one that is kept goes on.

        Raises RequestError before the first event when the engine refuses it, OverloadedError when queues are full,
        PeerLost when no other node takes over from one that was lost.
        """

    def halt(self) -> None:
        """It needs no more tokens; what there is stays kept."""

    def discard(self) -> None:
        """Nobody wants it any more."""

    def leave(self) -> None:
        """This gateway goes; another one may ask for it."""


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


@dataclass(frozen=True, slots=True)
class CacheKept:
    """By attention node. `complete`: each has answered in time."""

    nodes: tuple[tuple[str, KeptCache], ...]
    complete: bool


class Backend(Protocol):
    model: ServedModel

    def open(
        self, request: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None
    ) -> Opened:
        """Begin one. With `keep` it may outlive its connection and this gateway.

        `taker` may be asked for events before the last while the iterator is waited for; those that it takes are not
        yielded. Raises why no new requests are taken.
        """

    async def find(self, id: str, *, take: bool) -> Sequence[Kept]:
        """What there is of a request that any gateway began; with `take` it is this gateway's from now on.

        Raises UnavailableError where not everybody could say.
        """

    async def kept_cache(
        self, owner: str | None, *, unpin: bool, prompt: Sequence[int] = (), salt: str = ""
    ) -> CacheKept:
        """What caches keep because this owner, anybody where it is None, asked for it; with `unpin` no longer, of this
        prompt alone where it has tokens."""

    def ready(self) -> bool:
        """Whether a request would be computed at once."""

    def check(self) -> None:
        """Raises why new requests are not taken now."""

    def admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives) -> None:
        """Raises OverloadedError where a request of these prompts would be too late for what it asks for."""

    def draw_counts(self, name: str, values: Mapping[str, int]) -> None:
        """What this gateway counts, into the trace of a run that is drawn."""

    async def view(self) -> ClusterView: ...

    async def placement(self) -> str:
        """The placement in force, as its JSON file."""

    async def apply_placement(self, text: str) -> None:
        """Go to another placement while serving. Raises ConfigError where it does not fit."""

    async def record_routing(self, on: bool) -> bytes:
        """Start recording routing counts, or stop and return what was recorded."""

    async def recorded_routing(self) -> bytes:
        """What was recorded so far; recording goes on."""

    async def change(self, change: Change) -> Changed:
        """Other numbers of nodes, one fewer, or new processes; what is asked has begun when this returns.

        Raises ConfigError, NotFoundError or DoesNotFitError for what cannot be.
        """

    async def recordings(self) -> Sequence[bytes]:
        """What some attention and expert nodes do for a moment from now on, as `Recording.pack` makes it.

        Nodes that do not answer in time are left out. Nothing is recorded while nobody asks.
        """
