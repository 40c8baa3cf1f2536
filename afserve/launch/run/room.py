"""Whether this machine's free memory, or its GPUs, hold what is asked of a run that serves. It reads the machine anew
each time."""

from collections.abc import Callable, Mapping

from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.device_shares import FLAG
from afserve.launch.plan.footprint import gib, usable
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.topology import Topology
from afserve.member import Role


class HostRoom:
    """`elsewhere`: nodes are on other hosts, or a cluster's engine starts them, and says itself what it has no room
    for. `free_rows`: how many more attention nodes would have GPUs of their own beside so many more expert nodes, where
    each is to have several."""

    def __init__(self, topology: Topology, *, elsewhere: bool, free_rows: Callable[[int], int]) -> None:
        self._needs = {Role.ATTENTION: topology.attention, Role.EXPERT: topology.expert}
        self._elsewhere = elsewhere
        self._free_rows = free_rows
        engine = topology.deployment.engine
        self._on_cpu = engine.device == "cpu"
        self._gpus = 1 if self._on_cpu else engine.tensor_parallel

    def check_more(self, more: Mapping[Role, int]) -> None:
        """Raises DoesNotFitError where free memory does not hold so many more nodes of each role beside each other, or
        where no GPUs are left for the attention nodes once the expert nodes have theirs."""
        coming = {role: number for role, number in more.items() if number > 0 and self._needs.get(role)}
        if self._gpus > 1 and (attention := coming.get(Role.ATTENTION, 0)):
            self._check_rows(attention, coming.get(Role.EXPERT, 0))
        if not coming or self._elsewhere or not self._on_cpu:
            return
        needed = sum(
            need.total * coming[role] for role, need in self._needs.items() if need and role in coming
        )
        free = usable(this_machine())
        if needed > free:
            raise DoesNotFitError(
                f"scale: {_nodes(coming)} need {gib(needed)}, this machine has {gib(free)} free"
            )

    def _check_rows(self, attention: int, experts: int) -> None:
        """Which of them begins first is not known."""
        rows = self._free_rows(experts)
        if attention > rows:
            beside = f" beside {_nodes({Role.EXPERT: experts})}" if experts else ""
            raise DoesNotFitError(
                f"scale: {_nodes({Role.ATTENTION: attention})} would need {self._gpus} free GPUs in a row each "
                f"({FLAG} {self._gpus}), of which {rows} such row{'s are' if rows != 1 else ' is'} left{beside}; ask "
                "for fewer"
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


def _nodes(more: Mapping[Role, int]) -> str:
    return " and ".join(f"{number} more {role} node{'s' * (number > 1)}" for role, number in more.items())
