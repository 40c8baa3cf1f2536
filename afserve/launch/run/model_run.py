"""One model's run in the controlling process, and the next one: after one that cannot go on, or one that slept."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from afserve.clock import Clock, MonotonicClock
from afserve.control.admission import Objectives
from afserve.control.backend import CacheKept, Kept, Opened, ServedModel
from afserve.control.frontend import Frontend
from afserve.control.requests import Taker
from afserve.control.wire.change_values import Change, Changed
from afserve.control.wire.keeping import Keep
from afserve.control.wire.view_values import ClusterView
from afserve.engine.scheduling.request import GenerationRequest
from afserve.errors import AfserveError, UnavailableError
from afserve.launch.processes.supervisor import Term, Wanted
from afserve.launch.run.local_run import LocalRun
from afserve.launch.run.planned_run import PlannedRun
from afserve.launch.run.sleeping import Sleep

Make = Callable[[PlannedRun, Term], LocalRun]
_LOOK_SECONDS = 1.0


class CurrentRun:
    """The `Backend` of a model whose run may be followed by another one: everything goes to the run that there is now,
    and what an earlier one has begun ends with that one. Of a model that sleeps requests wait for the next run."""

    def __init__(self, frontend: Frontend, clock: Clock | None = None) -> None:
        self.model: ServedModel = frontend.model
        self._now = frontend
        self._clock = clock or MonotonicClock()
        self._sleep: Sleep | None = None
        self._asked_at = self._clock.now()

    def follow(self, frontend: Frontend) -> None:
        """Another run of the same model."""
        self._now = frontend

    def idle_seconds(self) -> float:
        """For how long nobody has asked for anything; 0 where something is computed or kept, or nobody serves."""
        busy = self._sleep is not None or self._now.requests or not self._now.ready()
        return 0.0 if busy else self._clock.now() - self._asked_at

    def sleep(self, start_seconds: float) -> Sleep:
        """From now on requests wait."""
        self._sleep = Sleep(self.model.name, start_seconds)
        return self._sleep

    def wake(self, error: AfserveError | None = None) -> None:
        """Its run serves, or there is none, for this reason."""
        sleep, self._sleep, self._asked_at = self._sleep, None, self._clock.now()
        if sleep is not None:
            sleep.end(self._now if error is None else error)

    @property
    def _frontend(self) -> Frontend:
        if self._sleep is not None:
            raise UnavailableError(f"{self.model.name} sleeps: it has no nodes until a request asks for it")
        return self._now

    def open(
        self, request: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None
    ) -> Opened:
        """What is computed ahead keeps no model awake and wakes none: of one that sleeps it raises UnavailableError."""
        if request.ahead:
            return self._frontend.open(request, keep, taker)
        self._asked_at = self._clock.now()
        if self._sleep is not None:
            return self._sleep.hold(lambda frontend: frontend.open(request, keep, taker))
        return self._now.open(request, keep, taker)

    async def find(self, id: str, *, take: bool) -> Sequence[Kept]:
        return await self._now.find(id, take=take) if self._sleep is None else ()

    async def kept_cache(
        self, owner: str | None, *, unpin: bool, prompt: Sequence[int] = (), salt: str = ""
    ) -> CacheKept:
        if self._sleep is not None:
            return CacheKept((), complete=True)
        return await self._now.kept_cache(owner, unpin=unpin, prompt=prompt, salt=salt)

    def ready(self) -> bool:
        """Who sleeps takes requests."""
        return self._sleep is not None or self._now.ready()

    def check(self) -> None:
        if self._sleep is None:
            self._now.check()

    def admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives) -> None:
        if self._sleep is None:
            self._now.admit(prompts, wanted)
        else:
            self._sleep.admit(wanted)

    def draw_counts(self, name: str, values: Mapping[str, int]) -> None:
        self._now.draw_counts(name, values)

    async def view(self) -> ClusterView:
        if self._sleep is not None:
            return ClusterView(0, (), absent=("all nodes: it sleeps, and the next request starts them",))
        return await self._now.view()

    async def placement(self) -> str:
        return await self._frontend.placement()

    async def apply_placement(self, text: str) -> None:
        await self._frontend.apply_placement(text)

    async def record_routing(self, on: bool) -> bytes:
        return await self._frontend.record_routing(on)

    async def recorded_routing(self) -> bytes:
        return await self._frontend.recorded_routing()

    async def recordings(self) -> Sequence[bytes]:
        return await self._frontend.recordings()

    async def change(self, change: Change) -> Changed:
        return await self._frontend.change(change)


class ModelRun:
    """`run` is the one that there is now; `backend` is what HTTP asks, whichever that is."""

    def __init__(self, planned: PlannedRun, term: Term, make: Make) -> None:
        self.planned, self._term, self._make = planned, term, make
        self.run = make(planned, term)
        self.backend = CurrentRun(self.run.frontend)
        self._start_seconds = 0.0

    @property
    def name(self) -> str:
        return self.backend.model.name

    async def until_over(self) -> AfserveError | None:
        """Why its run cannot go on; None where nobody asked for so long that it may sleep."""
        failing = asyncio.create_task(self.run.controller.wait_failure())
        idling = asyncio.create_task(self._until_idle())
        try:
            await asyncio.wait({failing, idling}, return_when=asyncio.FIRST_COMPLETED)
            return failing.result() if failing.done() else None
        finally:
            failing.cancel()
            idling.cancel()

    async def _until_idle(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.may_sleep:
                return

    @property
    def may_sleep(self) -> bool:
        """Whether it may sleep now."""
        plan = self.planned.pilot
        return (
            plan is not None
            and 0 < plan.idle <= self.backend.idle_seconds()
            and plan.hours.hold_at(time.localtime())
        )

    async def sleep_until_asked(self) -> None:
        """Its nodes end, and start again with the first request. Raises what keeps them from that."""
        sleep = self.backend.sleep(self._start_seconds)
        try:
            await self.run.stop()
            await sleep.asked.wait()
            began = time.monotonic()
            await self._next()
            await self.run.wait_ready()
            self._start_seconds = time.monotonic() - began
        except AfserveError as error:
            self.backend.wake(error)
            raise
        self.backend.wake()

    async def again(self) -> None:
        """What is left of the run ends, and another one starts, with as many nodes as were wanted."""
        await self.run.stop()
        await self._next()

    async def _next(self) -> None:
        deployment = self.run.controller.deployment
        by_now = {self.name: Wanted(deployment.counts, deployment.phases)}
        self.run = self._make(self.planned, replace(self._term, wanted=by_now))
        self.backend.follow(self.run.frontend)
        await self.run.start()

    async def stop(self) -> None:
        """The one that there is now."""
        await self.run.stop()
