"""Where experts stand: when another placement is thought out, which ones are taken, and which experts cannot be read.

An expert is tried on a few nodes and then nowhere, for most of them read the same files.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from afserve.control.membership.announcing import Announcer
from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import Effect, Happening, Incident, Place, Replan
from afserve.control.membership.members import NO_EPOCH
from afserve.control.membership.migration import holders
from afserve.control.membership.roster import Member, State
from afserve.control.wire.placement_values import Unfilled
from afserve.errors import ConfigError
from afserve.member import NodeId, Role
from afserve.placement.recovery import Barred, LayerExpert

TRIED = 3  # nodes: where so many could not read an expert, no other is asked
_LONGEST = 10.0  # seconds


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

    def note_unread(self, node: int, experts: Iterable[LayerExpert], now: float) -> bool:
        """This expert node could not read them. Whether that is new since all could be read: tries go on for hours."""
        if not self._nodes:
            self._until = now + min(self.pause * 2.0 ** min(self._tries, 30), _LONGEST)
            self._tries += 1
        for expert in experts:
            self._nodes.setdefault(expert, set()).add(node)
        new = node not in self._told
        self._told.add(node)
        return new

    def waits_for_node(self, node: int) -> bool:
        """Whether this node has something to wait for."""
        return any(node in nodes for nodes in self._nodes.values())

    def barred(self, nodes: Collection[int]) -> Barred:
        """Of all expert nodes."""
        everybody = frozenset(nodes)
        return {
            expert: everybody if len(tried) >= TRIED else frozenset(tried)
            for expert, tried in self._nodes.items()
        }

    def retry_due(self, now: float) -> bool:
        """Whether all are to be tried again, from now on; said once."""
        if not self._nodes or now < self._until:
            return False
        self._nodes.clear()
        return True

    def note_all_read(self) -> None:
        """Experts were loaded, and none is left out: the next that cannot be read is a first one."""
        if not self._nodes:
            self._tries = 0
            self._told.clear()


class ExpertPlacing:
    """Thinking out is done elsewhere (`balancing.py`): asked for by `Replan`, answered by `Place`."""

    def __init__(self, state: ClusterState, announcer: Announcer) -> None:
        self.unreadable = UnreadableExperts()
        self._state, self._announcer = state, announcer
        # Expert nodes that a placement is being thought out for, and that the one in force or under way was.
        self._asked: frozenset[int] | None = None
        self._seen: frozenset[int] | None = None
        self._first = frozenset(range(state.deployment.count(Role.EXPERT)))

    def place(self, event: Place, now: float) -> list[Effect]:
        """Raises ConfigError for a placement that cannot be reached from the one in force."""
        state = self._state
        if event.nodes is not None:
            self._asked = None
            if event.nodes != state.holders() or not state.migration.steady:
                return []  # who can hold experts has changed since it was thought out
        elif state.migration.holding - state.answering():
            raise ConfigError(
                "the placement cannot change while an expert node is away; try again", param="placement"
            )
        elif self.unreadable:
            raise ConfigError(
                "the placement cannot change while weights of experts cannot be read; the log says which",
                param="placement",
            )
        elif strangers := [node for node in holders(event.placement) if node.index not in state.holders()]:
            names = ", ".join(map(str, sorted(strangers)))
            raise ConfigError(f"the placement puts experts on {names}, not serving now", param="placement")
        way = state.migration.begin_move(event.placement, now, event.route, urgent=event.urgent)
        effects = self._announcer.relay(way)
        self._seen = state.holders()
        return effects

    def replan(self) -> list[Effect]:
        """Ask for another placement when the expert nodes that are to hold experts are not those that do."""
        state = self._state
        if state.deployment.colocated or not state.settled or not state.migration.steady:
            return []
        holders, placement = state.holders(), state.migration.placement
        held = state.migration.holding
        if holders == self._asked or (held <= holders and holders in (held, self._seen)):
            return []
        if len(holders) * placement.slots_per_node() < placement.experts:
            return []  # rows for what nobody holds wait until somebody does
        lost = held - state.answering()
        if self.unreadable and not lost:
            return []  # what is only wished for is tried again later
        self._asked = holders
        return [Replan(holders, lost, self.unreadable.barred(holders))]

    def replan_anew(self) -> None:
        """What is being thought out does not count any more."""
        self._asked = None

    def accept_first(self) -> None:
        """The run begins as it was asked for."""
        self._seen = self._first

    def resume(self) -> None:
        """The placement in force was thought out for all places, under another controller."""
        self._seen = frozenset(node.index for node in self._state.members.places(Role.EXPERT))

    def report_unfilled(self, member: Member, said: Unfilled, now: float) -> list[Effect]:
        """A fill that cannot be read costs that fill: whoever says so keeps what it has. Raises ProtocolError."""
        effects: list[Effect] = []
        if member.state is State.LOADING and said.epoch == member.asked:
            member.asked = NO_EPOCH
        else:
            effects = self._announcer.relay(self._state.migration.unfilled(member.node, said.epoch, now))
        why = f"{len(said.experts)} for epoch {said.epoch}, such as: {said.why}"
        return [*effects, *self._note_unread(member.node, said.experts, why, now)]

    def give_up_late_fills(self, why: str, now: float) -> list[Effect]:
        """A disk that does not answer costs the fill, as one that fails does."""
        told, late = self._state.migration.give_up_late()
        said = [e for node, experts in late.items() for e in self._note_unread(node, experts, why, now)]
        return [*self._announcer.relay(told), *said]

    def _note_unread(
        self, node: NodeId, experts: Collection[LayerExpert], why: str, now: float
    ) -> list[Incident]:
        self._asked = None
        if not self.unreadable.note_unread(node.index, experts, now):
            return []
        did = "it keeps what it has; other nodes take them where they can, else they are tried again"
        return [Incident(Happening.UNREAD, node, why, did=did)]

    def retry_unreadable(self, now: float) -> None:
        """What could not be read is asked for once more."""
        if self.unreadable.retry_due(now):
            self._asked = None
