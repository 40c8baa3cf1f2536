"""One model's run in the controlling process, and after one that cannot go on the next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from afserve.control.admission import Objectives
from afserve.control.backend import CacheKept, Kept, Opened, ServedModel
from afserve.control.frontend import Frontend
from afserve.control.requests import Taker
from afserve.control.wire.change_values import Change, Changed
from afserve.control.wire.keeping import Keep
from afserve.control.wire.view_values import ClusterView
from afserve.engine.scheduling.request import GenerationRequest
from afserve.launch.processes.supervisor import Term, Wanted
from afserve.launch.run.local_run import LocalRun
from afserve.launch.run.planned_run import PlannedRun

Make = Callable[[PlannedRun, Term], LocalRun]


class CurrentRun:
    """The `Backend` of a model whose run may be followed by another one: everything goes to the run that there is now,
    and what an earlier one has begun ends with that one."""

    def __init__(self, frontend: Frontend) -> None:
        self.model: ServedModel = frontend.model
        self._frontend = frontend

    def follow(self, frontend: Frontend) -> None:
        """Another run of the same model."""
        self._frontend = frontend

    def open(
        self, request: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None
    ) -> Opened:
        return self._frontend.open(request, keep, taker)

    async def find(self, id: str, *, take: bool) -> Sequence[Kept]:
        return await self._frontend.find(id, take=take)

    async def kept_cache(
        self, owner: str | None, *, unpin: bool, prompt: Sequence[int] = (), salt: str = ""
    ) -> CacheKept:
        return await self._frontend.kept_cache(owner, unpin=unpin, prompt=prompt, salt=salt)

    def ready(self) -> bool:
        return self._frontend.ready()

    def check(self) -> None:
        self._frontend.check()

    def admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives) -> None:
        self._frontend.admit(prompts, wanted)

    def draw_counts(self, name: str, values: Mapping[str, int]) -> None:
        self._frontend.draw_counts(name, values)

    async def view(self) -> ClusterView:
        return await self._frontend.view()

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

    @property
    def name(self) -> str:
        return self.backend.model.name

    async def again(self) -> None:
        """What is left of the run ends, and another one starts, with as many nodes as were wanted."""
        await self.run.stop()
        deployment = self.run.controller.deployment
        by_now = {self.name: Wanted(deployment.counts, deployment.phases)}
        self.run = self._make(self.planned, replace(self._term, wanted=by_now))
        self.backend.follow(self.run.frontend)
        await self.run.start()

    async def stop(self) -> None:
        """The one that there is now."""
        await self.run.stop()
