"""Which expert nodes have no connection to which attention nodes, as these say: values in and out.

A network that is cut between some nodes looks from either side as if the other one were gone. Who is to go is decided
elsewhere.
"""

from afserve.member import NodeId


class Reach:
    """What was said is forgotten where it is older than the `since` that is asked for."""

    def __init__(self) -> None:
        self._missed: dict[tuple[NodeId, int], float] = {}

    def missed(self, asker: NodeId, expert: int, now: float) -> None:
        self._missed[asker, expert] = now

    def askers(self, expert: int, since: float) -> set[NodeId]:
        """Attention nodes that miss this one."""
        return {asker for (asker, missed), at in self._missed.items() if missed == expert and at >= since}

    def missing(self, asker: NodeId, since: float) -> frozenset[int]:
        """Expert nodes that this one misses."""
        return frozenset(missed for (who, missed), at in self._missed.items() if who == asker and at >= since)
