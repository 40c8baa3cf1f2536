"""What a process that watches others knows of itself: how late its own looks come, and how busy its host is."""

from collections.abc import Callable

from afserve.clock import Clock, MonotonicClock
from afserve.control.membership.silence import HostLoad
from afserve.control.pressure import cpu_pressure

MOST_LATE = 1.0  # seconds: a pause of this process, however long, says no more about its host
_READ_SECONDS = 1.0  # between two looks at the kernel's numbers, which are of ten seconds


class HostWatch:
    """Called every `every` seconds; returns what is known then."""

    def __init__(
        self, every: float, clock: Clock | None = None, pressure: Callable[[], float | None] = cpu_pressure
    ) -> None:
        self._every, self._clock, self._read = every, clock or MonotonicClock(), pressure
        self._called: float | None = None
        self._pressure: float | None = None
        self._read_at = float("-inf")

    def __call__(self) -> HostLoad:
        now = self._clock.now()
        late = 0.0 if self._called is None else now - self._called - self._every
        self._called = now
        if now - self._read_at >= _READ_SECONDS:
            self._read_at, self._pressure = now, self._read()
        return HostLoad(min(MOST_LATE, max(0.0, late)), self._pressure)
