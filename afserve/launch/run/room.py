"""Whether this machine's free memory holds what is asked of a run that serves. It reads the machine anew each time."""

from afserve.errors import DoesNotFitError
from afserve.launch.plan.footprint import gib, usable
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.topology import Topology
from afserve.member import Role


class HostRoom:
    """`elsewhere`: nodes are on other hosts, or a cluster's engine starts them, and says itself what it has no room
    for."""

    def __init__(self, topology: Topology, *, elsewhere: bool) -> None:
        self._needs = {Role.ATTENTION: topology.attention, Role.EXPERT: topology.expert}
        self._elsewhere = elsewhere
        self._on_cpu = topology.deployment.engine.device == "cpu"

    def check_more(self, role: Role, more: int) -> None:
        """Raises DoesNotFitError where free memory does not hold so many more nodes of a role."""
        need = self._needs.get(role)
        if more <= 0 or need is None or self._elsewhere or not self._on_cpu:
            return
        free = usable(this_machine())
        if more * need.total > free:
            raise DoesNotFitError(
                f"scale: {more} more {role} node{'s' * (more > 1)} need {gib(more * need.total)}, this machine has "
                f"{gib(free)} free"
            )

    def check_change(self, old: Role, new: Role) -> None:
        """Raises DoesNotFitError where free memory and a node's of the old role do not hold one of the new."""
        gone, comes = self._needs[old], self._needs[new]
        if gone is None or comes is None or not self._on_cpu:
            return
        free = usable(this_machine()) + gone.total
        if comes.total > free:
            raise DoesNotFitError(
                f"role: an {new} node needs {gib(comes.total)}, this machine has {gib(free)} free without the other"
            )
