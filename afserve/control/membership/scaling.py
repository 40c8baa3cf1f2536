"""Other numbers of nodes, and nodes anew: what can be done of it, and whose turn it is. Values in, values out.

`Renewals` owns the members that are to get a new process, one after another. It knows no streams, and tells nobody
anything: the machine (`state.py`) asks it what a member's loss means, and carries out what is next.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from afserve.control.membership.events import Start
from afserve.control.wire.desired import Deployment
from afserve.errors import ConfigError
from afserve.member import NodeId, Role

GOING_SECONDS = 5.0  # from Shutdown until the member's stream has ended
HEARD_SECONDS = 0.5  # from when a node serves until gateways know: the next one's turn comes after that
EXIT_SECONDS = 2.0  # from the end of its stream until its process is taken for gone


def check_count(deployment: Deployment, role: Role, count: int, *, room: int) -> None:
    """Raises ConfigError where there cannot be `count` nodes. An expert node has room for `room` experts of a layer."""
    least, most = 1, deployment.most(role)
    if role is Role.EXPERT:
        if deployment.colocated:
            raise ConfigError("scale: a colocated run has no expert nodes", param=role)
        if count >= 1 and count * room < deployment.placement.experts:
            raise ConfigError(
                f"scale: {count} expert nodes have room for {count * room} of the {deployment.placement.experts} "
                "experts of a layer; start with more --redundant-experts to need fewer nodes",
                param=role,
            )
    if role is Role.GATEWAY and not deployment.count(role):
        raise ConfigError(
            "scale: HTTP is served by the controller's process, which is one; start with --gateways 1 to have gateways "
            "whose number can change",
            param=role,
        )
    if count < least:
        raise ConfigError(f"scale: at least one {role} node is needed, {count} were asked for", param=role)
    if count > most:
        raise ConfigError(f"scale: {count} {role} nodes; {_limit(deployment, role)}", param=role)


def _limit(deployment: Deployment, role: Role) -> str:
    most = deployment.most(role)
    if role is Role.ATTENTION:
        return f"expert nodes keep mailboxes for {most}; start with --most-attention to have more"
    return f"there may be {most}"


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
    def busy(self) -> bool:
        return self.node is not None or bool(self.waiting)

    @property
    def under_way(self) -> bool:
        """Whether somebody is still without a new process. Without that the last one's turn may not be over: gateways
        are about to hear that it serves, and whoever waited for it has seen it already."""
        return bool(self.waiting) or (self.node is not None and self.step is not Step.SERVES)

    def ask(self, nodes: Iterable[NodeId]) -> None:
        """Each once, however often it is asked for before it serves again."""
        under_way = None if self.step is Step.SERVES else self.node
        self.waiting.extend(n for n in nodes if n not in self.waiting and n != under_way)

    def begin(self, node: NodeId) -> None:
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

    def due(self, now: float) -> list[Start]:
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

    def clear(self) -> None:
        """Nobody's turn any more; what has been told to go goes, and gets its new process."""
        self.waiting.clear()
        if self.node is not None and self.step is Step.LEAVING:
            self.node = None
