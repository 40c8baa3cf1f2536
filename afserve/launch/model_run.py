"""One model's run in the controlling process, and after one that cannot go on the next, with its own node processes."""

from collections.abc import Callable
from dataclasses import replace

from afserve.launch.current_run import CurrentRun
from afserve.launch.launcher import Launcher
from afserve.launch.local_run import LocalRun
from afserve.launch.planned_run import PlannedRun
from afserve.launch.processes import NodeProcesses, token_at
from afserve.launch.supervisor import Term, Wanted

Make = Callable[[PlannedRun, Launcher, Term], LocalRun]


class ModelRun:
    """`run` is the one that there is now; `backend` is what HTTP asks, whichever that is."""

    def __init__(self, planned: PlannedRun, term: Term, make: Make) -> None:
        self.planned, self._term, self._make = planned, term, make
        self.run = make(planned, planned.launcher, term)
        self.backend = CurrentRun(self.run.frontend)

    @property
    def name(self) -> str:
        return self.backend.model.name

    async def again(self) -> None:
        """What is left of the run ends, and another one starts, with as many nodes as were wanted.

        The supervisor's launcher may be what was lost, so this one has its own, which ends with this process.
        """
        await self.run.stop()
        deployment = self.run.controller.deployment
        by_now = {self.name: Wanted(deployment.counts, deployment.phases)}
        launcher = NodeProcesses(token_at(self.planned.flags.run.token_file))
        launcher.start()
        self.run = self._make(self.planned, launcher, replace(self._term, wanted=by_now))
        self.backend.follow(self.run.frontend)
        await self.run.start()

    async def stop(self) -> None:
        """The one that there is now."""
        await self.run.stop()
