"""Whether this machine's free memory, or its GPUs, hold what is asked of a run that serves. It reads the machine anew
each time."""

from collections.abc import Callable

from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.device_shares import FLAG
from afserve.launch.plan.footprint import gib, usable
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.topology import Topology
from afserve.member import Role


class HostRoom:
    """`elsewhere`: nodes are on other hosts, or a cluster's engine starts them, and says itself what it has no room
    for. `free_rows`: how many more attention nodes would have GPUs of their own, where each is to have several."""

    def __init__(self, topology: Topology, *, elsewhere: bool, free_rows: Callable[[], int]) -> None:
        self._needs = {Role.ATTENTION: topology.attention, Role.EXPERT: topology.expert}
        self._elsewhere = elsewhere
        self._free_rows = free_rows
        engine = topology.deployment.engine
        self._on_cpu = engine.device == "cpu"
        self._gpus = 1 if self._on_cpu else engine.tensor_parallel

    def check_more(self, role: Role, more: int) -> None:
        """Raises DoesNotFitError where free memory does not hold so many more nodes of a role, or no GPUs are left."""
        if role is Role.ATTENTION and self._gpus > 1 and more > (rows := self._free_rows()):
            raise DoesNotFitError(
                f"scale: {more} more attention node{'s' * (more > 1)} would need {self._gpus} free GPUs in a row each "
                f"({FLAG} {self._gpus}), of which {rows} such row{'s are' if rows != 1 else ' is'} left; ask for fewer"
            )
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
        """Raises DoesNotFitError where free memory and a node's of the old role do not hold one of the new, ConfigError
        where roles have different numbers of GPUs."""
        if self._gpus > 1:
            raise ConfigError(
                f"role: an attention node has {self._gpus} GPUs ({FLAG} {self._gpus}), an expert node one, so neither "
                "is a place for the other; use afserve scale, or start anew with other counts",
                param="role",
            )
        gone, comes = self._needs[old], self._needs[new]
        if gone is None or comes is None or not self._on_cpu:
            return
        free = usable(this_machine()) + gone.total
        if comes.total > free:
            raise DoesNotFitError(
                f"role: an {new} node needs {gib(comes.total)}, this machine has {gib(free)} free without the other"
            )
