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
_AGAIN = 0.005  # seconds in which that is to happen twice, and until it moves once more: the scheduler may know better
this_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)


class Aside:
    """Of one thread. Where it is bound to one core, it stays there."""

    def __init__(self) -> None:
        self._moved = self._taken = float("-inf")

    def give_way(self) -> bool:
        """Lets another runnable thread have this core. Whether one took it for long, and not for the first time: the
        other end may leave it by itself."""
        before = monotonic()
        os.sched_yield()
        now = monotonic()
        if now - before <= _TAKEN_AWAY:
            return False
        again, self._taken = now - self._taken < _AGAIN, now
        return again

    def leave(self, core: int) -> None:
        """The thread that this one works with was last on that core: if it is the caller's, it goes on elsewhere."""
        now = monotonic()
        if core < 0 or core != this_core() or now - self._moved < _AGAIN:
            return
        self._moved, cores = now, os.sched_getaffinity(0)
        if others := cores - {core}:
            try:
                os.sched_setaffinity(0, others)
                os.sched_setaffinity(0, cores)
            except OSError:
                return  # it may not, or the cores have changed meanwhile
