"""The `Backend` of a model whose run may be followed by another one: everything goes to the run that there is now."""

from collections.abc import Mapping, Sequence

from afserve.control.admission import Objectives
from afserve.control.backend import Kept, Opened, ServedModel
from afserve.control.frontend import Frontend
from afserve.control.requests import Taker
from afserve.control.wire.change_values import Change, Changed
from afserve.control.wire.keeping import Keep
from afserve.control.wire.view_values import ClusterView
from afserve.engine.scheduling.request import GenerationRequest


class CurrentRun:
    """What an earlier run has begun ends with that one."""

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
