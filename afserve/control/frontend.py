"""The `Backend` of the HTTP server over real processes: opens requests at its gateway, streams their events back.

It knows no HTTP and no text.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

from afserve.control.admission import Objectives
from afserve.control.backend import CacheKept, ServedModel
from afserve.control.gateway import Gateway
from afserve.control.membership.events import Happening
from afserve.control.queries import Queries
from afserve.control.request_trace import RequestTrace
from afserve.control.requests import Request, Taker
from afserve.control.wire.change_values import Change, Changed
from afserve.control.wire.keeping import Keep, KeptAnswer
from afserve.control.wire.view_values import ClusterView
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.errors import OverloadedError, UnavailableError
from afserve.member import Life, NodeId, attention_node
from afserve.tracing.trace import Trace

_RETRY_SECONDS = 2.0
_AGAIN_SECONDS = 0.5


class Frontend:
    """One per gateway. `trace` is drawn into, if given."""

    def __init__(
        self, queries: Queries, gateway: Gateway, model: ServedModel, trace: Trace | None = None
    ) -> None:
        self.model = model
        self._queries = queries
        self._gateway = gateway
        self._drawn = RequestTrace(trace)
        self._accepting = True

    def open(
        self, request: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None
    ) -> "OpenedHere":
        self.check()
        return OpenedHere(self._gateway, self._gateway.open(request, keep, taker), self._drawn)

    async def find(self, id: str, *, take: bool) -> "list[KeptThere]":
        asking = await self._gateway.find(id, take=take)
        if not asking.found and (not asking.complete or self._gateway.unattended()):
            raise UnavailableError(
                "not every attention node could say whether it keeps this request; ask again",
                retry_after=_AGAIN_SECONDS,
            )
        return [KeptThere(self._gateway, home, answer, self._drawn) for home, answer in asking.found]

    async def kept_cache(
        self, owner: str | None, *, unpin: bool, prompt: Sequence[int] = (), salt: str = ""
    ) -> CacheKept:
        asking = await self._gateway.ask_caches(owner, unpin=unpin, prompt=prompt, salt=salt)
        complete = asking.complete and not self._gateway.unattended()
        return CacheKept(tuple((str(life.node), told) for life, told in asking.found), complete)

    @property
    def requests(self) -> int:
        """Those that are computed, or kept for whoever comes back."""
        return len(self._gateway.requests)

    def ready(self) -> bool:
        return (
            self._accepting and self._queries.ready and self._gateway.attended and not self._gateway.refusing
        )

    def check(self) -> None:
        """A request that finds no node for the moment is taken: it waits for one."""
        self._queries.check()
        if not (self._accepting and self._queries.ready):
            raise UnavailableError(
                "the server is starting or stopping and takes no requests now", retry_after=_RETRY_SECONDS
            )
        if self._gateway.refusing:
            raise UnavailableError(
                f"no new requests are taken now: {self._gateway.refusing}", retry_after=_RETRY_SECONDS
            )

    def admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives) -> None:
        if wanted:
            try:
                self._gateway.admit(prompts, wanted)
            except OverloadedError:
                self.draw_counts("refused as too late", self._gateway.admission.refused)
                raise

    def draw_counts(self, name: str, values: Mapping[str, int]) -> None:
        self._drawn.counts(name, values)

    def close(self) -> None:
        """Accept nothing new; what runs goes on."""
        self._accepting = False

    async def view(self) -> ClusterView:
        """The cluster's, with what waits and has moved at this gateway."""
        view, moves = await self._queries.view(), self._gateway.moves
        return replace(
            view,
            waiting=len(self._gateway.requests.waiting),
            moved=dict(moves.counts),
            refused=dict(self._gateway.admission.refused),
            refusing=self._gateway.refusing,
            stalled={**view.stalled, "moved": sum(moves.seconds.values())},
            incidents=tuple(
                replace(
                    incident, stall=max(incident.stall, moves.stall_of(incident.node, incident.generation))
                )
                if incident.what == Happening.LOST
                else incident
                for incident in view.incidents
            ),
        )

    async def placement(self) -> str:
        return await self._queries.placement()

    async def apply_placement(self, text: str) -> None:
        await self._queries.apply_placement(text)

    async def record_routing(self, on: bool) -> bytes:
        return await self._queries.record_routing(on)

    async def recorded_routing(self) -> bytes:
        return await self._queries.recorded_routing()

    async def change(self, change: Change) -> Changed:
        return await self._queries.change(change)

    async def recordings(self) -> tuple[bytes, ...]:
        return await self._queries.recordings()

    def missing(self) -> list[NodeId]:
        """Attention nodes that have no stream to this gateway."""
        return [attention_node(index) for index in self._gateway.unattended()]

    async def wait_attended(self) -> None:
        """Returns when every attention node has opened its stream."""
        await self._gateway.wait_attended()


class OpenedHere:
    """`backend.Opened` over a gateway."""

    def __init__(self, gateway: Gateway, opened: Request, drawn: RequestTrace) -> None:
        self._gateway, self._opened, self._drawn = gateway, opened, drawn

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        opened, drawn = self._opened, self._drawn.begin()
        try:
            while True:
                event = await opened.get()
                drawn.token()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            drawn.end()
            if opened.keep is None:
                self._gateway.close(opened)

    def halt(self) -> None:
        self._gateway.halt(self._opened)

    def discard(self) -> None:
        self._gateway.close(self._opened)

    def leave(self) -> None:
        self._gateway.leave(self._opened)


class KeptThere:
    """`backend.Kept` of an attention node."""

    def __init__(self, gateway: Gateway, home: Life, answer: KeptAnswer, drawn: RequestTrace) -> None:
        self._gateway, self._home, self._answer, self._drawn = gateway, home, answer, drawn
        self.about, self.prompt_ids, self.count = answer.keep.about, answer.prompt_ids, answer.count
        self.ended, self.unheard = answer.ended, answer.unheard
        self.choice, self.choices = answer.keep.choice, answer.keep.choices

    def open(self, request: GenerationRequest) -> OpenedHere:
        opened = self._gateway.adopt(self._home, self._answer, request)
        return OpenedHere(self._gateway, opened, self._drawn)
