"""Sends what a node draws to the controller while it runs, where the run is over several hosts.

So what a lost host has drawn is there until shortly before. A thread of its own does it: the node only draws.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.control.wire.desired import Deployment
from afserve.control.wire.values import Traced
from afserve.tracing.trace import Trace
from afserve.tracing.trace_part import MOST_EVENTS, TracePart, own_clock

SECONDS = 0.5  # between two messages of a node that draws little


class TraceSender:
    """Of one trace. What it holds stays there, so its own bound is the bound of what is ever sent."""

    def __init__(self, trace: Trace, send: Callable[[Traced], None], clock: Clock | None = None) -> None:
        self._trace, self._send = trace, send
        self._clock = clock or MonotonicClock()
        self._name = own_clock()
        self._slices = self._arrows = self._instants = self._dropped = 0
        self._advice = Adviser("sending what this node draws")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends the rest."""
        self._stop.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Sends everything that is new, in parts."""
        self._advice.ask(self._clock.now(), self._send_new, None)

    def _send_new(self) -> None:
        while (part := self._next()) is not None:
            self._send(Traced(part.pack()))

    def _next(self) -> TracePart | None:
        """The node appends meanwhile, and takes nothing away."""
        slices = self._trace.slices[self._slices : self._slices + MOST_EVENTS]
        arrows = self._trace.arrows[self._arrows : self._arrows + MOST_EVENTS - len(slices)]
        left = MOST_EVENTS - len(slices) - len(arrows)
        instants = self._trace.instants[self._instants : self._instants + left]
        dropped = self._trace.dropped
        if not (slices or arrows or instants or dropped > self._dropped):
            return None
        self._slices, self._arrows = self._slices + len(slices), self._arrows + len(arrows)
        self._instants, self._dropped = self._instants + len(instants), dropped
        return TracePart(self._clock.now(), self._name, slices, arrows, instants, dropped)

    def _run(self) -> None:
        while not self._stop.wait(SECONDS):
            self.look()


@contextmanager
def sent(trace: Trace | None, send: Callable[[Traced], None], deployment: Deployment) -> Iterator[None]:
    """What is drawn within the block is sent, where the run is drawn and over several hosts."""
    if trace is None or not deployment.trace_sent:
        yield
        return
    sender = TraceSender(trace, send)
    sender.start()
    try:
        yield
    finally:
        sender.close()
