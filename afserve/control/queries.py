"""What a gateway asks of whoever knows the cluster: the controller in its own process, or one that it is joined to.

Both answer with the same values. Over the wire an answer has a deadline; that the cluster is ready is said once.
"""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import Protocol

from afserve.clock import Clock
from afserve.control.changing import Changing
from afserve.control.controller import Controller
from afserve.control.pilot.loop import PilotLoop
from afserve.control.wire import views
from afserve.control.wire.change_values import Change, Changed
from afserve.control.wire.changes import decode_change, decode_changed, encode_change, encode_changed
from afserve.control.wire.values import Query, QueryAnswer
from afserve.control.wire.view_values import ClusterView, NodeView
from afserve.errors import AfserveError, ConfigError, DeadlineError, UnavailableError
from afserve.member import Role
from afserve.placement.placement import Placement

ANSWER_SECONDS = 10.0
_AGAIN_SECONDS = 1.0


class Queries(Protocol):
    @property
    def ready(self) -> bool: ...

    def check(self) -> None:
        """Raises what ended the run, if anything did."""

    async def view(self) -> ClusterView: ...

    async def placement(self) -> str: ...

    async def apply_placement(self, text: str) -> None: ...

    async def record_routing(self, on: bool) -> bytes: ...

    async def recorded_routing(self) -> bytes: ...

    async def change(self, change: Change) -> Changed: ...

    async def recordings(self) -> tuple[bytes, ...]: ...


class OwnQueries:
    """The controller is in this process. `picked` is what the launcher chose and why."""

    def __init__(
        self,
        controller: Controller,
        picked: Mapping[str, str],
        clock: Clock,
        changing: Changing | None = None,
        pilot: PilotLoop | None = None,
    ) -> None:
        self._changing = changing or Changing(controller)
        self._controller = controller
        self._pilot = pilot
        self._picked = picked
        self._clock = clock

    @property
    def ready(self) -> bool:
        return self._controller.ready

    def check(self) -> None:
        self._controller.check()

    async def view(self) -> ClusterView:
        now, balancing = self._clock.now(), self._controller.balancing
        incidents = self._controller.chronicle.incidents
        nodes = tuple(
            NodeView(
                str(m.node),
                m.node.role,
                m.state,
                m.pid,
                now - m.seen_at,
                m.resident_bytes,
                m.stats,
                self._controller.deployment.phase(m.node.index) if m.node.role is Role.ATTENTION else "",
                m.isa,
            )
            for m in self._controller.members
        )
        return ClusterView(
            self._controller.placement.epoch,
            nodes,
            self._picked,
            self._controller.rebalancing.imbalance(),
            tuple(f"{now - d.now:.0f} s ago: {d.action.value}, {d.reason}" for d in balancing.decisions),
            balancing.moves,
            balancing.routed(),
            incidents=incidents.last,
            lost=incidents.lost_nodes(),
            reloaded_bytes=incidents.reloaded_bytes,
            resent_rows=incidents.resent_rows,
            stalled=dict(incidents.stalled),
            wanted={str(role): self._controller.deployment.count(role) for role in Role},
            absent=tuple(self._controller.membership.losses.absent()),
            pilot=None if self._pilot is None else self._pilot.view(),
        )

    async def placement(self) -> str:
        return self._controller.placement.to_json()

    async def apply_placement(self, text: str) -> None:
        self._controller.apply(Placement.from_json(text))

    async def record_routing(self, on: bool) -> bytes:
        recorder = self._controller.balancing.recorder
        if not on:
            return recorder.stop_recording()
        recorder.start_recording(self._clock.now())
        return b""

    async def recorded_routing(self) -> bytes:
        return self._controller.balancing.recorder.dump()

    async def change(self, change: Change) -> Changed:
        return self._changing.change(change)

    async def recordings(self) -> tuple[bytes, ...]:
        return await self._controller.chronicle.record()

    async def answer(self, query: Query) -> QueryAnswer:
        """To a gateway elsewhere. What went wrong is the answer's error."""
        try:
            return QueryAnswer(query.number, await self._answer(query))
        except AfserveError as error:
            return QueryAnswer(query.number, error=error)

    async def _answer(self, query: Query) -> bytes:
        match query.what:
            case "view":
                return views.encode_view(await self.view())
            case "placement":
                return (await self.placement()).encode()
            case "apply_placement":
                await self.apply_placement(query.body.decode())
                return b""
            case "record_routing":
                return await self.record_routing(bool(query.body))
            case "recorded_routing":
                return await self.recorded_routing()
            case "change":
                return encode_changed(await self.change(decode_change(query.body)))
            case "recordings":
                return views.encode_recordings(await self.recordings())
        raise ConfigError(f"a gateway asked for {query.what!r}, which this controller does not know")


class DistantQueries:
    """The controller is elsewhere: `send` carries a question to it, `answered` brings what came back."""

    def __init__(self, send: Callable[[Query], None]) -> None:
        self.failure: AfserveError | None = None
        self._send = send
        self._numbers = count(1)
        self._open: dict[int, asyncio.Future[QueryAnswer]] = {}
        self._serving = asyncio.Event()  # a controller has said that everyone is ready
        self._answers = asyncio.Event()  # while there is a controller
        self._answers.set()

    @property
    def ready(self) -> bool:
        return self._serving.is_set() and self.failure is None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def end(self, failure: AfserveError | None) -> None:
        """The run is over; with what ended it, if that was no wish."""
        self.failure = failure

    def broken(self) -> None:
        """The controller has gone, and another may come: what it was asked is not answered any more."""
        self._answers.clear()
        error = UnavailableError("the controller is started again; ask again", retry_after=_AGAIN_SECONDS)
        for number in list(self._open):
            self.take_answer(QueryAnswer(number, error=error))

    def serve(self) -> None:
        """A controller says that everyone is ready."""
        self._serving.set()
        self._answers.set()

    async def wait_serving(self) -> None:
        """Returns once a controller has said that everyone is ready."""
        await self._serving.wait()

    def take_answer(self, answer: QueryAnswer) -> None:
        if (found := self._open.pop(answer.number, None)) is not None and not found.done():
            found.set_result(answer)

    async def view(self) -> ClusterView:
        return views.decode_view(await self._ask("view"))

    async def placement(self) -> str:
        return (await self._ask("placement")).decode()

    async def apply_placement(self, text: str) -> None:
        await self._ask("apply_placement", text.encode())

    async def record_routing(self, on: bool) -> bytes:
        return await self._ask("record_routing", b"1" if on else b"")

    async def recorded_routing(self) -> bytes:
        return await self._ask("recorded_routing")

    async def change(self, change: Change) -> Changed:
        return decode_changed(await self._ask("change", encode_change(change)))

    async def recordings(self) -> tuple[bytes, ...]:
        return views.decode_recordings(await self._ask("recordings"))

    async def _ask(self, what: str, body: bytes = b"") -> bytes:
        try:
            await asyncio.wait_for(self._answers.wait(), ANSWER_SECONDS)
        except TimeoutError:
            raise _unanswered(what) from None
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(Query(number, what, body))
        try:
            answer = await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError:
            raise _unanswered(what) from None
        finally:
            self._open.pop(number, None)
        if answer.error is not None:
            raise answer.error
        found: bytes = answer.body
        return found


def _unanswered(what: str) -> DeadlineError:
    return DeadlineError(f"the controller did not answer ({what}) within {ANSWER_SECONDS:.0f} s")
