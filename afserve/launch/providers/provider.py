"""Schedulers that bring nodes (`--nodes-from`), and how a run keeps telling them what it wants.

A node that is told to go ends by itself; only then is the scheduler asked for fewer. A scheduler that refuses or does
not answer costs nobody who serves: it is said once, and asked again. It knows no scheduler (`kubernetes.py`,
`slurm.py`).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

from afserve.control.controller import Controller
from afserve.errors import AfserveError, CapacityError
from afserve.member import MODEL_ROLES, Role

log = logging.getLogger("afserve.launch")
LOOK_SECONDS = 1.0
AGAIN_SECONDS = 30.0  # until what was asked for is looked at again, and until a refusal is tried again


class ProviderError(CapacityError):
    """A scheduler did not do what it was asked; the message says why, and what would mend it."""


class NodeProvider(ABC):
    @abstractmethod
    def have_nodes(self, role: Role, count: int, join: str) -> None:
        """Have so many nodes of a role there or on their way, which join at `join`; asked again it changes nothing.

        Blocks for some seconds at most. Raises ProviderError.
        """

    @abstractmethod
    def call_off(self, join: str) -> None:
        """The run is over: nobody is to come any more. Blocks likewise. Raises ProviderError."""


def wanted(controller: Controller) -> dict[Role, int]:
    """Nodes by role: those that there are to be, and those that still leave."""
    counts = {role: controller.deployment.count(role) for role in MODEL_ROLES}
    return {role: max(count, len(controller.members.living(role))) for role, count in counts.items() if count}


class NodeOrders:
    """What a scheduler was asked for, and what it said."""

    def __init__(self, provider: NodeProvider) -> None:
        self._provider = provider
        self._counts: Mapping[Role, int] = {}
        self._due = 0.0
        self._said = ""

    def follow_counts(self, counts: Mapping[Role, int], join: str, now: float) -> None:
        """Blocks where there is something to ask. Refusals are logged, each once while it lasts."""
        if counts == self._counts and now < self._due:
            return
        self._counts, self._due = counts, now + AGAIN_SECONDS
        try:
            for role, count in counts.items():
                self._provider.have_nodes(role, count, join)
            self._said = ""
        except AfserveError as error:
            if error.message != self._said:
                log.warning("nodes were not asked for: %s", error.message)
            self._said = error.message

    def call_off(self, join: str) -> None:
        try:
            self._provider.call_off(join)
        except AfserveError as error:
            log.warning("nodes may still come: %s", error.message)


async def bring(provider: NodeProvider, controller: Controller) -> None:
    """Until it is cancelled."""
    asked, join, clock = NodeOrders(provider), controller.address, asyncio.get_running_loop().time
    try:
        while True:
            await asyncio.to_thread(asked.follow_counts, wanted(controller), join, clock())
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        await asyncio.to_thread(asked.call_off, join)
