"""Draws the gateway's part of a trace: each request on a track of its own, waiting for its first token, then streaming.

A track is taken again once its request has ended, so a run has as many as it had requests at once.
"""

import heapq
from collections.abc import Mapping

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.tracing.trace import Trace


class RequestTrace:
    """Off without a trace. Times are of the clock that all processes of this machine share."""

    def __init__(self, trace: Trace | None, clock: Clock | None = None) -> None:
        self.trace = trace
        self._clock = clock or MonotonicClock()
        self._advice = Adviser("drawing requests")
        self._free: list[int] = []
        self._tracks = 0

    def begin(self) -> "DrawnRequest":
        nowhere = DrawnRequest(None, "", 0.0)
        return nowhere if self.trace is None else self._advice.ask(self._clock.now(), self._begin, nowhere)

    def _begin(self) -> "DrawnRequest":
        if not self._free:
            heapq.heappush(self._free, self._tracks)
            self._tracks += 1
        number = heapq.heappop(self._free)
        return DrawnRequest(self, f"request {number:03}", self._clock.now())

    def drew(self, track: str, name: str, since: float) -> float:
        assert self.trace is not None
        trace, now = self.trace, self._clock.now()
        self._advice.ask(now, lambda: trace.slice(track, name, since, now), None)
        return now

    def counts(self, name: str, values: Mapping[str, int]) -> None:
        """Numbers from now on."""
        if (trace := self.trace) is not None:
            now = self._clock.now()
            self._advice.ask(now, lambda: trace.counts(name, values, now), None)

    def release(self, track: str) -> None:
        heapq.heappush(self._free, int(track.rpartition(" ")[2]))


class DrawnRequest:
    def __init__(self, owner: RequestTrace | None, track: str, began: float) -> None:
        self._owner, self._track, self._since = owner, track, began
        self._answered = False

    def token(self) -> None:
        """The first one ends the wait."""
        if self._owner is not None and not self._answered:
            self._answered = True
            self._since = self._owner.drew(self._track, "wait for the first token", self._since)

    def end(self) -> None:
        if self._owner is not None:
            self._owner.drew(self._track, "stream" if self._answered else "no token", self._since)
            self._owner.release(self._track)
