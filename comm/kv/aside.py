"""How a thread that waits by looking gives way: to who shares its core, and then by going to another core.

Two threads that wake each other may be put on one core while another one is idle: a scheduler takes who wakes somebody
for about to sleep, and a virtual processor that is halted for a busy one. Then the two copy one after the other, which
costs up to half of a transfer, until the scheduler looks again. It knows no blocks and no sockets.
"""

import ctypes
import os
from collections.abc import Callable
from time import monotonic

_TAKEN_AWAY = 100e-6  # seconds that a yield may take before the core counts as shared
_AGAIN = 0.005  # seconds until it moves once more: where every core is busy, the scheduler knows better
this_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)


class Aside:
    """Of one thread. Where it is bound to one core, it stays there."""

    def __init__(self) -> None:
        self._moved = float("-inf")

    def give_way(self) -> None:
        """Lets another runnable thread have this core. Where one took it for long, the caller goes on elsewhere."""
        before = monotonic()
        os.sched_yield()
        now = monotonic()
        if now - before > _TAKEN_AWAY and now - self._moved > _AGAIN:
            self._moved = now
            self._move()

    def _move(self) -> None:
        cores, here = os.sched_getaffinity(0), this_core()
        if others := cores - {here}:
            try:
                os.sched_setaffinity(0, others)
                os.sched_setaffinity(0, cores)
            except OSError:
                return  # it may not, or the cores have changed meanwhile
