"""Requests that wait for blocks: in a queue until there is room, then under the number of what brings them.

One table for whoever has such requests: it knows limits, who waits for the same number, and what a cancelled one stops.
What a number stands for, a transfer or a restoration, and what its end means is its owner's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from afserve.engine.scheduling.request import GenerationRequest

LEAST_SECONDS, MOST_SECONDS = 1.0, 30.0  # limits of what is worth waiting for
UNKNOWN_SECONDS = 2.0  # where no prompt was computed here yet
_SHARE, _LONGEST, _IDLE = 0.1, 0.01, 0.02  # of a busy node's time, seconds of it at a time, of an idle one's


@dataclass(frozen=True, slots=True)
class Job:
    """A request that waits since then, for `limit` seconds at most."""

    request: GenerationRequest
    since: float
    limit: float

    def left(self, now: float) -> float:
        """Seconds until its limit."""
        return self.since + self.limit - now


AnyJob = TypeVar("AnyJob", bound=Job)


class Jobs(Generic[AnyJob]):
    """`stop` is told the number of what nobody waits for any more."""

    def __init__(self, stop: Callable[[int], None] = lambda number: None) -> None:
        self._stop = stop
        self.queue: list[AnyJob] = []
        self._under_way: dict[int, list[AnyJob]] = {}

    def __len__(self) -> int:
        return len(self.queue) + self.running

    @property
    def running(self) -> int:
        """Those under way."""
        return sum(map(len, self._under_way.values()))

    @property
    def under_way(self) -> list[AnyJob]:
        return [job for jobs in self._under_way.values() for job in jobs]

    def wait_for(self, job: AnyJob, number: int) -> None:
        """From now on it waits for what has this number."""
        if job in self.queue:
            self.queue.remove(job)
        self._under_way.setdefault(number, []).append(job)

    def take_late(self, now: float) -> list[AnyJob]:
        """Those that were queued until their limit."""
        late = [job for job in self.queue if job.left(now) <= 0]
        self.queue = [job for job in self.queue if job.left(now) > 0] if late else self.queue
        return late

    def take_waiting(self, number: int) -> list[AnyJob]:
        """Who waited for it, the first one first; nobody for a number that is not known."""
        return self._under_way.pop(number, [])

    def forget_request(self, handle: int) -> None:
        """This request waits no more. May be said of any."""
        self.queue = [job for job in self.queue if job.request.handle != handle]
        for number, jobs in list(self._under_way.items()):
            self._under_way[number] = [job for job in jobs if job.request.handle != handle]
            if not self._under_way[number]:
                del self._under_way[number]
                self._stop(number)


def limit_of(computing: float) -> float:
    """Seconds that may be waited for blocks that take so long to compute; 0: that was not measured yet."""
    return min(MOST_SECONDS, max(LEAST_SECONDS, computing or UNKNOWN_SECONDS))


class TurnTime:
    """How much of a node's time goes to moving blocks."""

    def __init__(self, now: float) -> None:
        self._turned = now

    def seconds(self, now: float, *, busy: bool) -> float:
        """Of the turn that begins now."""
        took, self._turned = now - self._turned, now
        return min(_SHARE * took, _LONGEST) if busy else _IDLE
