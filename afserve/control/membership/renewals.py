"""Members that get a new process, and nodes that are followed by one of another role: whose turn it is.

Values in, values out. These know no streams, and tell nobody anything: `losses.py` asks them what a member's loss
means, and `departures.py` carries out what is next.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from afserve.control.membership.events import Start
from afserve.member import NodeId

GOING_SECONDS = 5.0  # from Shutdown until the member's stream has ended
HEARD_SECONDS = 0.5  # from when a node serves until gateways know: the next one's turn comes after that
EXIT_SECONDS = 2.0  # from the end of its stream until its process is taken for gone


class Step(Enum):
    """What the member whose turn it is does."""

    LEAVING = "leaving"  # still needed: by requests, or by experts that only it holds
    GOING = "going"  # told to go
    GONE = "gone"  # its stream has ended; its process may not have
    STARTED = "started"
    SERVES = "serves"  # and gateways are about to hear of it


@dataclass(slots=True)
class Renewals:
    """`waiting` come after `node`, whose turn it is. `until`: when the present step is over at the latest."""

    waiting: deque[NodeId] = field(default_factory=deque)
    node: NodeId | None = None
    step: Step = Step.STARTED
    until: float = 0.0
    exited: bool = False

    @property
    def planned(self) -> bool:
        return self.node is not None or bool(self.waiting)

    @property
    def awaits_process(self) -> bool:
        """Whether somebody is still without a new process. Without that the last one's turn may not be over: gateways
        are about to hear that it serves, and whoever waited for it has seen it already."""
        return bool(self.waiting) or (self.node is not None and self.step is not Step.SERVES)

    def ask_renewals(self, nodes: Iterable[NodeId]) -> None:
        """Each once, however often it is asked for before it serves again."""
        under_way = None if self.step is Step.SERVES else self.node
        self.waiting.extend(n for n in nodes if n not in self.waiting and n != under_way)

    def begin_renewal(self, node: NodeId) -> None:
        self.node, self.step, self.exited = node, Step.LEAVING, False

    @property
    def leaving(self) -> NodeId | None:
        """Who serves, though nothing new should depend on it."""
        return self.node if self.step is Step.LEAVING else None

    def going(self, now: float) -> None:
        self.step, self.until = Step.GOING, now + GOING_SECONDS

    def gone(self, node: NodeId, now: float) -> bool:
        """Whether the end of this member's stream is no loss, as it was to have a new process anyway."""
        if node != self.node or self.step in (Step.STARTED, Step.SERVES):
            return False
        self.step, self.until = Step.GONE, now if self.exited else now + EXIT_SECONDS
        return True

    def has_exited(self, node: NodeId, now: float) -> bool:
        """Whether the end of this node's process is no loss."""
        if node != self.node or self.step in (Step.STARTED, Step.SERVES):
            return False
        self.exited, self.until = True, min(self.until, now) if self.step is Step.GONE else self.until
        return True

    def starts_due(self, now: float) -> list[Start]:
        """A new process for whoever has gone."""
        if self.node is None or self.step is not Step.GONE or now < self.until:
            return []
        self.step = Step.STARTED
        return [Start(self.node)]

    def serves(self, node: NodeId, now: float) -> None:
        """It is ready: soon the next one's turn. Somebody may have taken the place before anyone was started for it."""
        if node == self.node and self.step in (Step.GONE, Step.STARTED):
            self.step, self.until = Step.SERVES, now + HEARD_SECONDS

    def move_on(self, now: float) -> None:
        """The next one's turn, where the one before is known to serve."""
        if self.step is Step.SERVES and now >= self.until:
            self.node = None

    def abandon(self, node: NodeId) -> None:
        """Its new process does not come: it is started again like any other, and nobody's turn comes after it."""
        if node == self.node and self.step is Step.STARTED:
            self.waiting.clear()
            self.node = None

    def drop_waiting(self) -> None:
        """Nobody's turn any more; what has been told to go goes, and gets its new process."""
        self.waiting.clear()
        if self.node is not None and self.step is Step.LEAVING:
            self.node = None


@dataclass(slots=True)
class RoleChanges:
    """Nodes that are followed by one of another role on the same host and device. The old process ends before the new
    one starts, as its memory and its device are needed.

    Owns who follows whom. `_gone_by`: when a node that was told to go is taken for gone, at the latest."""

    _followers: dict[NodeId, NodeId] = field(default_factory=dict)
    _gone_by: dict[NodeId, float] = field(default_factory=dict)
    _exited: set[NodeId] = field(default_factory=set)

    def add_follower(self, node: NodeId, follower: NodeId) -> None:
        self._followers[node] = follower

    def note_dismissal(self, node: NodeId, now: float, *, alive: bool) -> None:
        """Nothing needs this node any more: it was told to go, if it was still there."""
        if node in self._followers:
            self._gone_by[node] = now + (GOING_SECONDS if alive else EXIT_SECONDS)

    def has_exited(self, node: NodeId) -> None:
        """Its process has ended."""
        if node in self._followers:
            self._exited.add(node)

    def followers_due(self, now: float) -> list[Start]:
        """Those whose predecessors have gone. What is left of one that did not go in time is ended by whoever starts
        the next."""
        gone = [node for node, by in self._gone_by.items() if node in self._exited or now >= by]
        for node in gone:
            del self._gone_by[node]
            self._exited.discard(node)
        return [Start(self._followers.pop(node), instead=node) for node in gone]
