"""Which experts which nodes could not read, until all are tried again: values in, values out, times passed in.

An expert is tried on a few nodes and then nowhere, for most of them read the same files. It knows no placement.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from afserve.placement.recovery import LayerExpert

TRIED = 3  # nodes: where so many could not read an expert, no other is asked
_LONGEST = 10.0  # seconds
Barred = Mapping[LayerExpert, frozenset[int]]  # expert nodes that cannot hold it now


@dataclass(slots=True)
class UnreadableExperts:
    """`pause` seconds are left between two tries, twice as many each time."""

    pause: float = 0.5
    _nodes: dict[LayerExpert, set[int]] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)
    _tries: int = 0
    _until: float = 0.0

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def note(self, node: int, experts: Iterable[LayerExpert], now: float) -> bool:
        """This expert node could not read them. Whether that is new since all could be read: tries go on for hours."""
        if not self._nodes:
            self._until = now + min(self.pause * 2.0 ** min(self._tries, 30), _LONGEST)
            self._tries += 1
        for expert in experts:
            self._nodes.setdefault(expert, set()).add(node)
        new = node not in self._told
        self._told.add(node)
        return new

    def of(self, node: int) -> bool:
        """Whether this node has something to wait for."""
        return any(node in nodes for nodes in self._nodes.values())

    def barred(self, nodes: Collection[int]) -> Barred:
        """Of all expert nodes."""
        everybody = frozenset(nodes)
        return {
            expert: everybody if len(tried) >= TRIED else frozenset(tried)
            for expert, tried in self._nodes.items()
        }

    def due(self, now: float) -> bool:
        """Whether all are to be tried again, from now on; said once."""
        if not self._nodes or now < self._until:
            return False
        self._nodes.clear()
        return True

    def read(self) -> None:
        """Experts were loaded, and none is left out: the next that cannot be read is a first one."""
        if not self._nodes:
            self._tries = 0
            self._told.clear()
