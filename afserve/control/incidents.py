"""What a running deployment went through: lost nodes, their return, experts that were loaded. For people and metrics.

The controller tells it what the membership noticed and what attention nodes have counted; it keeps the last incidents,
each with the time that rows waited because of it, and counts all of them. No sockets, no clock.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace

from afserve.control.membership.events import Happening, Incident
from afserve.control.wire.view_values import IncidentView
from afserve.engine.stats import AttentionStats
from afserve.member import Life, NodeId, Role

log = logging.getLogger("afserve.incidents")

KEPT = 20
CAUSES = (
    "unnoticed",
    "resend",
    "homeless",
)  # of waits for a lost expert node: AttentionStats has their seconds
_LEVEL = {
    Happening.LOST: logging.WARNING,
    Happening.UNREAD: logging.WARNING,
    Happening.FAILING: logging.ERROR,
}


class Incidents:
    """`lost` counts nodes by role and cause, `stalled` has seconds by cause, summed over dispatches of all nodes."""

    def __init__(self) -> None:
        self.lost: Counter[tuple[str, str]] = Counter()
        self.stalled: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self.reloaded_bytes = 0
        self.resent_rows = 0
        self._last: deque[IncidentView] = deque(maxlen=KEPT)
        self._told: dict[NodeId, tuple[Life, AttentionStats]] = {}  # the last life of each place

    def note_incident(self, incident: Incident, at: float) -> None:
        """`at` in Unix seconds."""
        self._last.append(_view(incident, at))
        self.reloaded_bytes += incident.bytes
        if incident.what is Happening.LOST:
            self.lost[str(incident.who.role), str(incident.cause)] += 1
        log.log(_LEVEL.get(incident.what, logging.INFO), "%s", incident)

    def count_stalls(self, member: Life, stats: AttentionStats) -> None:
        """What an attention node has counted since its start. Waits belong to the last expert node that was lost."""
        life, before = self._told.get(member.node, (member, AttentionStats()))
        if life != member:
            before = AttentionStats()
        self._told[member.node] = member, stats
        self.resent_rows += max(0, stats.resent_rows - before.resent_rows)
        waited = 0.0
        for cause in CAUSES:
            more = max(0.0, getattr(stats, f"{cause}_seconds") - getattr(before, f"{cause}_seconds"))
            self.stalled[cause] += more
            waited += more
        if stats.stalled > before.stalled:
            self._attribute(waited / (stats.stalled - before.stalled))

    def _attribute(self, stall: float) -> None:
        """The longest mean of any report counts."""
        for number in reversed(range(len(self._last))):
            found = self._last[number]
            if found.what == Happening.LOST and found.role == Role.EXPERT:
                if stall > found.stall:
                    self._last[number] = replace(found, stall=stall)
                    log.info("%s was lost: rows waited %.0f ms for replicas", found.node, stall * 1e3)
                return

    @property
    def last(self) -> tuple[IncidentView, ...]:
        """Oldest first."""
        return tuple(self._last)

    def lost_nodes(self) -> Mapping[str, Mapping[str, int]]:
        """How many, by role and cause."""
        roles = sorted({role for role, _ in self.lost})
        return {role: {c: n for (r, c), n in sorted(self.lost.items()) if r == role} for role in roles}


def _view(incident: Incident, at: float) -> IncidentView:
    return IncidentView(
        at,
        str(incident.what),
        str(incident.who),
        str(incident.who.role),
        incident.generation,
        str(incident.cause or ""),
        incident.why,
        incident.did,
        incident.seconds,
    )
