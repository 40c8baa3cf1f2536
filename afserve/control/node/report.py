"""Tells the controller what a node has done, from the thread that steps it and between two steps.

Twice per heartbeat a snapshot is published for the heartbeat thread; once, rows routed since then are sent. It knows
neither what the numbers mean nor when they are read.
"""

from collections.abc import Callable
from typing import Protocol

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.control.node.heartbeat import HeartbeatThread, Stats
from afserve.control.node.stream import ControlStream
from afserve.control.wire.placement_values import Routed
from afserve.placement.rebalance.stats import RoutedRows

MOST_ROUTED = 50  # such messages per second of all nodes: of DeepSeek-V3's shape 1.5 MB


def routed_seconds(heartbeat: float, attention: int) -> float:
    """Between two messages with routing counts of one of `attention` nodes: with each heartbeat, where few share.

    Counts add up until they are sent, so none is lost. Example: 1,000 nodes send theirs every 20 s.
    """
    return max(heartbeat, attention / MOST_ROUTED)


class Report(Protocol):
    """Called once per turn of a node's loop; most calls only look at the clock."""

    def __call__(self, *, at_once: bool = False, soon: bool = False) -> None: ...


class Reporter:
    """`routed` is given by attention nodes."""

    def __init__(
        self,
        heartbeat: HeartbeatThread,
        stream: ControlStream,
        stats: Callable[[], Stats],
        routed: Callable[[], RoutedRows] | None = None,
        clock: Clock | None = None,
        *,
        attention: int = 1,
    ) -> None:
        """`attention` nodes share what the controller takes of routing counts."""
        self._heartbeat, self._stream = heartbeat, stream
        self._routed_seconds = routed_seconds(heartbeat.seconds, attention)
        self._stats, self._routed = stats, routed
        self._clock = clock or MonotonicClock()
        self._published = self._sent = self._clock.now()
        self._advice = Adviser("counting what this node does")

    def __call__(self, *, at_once: bool = False, soon: bool = False) -> None:
        """`at_once` sends counts too; `soon` asks for a heartbeat before its time, with what is published here."""
        now, seconds = self._clock.now(), self._heartbeat.seconds
        if now - self._published >= seconds / 2 or at_once or soon:
            self._published = now
            if (stats := self._advice.ask(now, self._stats, None)) is not None:
                self._heartbeat.publish(stats)
            if soon:
                self._heartbeat.hurry()
        if self._routed is not None and (now - self._sent >= self._routed_seconds or at_once):
            self._sent = now
            if rows := self._advice.ask(now, self._routed, None):
                self._stream.send(Routed(rows))


def silent(*, at_once: bool = False, soon: bool = False) -> None:
    """Of a loop that nobody listens to."""
