"""What a running deployment went through: lost nodes, their return, experts that were loaded. For people and metrics.

It is told by the controller, keeps the last of them in words, and counts all. No sockets, no clock.
"""

import logging
from collections import Counter, deque

from afserve.control.membership.events import Happening, Incident

log = logging.getLogger("afserve.incidents")

_KEPT = 100
_LEVEL = {Happening.LOST: logging.WARNING, Happening.GIVEN_UP: logging.ERROR}


class Incidents:
    """`counts` are by what happened, `seconds` how long it took in all, where that is known."""

    def __init__(self) -> None:
        self.counts: Counter[Happening] = Counter()
        self.seconds: Counter[Happening] = Counter()
        self._last: deque[Incident] = deque(maxlen=_KEPT)

    def note(self, incident: Incident) -> None:
        self._last.append(incident)
        self.counts[incident.what] += 1
        self.seconds[incident.what] += incident.seconds  # type: ignore[assignment]
        log.log(_LEVEL.get(incident.what, logging.INFO), "%s", incident)

    @property
    def last(self) -> tuple[Incident, ...]:
        """Oldest first."""
        return tuple(self._last)
