"""Records what a node does for a moment, when the controller asks, and tells it: one comparison while nobody asks.

A node that draws a trace for the whole run (`up --trace`) goes on with it; others draw into one of their own meanwhile.
"""

from collections.abc import Callable
from typing import Protocol

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.control.wire.values import Record, Recorded
from afserve.tracing.recording import MOST_SLICES, Recording
from afserve.tracing.trace import Slice, Trace

MOST_SECONDS = 5.0


class Drawing(Protocol):
    """What a `Recorder` needs of an attention or expert node."""

    trace: Trace | None

    def drawn_open(self) -> list[Slice]: ...


class Recorder:
    """Of the thread that steps the node. `name` is the node's."""

    def __init__(
        self, node: Drawing, name: str, send: Callable[[Recorded], None], clock: Clock | None = None
    ) -> None:
        self.active = False
        self._node, self._name, self._send = node, name, send
        self._clock = clock or MonotonicClock()
        self._asked = Record(0, 0.0)
        self._lasting: Trace | None = None  # the one that the node had before
        self._trace = Trace(name)
        self._first = 0
        self._began = 0.0
        self._advice = Adviser("recording what this node does")

    def begin(self, asked: Record) -> None:
        """One at a time: another question replaces the one that is not answered yet."""
        self._advice.ask(self._clock.now(), lambda: self._begin(asked), None)

    def _begin(self, asked: Record) -> None:
        if not self.active:
            self._lasting = self._node.trace
        self._trace = self._lasting or Trace(self._name)
        self._node.trace = self._trace
        self._asked, self._first, self._began = asked, len(self._trace.slices), self._clock.now()
        self.active = True

    def look(self) -> None:
        """Answers when it is time, or when there is as much as one answer takes."""
        if not self.active:
            return
        now = self._clock.now()
        drawn = len(self._trace.slices) - self._first
        if now - self._began < min(self._asked.seconds, MOST_SECONDS) and drawn < MOST_SLICES:
            return
        self.active = False
        self._node.trace = self._lasting
        self._advice.ask(now, lambda: self._answer(now), None)

    def _answer(self, now: float) -> None:
        slices = (*self._trace.slices[self._first :], *self._node.drawn_open())
        self._send(Recorded(self._asked.number, Recording(self._name, self._began, now, slices).pack()))
