"""Says in the log who was turned away and why, and no more often than a reader can follow: then only how many."""

import logging
import threading
import time
from collections.abc import Callable

_SPAN = 10.0  # s
_LINES = 5  # in a span


class Refusals:
    """Of one place. `clock` is in seconds."""

    def __init__(self, log: logging.Logger, place: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._place, self._clock = log, place, clock
        self._lock = threading.Lock()
        self._began = -_SPAN
        self._said = self._unsaid = 0

    def log_refusal(self, who: str, why: str) -> None:
        """From any thread."""
        self.say_unsaid()
        with self._lock:
            says = self._said < _LINES
            self._said += says
            self._unsaid += not says
        if says:
            self._log.warning("%s: %s was turned away: %s", self._place, who, why)

    def say_unsaid(self) -> None:
        """Where a span is over, say how many were not said, and begin another one."""
        with self._lock:
            if self._clock() - self._began < _SPAN:
                return
            unsaid, self._said, self._unsaid, self._began = self._unsaid, 0, 0, self._clock()
        if unsaid:
            self._log.warning("%s: %d more were turned away within %g s", self._place, unsaid, _SPAN)
