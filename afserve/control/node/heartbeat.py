"""A node's sign of life: a thread that sends a heartbeat now and then, and ends a process that outlives its controller.

The main thread is told through the stream; if it has not left some seconds after the stream ended, the process
is stuck in a computation and is ended from here.
"""

import os
import threading
import time

import psutil

from afserve.adviser import Adviser
from afserve.control.node.stream import ControlStream
from afserve.control.wire.desired import shortest_silence
from afserve.control.wire.values import Heartbeat
from afserve.engine.stats import AttentionStats, ExpertStats

Stats = AttentionStats | ExpertStats | None
SECONDS = 1.0  # between two heartbeats, at most
HURRY_SECONDS = 0.1  # from a change that should be seen to its heartbeat, so at most ten of them in a second
ORPHAN_SECONDS = 5.0
ORPHAN_EXIT = 70


def heartbeat_seconds(silence: float, nodes: int) -> float:
    """Between two heartbeats: whoever says nothing for `silence` seconds has missed three.

    Each of many nodes says fewer, MOST_HEARTBEATS a second together, where `silence` lets them.
    """
    return min(silence / 3, max(SECONDS, shortest_silence(nodes) / 3))


class HeartbeatThread:
    """Sends the snapshot that was published last. It never asks the node, which another thread is stepping."""

    def __init__(self, stream: ControlStream, stats: Stats, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._published = stats
        self._stream = stream
        self._stop = threading.Event()
        self._hurried = threading.Event()
        self._process = psutil.Process()
        self._resident = 0
        self._memory_advice = Adviser("measuring this process's memory")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._hurried.set()
        self._thread.join(timeout=1.0)

    def publish(self, stats: Stats) -> None:
        """What heartbeats say from now on. By the thread that steps the node, between two steps."""
        self._published = stats

    def hurry(self) -> None:
        """Send what was published within a tenth of a second, not only when it is time again."""
        self._hurried.set()

    def resident_bytes(self) -> int:
        """As it was last, where that cannot be told now: the sign of life matters more."""
        now = time.monotonic()
        self._resident = self._memory_advice.ask(now, lambda: self._process.memory_info().rss, self._resident)
        return self._resident

    def _beat(self) -> None:
        while not self._stop.is_set():
            hurried = self._hurried.wait(self.seconds)
            if self._stop.is_set():
                return
            if self._stream.ended:
                self._end_orphan()
            if hurried:
                self._stop.wait(min(HURRY_SECONDS, self.seconds))  # what changes meanwhile goes along
                self._hurried.clear()
            self._stream.send(Heartbeat(self.resident_bytes(), self._published))

    def _end_orphan(self) -> None:
        if not self._stop.wait(ORPHAN_SECONDS):
            os._exit(ORPHAN_EXIT)
