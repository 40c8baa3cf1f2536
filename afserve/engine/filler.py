"""Fills spare slots of an expert bank in the background while the bank serves: at a bounded rate, or as fast as it can.

An expert that cannot be read costs its own fill: the others go on, and the set of fills ends with what is missing.
One thread per node, asleep unless there is something to load. It never touches a slot that is in use: whoever hands
it fills has made sure of that (`migrate.SlotUse`). It knows no epochs' meaning, only when a set of fills is complete.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from afserve.errors import AfserveError
from afserve.placement.placement import FREE, Fill

log = logging.getLogger("afserve.engine")


class Slots(Protocol):
    expert_bytes: int

    def fill(self, layer: int, slot: int, expert: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """All fills of an epoch are done: how many experts and bytes, and the seconds from the first to the last.

    `unread` could not be; `why` is of the first. What their slots hold now is in none of them known.
    """

    epoch: int
    experts: int
    bytes: int
    seconds: float
    unread: tuple[Fill, ...] = ()
    why: str = ""


@dataclass(slots=True, eq=False)
class _Job:
    epoch: int
    todo: deque[Fill]
    pause: float
    began: float | None = None
    done: int = 0
    begun: Fill | None = None
    unread: list[Fill] = field(default_factory=list)
    why: str = ""

    @property
    def left(self) -> list[Fill]:
        """What it would still do, and what it has begun to no known end."""
        unknown = self.unread if self.begun is None else [*self.unread, _unknown(self.begun)]
        return [*self.todo, *unknown]


class Filler:
    """`bytes_per_second` bounds how much of the memory bandwidth serving has to share. `inside`: what each fill is done
    in, where a device may still read what is overwritten (`device_queues.alone_on`). `start` before use."""

    def __init__(
        self,
        slots: Slots,
        bytes_per_second: float = 1e9,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._slots, self._inside = slots, inside
        self._pause = slots.expert_bytes / bytes_per_second
        self._jobs: deque[_Job] = deque()
        self._done: deque[Loaded] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="slot-filler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, epoch: int, fills: Sequence[Fill], *, urgent: bool = False) -> None:
        """Load these after those submitted before; `finished` reports the epoch. `urgent` is not slowed down."""
        with self._changed:
            self._jobs.append(_Job(epoch, deque(fills), 0.0 if urgent else self._pause))
            self._changed.notify()

    def abandon(self, epoch: int) -> Sequence[Fill]:
        """Nobody waits for this epoch any more: the fills that were not done, and what their slots hold."""
        with self._changed:
            left = [fill for job in self._jobs if job.epoch == epoch for fill in job.left]
            self._jobs = deque(job for job in self._jobs if job.epoch != epoch)
            self._changed.notify()
            return left

    def finished(self) -> list[Loaded]:
        """What was completed since the last call."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
            return done

    def close(self) -> None:
        """Stop after the expert being loaded."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while self._await():
            self.work()

    def work(self) -> None:
        """The first fill of the first job, if there is one. For the thread, or for who drives a filler without one."""
        if (work := self._next()) is not None:
            job, fill = work
            why = self._failed(fill)
            if why:
                self._not_loaded(job, fill, why)
            else:
                self._loaded(job)

    def _failed(self, fill: Fill) -> str:
        """Why it could not be done; empty where it was."""
        try:
            with self._inside():
                self._slots.fill(fill.layer, fill.slot, fill.expert)
        except AfserveError as error:
            return error.message
        except Exception as error:
            log.exception("expert %d of MoE layer %d could not be loaded", fill.expert, fill.layer)
            return f"{type(error).__name__} while it was loaded"
        return ""

    def _not_loaded(self, job: _Job, fill: Fill, why: str) -> None:
        with self._changed:
            job.begun, job.why = None, job.why or why
            job.unread.append(_unknown(fill))

    def _await(self) -> bool:
        """Until there is a job; False when closing."""
        with self._changed:
            while not (self._jobs or self._closing):
                self._changed.wait()
            return not self._closing

    def _next(self) -> tuple[_Job, Fill] | None:
        with self._changed:
            while self._jobs:
                job = self._jobs[0]
                if job.todo:
                    job.began = time.monotonic() if job.began is None else job.began
                    job.begun = job.todo.popleft()
                    return job, job.begun
                self._jobs.popleft()
                self._finish(job)
            return None

    def _loaded(self, job: _Job) -> None:
        """Its pause ends early for whoever came or went meanwhile."""
        with self._changed:
            job.begun = None
            job.done += 1
            if job.pause and not self._closing and job in self._jobs:
                self._changed.wait(job.pause)

    def _finish(self, job: _Job) -> None:
        seconds = 0.0 if job.began is None else time.monotonic() - job.began
        size = job.done * self._slots.expert_bytes
        self._done.append(Loaded(job.epoch, job.done, size, seconds, tuple(job.unread), job.why))


def _unknown(fill: Fill) -> Fill:
    """Its slot may hold what it held, or any part of what it was to hold."""
    return replace(fill, replaced=FREE)
