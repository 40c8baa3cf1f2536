"""Where experts stand: when another placement is thought out, and which ones are taken."""

from afserve.control.membership.events import Effect, Place, Replan
from afserve.control.membership.migration import holders
from afserve.control.membership.tables import Tables
from afserve.errors import ConfigError


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
        self._asked = holders
        return [Replan(holders, held - self._answering())]
