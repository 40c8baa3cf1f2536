"""Time as a value that is passed in: the real clock, one that skips pauses, and a fake one that tests move by hand."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from an arbitrary origin, never going back."""


class MonotonicClock:
    """`now` is the function itself: a step reads it twice per layer, and a method around it costs as much again."""

    now = staticmethod(time.monotonic)


class WallClock:
    """Unix seconds, which several processes and lives of one agree on. It may be set back."""

    now = staticmethod(time.time)


class AwakeClock:
    """Seconds during which whoever polls this clock was running; for deadlines by which others are judged.

    A process that is stopped (SIGSTOP, Ctrl-Z, a paused virtual machine) sees no time pass in `time.monotonic` either,
    until it goes on: then 20 s seem to be over at once, and everyone else looks late. This clock lets one gap between
    two calls of `now` count for `most` seconds at the most. Example: polled every 0.5 s, a pause of 20 s adds 1 s.
    It must be polled more often than every `most` seconds while somebody waits, or it runs slow.
    """

    def __init__(self, most: float = 1.0, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._most = most
        self._lock = threading.Lock()
        self._last = self._clock.now()
        self._skipped = 0.0

    def now(self) -> float:
        with self._lock:
            real = self._clock.now()
            gap, self._last = real - self._last, real
            if gap > self._most:
                self._skipped += gap - self._most
            return real - self._skipped


class FakeClock:
    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds} s")
        self._now += seconds
