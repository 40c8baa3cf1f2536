"""Nodes that are followed by one of another role on the same host and device: whose turn it is. Values in, values out.

The old process ends before the new one starts, as its memory and its device are needed. It tells nobody anything: the
machine (`state.py`) asks it what an exit means, and carries out what is next.
"""

from dataclasses import dataclass, field

from afserve.control.membership.events import Start
from afserve.control.membership.scaling import EXIT_SECONDS, GOING_SECONDS
from afserve.member import NodeId


@dataclass(slots=True)
class RoleChanges:
    """Owns who follows whom. `_gone_by`: when a node that was told to go is taken for gone, at the latest."""

    _followers: dict[NodeId, NodeId] = field(default_factory=dict)
    _gone_by: dict[NodeId, float] = field(default_factory=dict)
    _exited: set[NodeId] = field(default_factory=set)

    def ask(self, node: NodeId, follower: NodeId) -> None:
        self._followers[node] = follower

    def told(self, node: NodeId, now: float, *, alive: bool) -> None:
        """Nothing needs this node any more: it was told to go, if it was still there."""
        if node in self._followers:
            self._gone_by[node] = now + (GOING_SECONDS if alive else EXIT_SECONDS)

    def has_exited(self, node: NodeId) -> None:
        """Its process has ended."""
        if node in self._followers:
            self._exited.add(node)

    def due(self, now: float) -> list[Start]:
        """Those whose predecessors have gone. What is left of one that did not go in time is ended by whoever starts
        the next."""
        gone = [node for node, by in self._gone_by.items() if node in self._exited or now >= by]
        for node in gone:
            del self._gone_by[node]
            self._exited.discard(node)
        return [Start(self._followers.pop(node), instead=node) for node in gone]
