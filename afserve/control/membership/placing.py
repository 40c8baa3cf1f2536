"""Where experts stand: when another placement is thought out, and which ones are taken."""

from collections.abc import Collection

from afserve.control.membership.events import Effect, Happening, Incident, Place, Replan
from afserve.control.membership.members import NO_EPOCH
from afserve.control.membership.migration import holders
from afserve.control.membership.roster import Member, State
from afserve.control.membership.tables import Tables
from afserve.control.wire.values import Unfilled
from afserve.errors import ConfigError
from afserve.member import NodeId
from afserve.placement.recovery import LayerExpert


class Placing(Tables):
    """Thinking out is done elsewhere (`balancing.py`): asked for by `Replan`, answered by `Place`."""

    def _placed(self, event: Place, now: float) -> list[Effect]:
        """Raises ConfigError for a placement that cannot be reached from the one in force."""
        if event.nodes is not None:
            self._asked = None
            if event.nodes != self.holders() or not self.migration.steady:
                return []  # who can hold experts has changed since it was thought out
        elif self._away():
            raise ConfigError(
                "the placement cannot change while an expert node is away; try again", param="placement"
            )
        elif self._unreadable:
            raise ConfigError(
                "the placement cannot change while weights of experts cannot be read; the log says which",
                param="placement",
            )
        elif strangers := [node for node in holders(event.placement) if node.index not in self.holders()]:
            names = ", ".join(map(str, sorted(strangers)))
            raise ConfigError(f"the placement puts experts on {names}, not serving now", param="placement")
        effects = self._tell(self.migration.begin(event.placement, now, event.route, urgent=event.urgent))
        self._seen = self.holders()
        return effects

    def _replan(self) -> list[Effect]:
        """Ask for another placement when the expert nodes that are to hold experts are not those that do."""
        if self.deployment.colocated or not self.settled or not self.migration.steady:
            return []
        holders, placement = self.holders(), self.migration.placement
        held = self.migration.holding
        if holders == self._asked or (held <= holders and holders in (held, self._seen)):
            return []
        if len(holders) * placement.slots_per_node() < placement.experts:
            return []  # rows for what nobody holds wait until somebody does
        lost = held - self._answering()
        if self._unreadable and not lost:
            return []  # what is only wished for is tried again later
        self._asked = holders
        return [Replan(holders, lost, self._unreadable.barred(holders))]

    def _cannot_fill(self, member: Member, said: Unfilled, now: float) -> list[Effect]:
        """A fill that cannot be read costs that fill: whoever says so keeps what it has."""
        if member.state is State.LOADING and said.epoch == member.asked:
            member.asked, effects = NO_EPOCH, []
        else:
            effects = self._tell(self.migration.unfilled(member.node, said.epoch, now))
        why = f"{len(said.experts)} for epoch {said.epoch}, such as: {said.why}"
        return [*effects, *self._unread(member.node, said.experts, why, now)]

    def _unread(self, node: NodeId, experts: Collection[LayerExpert], why: str, now: float) -> list[Incident]:
        self._asked = None
        if not self._unreadable.note(node.index, experts, now):
            return []
        did = "it keeps what it has; other nodes take them where they can, else they are tried again"
        return [Incident(Happening.UNREAD, node, why, did=did)]

    def _read_again(self, now: float) -> None:
        """What could not be read is asked for once more."""
        if self._unreadable.due(now):
            self._asked = None
