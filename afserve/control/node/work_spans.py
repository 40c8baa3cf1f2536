"""What an expert node tells a collector: a span for each `SECONDS` in which it computed, with what it did meanwhile.

An expert call has rows of many requests, so there is none per request. Spans of all expert nodes over the same seconds
are one trace, which shows the nodes beside one another. Costs nothing per message.
"""

import hashlib
import secrets
from collections.abc import Callable

from afserve.adviser import Adviser
from afserve.clock import Clock, WallClock
from afserve.control.node.journal import Put
from afserve.engine.stats import ExpertStats
from afserve.tracing import otlp

SECONDS = 2.0
_TOLD = ("messages", "rows", "calls", "busy_seconds", "prompt_pieces", "prompt_seconds")


class WorkSpans:
    """Of `node`, whose totals `stats` gives. Nodes with the same `run` share traces."""

    def __init__(
        self, node: str, stats: Callable[[], ExpertStats], put: Put, run: str, clock: Clock | None = None
    ) -> None:
        self._node, self._stats, self._put, self._run = node, stats, put, run
        self._clock = clock or WallClock()
        self._began, self._before = self._clock.now(), stats()
        self._advice = Adviser("drawing spans of this node's work")

    def stats(self) -> ExpertStats:
        """The totals; asked several times a second, as for heartbeats."""
        now, totals = self._clock.now(), self._stats()
        if now < self._began or now // SECONDS != self._began // SECONDS:
            self._advice.ask(now, lambda: self._tell(now, totals), None)
            self._began, self._before = now, totals
        return totals

    def close(self) -> None:
        """Tells the work of the seconds that have begun."""
        now = self._clock.now()
        self._advice.ask(now, lambda: self._tell(now, self._stats()), None)

    def _tell(self, now: float, totals: ExpertStats) -> None:
        if now <= self._began or totals.messages <= self._before.messages:
            return
        window = f"{self._run} {self._began // SECONDS:.0f}"
        trace = hashlib.sha256(window.encode()).hexdigest()[:32]
        said: dict[str, str | int | float] = {"afserve.node": self._node}
        for name in _TOLD:
            said[f"afserve.{name}"] = round(getattr(totals, name) - getattr(self._before, name), 6)
        ids = otlp.SpanIds(trace, secrets.token_hex(8))
        self._put(otlp.span(ids, f"expert {self._node}", self._began, now, said))
