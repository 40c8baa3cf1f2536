"""One model's run in the controlling process, and after one that cannot go on the next."""

from collections.abc import Callable
from dataclasses import replace

from afserve.launch.processes.supervisor import Term, Wanted
from afserve.launch.run.current_run import CurrentRun
from afserve.launch.run.local_run import LocalRun
from afserve.launch.run.planned_run import PlannedRun

Make = Callable[[PlannedRun, Term], LocalRun]


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
