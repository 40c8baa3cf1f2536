"""How long a waiter busy-polls before it parks, for waits on sockets; the native board has the same rule for flags.

It polls for up to twice the usual wait. Example: if answers usually take 60 us, it polls for at most 120 us. It polls
for only 2 us where waits usually take more than 300 us, and not at all for some waits after another thread took the
core.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

_Found = TypeVar("_Found")

_LONGEST = 300e-6  # s: a wake-up on an idle core takes some 50 us at either end
_SHORTEST = 2e-6  # s
_TAKEN_AWAY = 20e-6  # s that a yield may take before the cores count as contended
_SHY_WAITS = 64  # waits without looking again after that, at most: one at first, twice as many each time
_WEIGHT = 1 / 8  # of the newest wait in the usual one


class BusyPoll:
    """Of one waiter. `clock` returns seconds; `give_way` lets another runnable thread have the core."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, give_way: Callable[[], None] = os.sched_yield
    ) -> None:
        self._clock, self._give_way = clock, give_way
        self._usual = _LONGEST / 4
        self._shy = self._shyness = 0
        self._began = self._until = 0.0

    def begin(self, limit: float) -> None:
        """A wait of at most `limit` seconds begins."""
        self._began = self._until = self._clock()
        if self._shy:
            self._shy -= 1
        else:
            budget = min(2 * self._usual, _LONGEST) if self._usual < _LONGEST else _SHORTEST
            self._until += min(budget, limit)

    def look(self, look: Callable[[], Sequence[_Found]]) -> Sequence[_Found]:
        """What `look` finds before it is time to park; nothing then."""
        found = look()
        now = self._clock()
        while not found and now < self._until:
            self._give_way()
            before, now = now, self._clock()
            found = look()
            if now - before > _TAKEN_AWAY:
                self._shy = self._shyness = min(max(1, 2 * self._shyness), _SHY_WAITS)
                self._until = now
        return found

    def end(self) -> None:
        """The wait is over, however it ended."""
        now = self._clock()
        if now <= self._until:
            self._shyness //= 2
        self._usual += _WEIGHT * (min(now - self._began, 10 * _LONGEST) - self._usual)
