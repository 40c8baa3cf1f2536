"""Fills spare slots of an expert bank in the background while the bank serves: at a bounded rate, or as fast as it can.

One thread per node, asleep unless there is something to load. It never touches a slot that is in use: whoever hands
it fills has made sure of that (`migrate.SlotUse`). It knows no epochs' meaning, only when a set of fills is complete.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from afserve.errors import AfserveError
from afserve.placement.placement import Fill


class Slots(Protocol):
    expert_bytes: int

    def fill(self, layer: int, slot: int, expert: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """All fills of an epoch are done: how many experts and bytes, and the seconds from the first to the last."""

    epoch: int
    experts: int
    bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    epoch: int
    todo: deque[Fill]
    pause: float
    began: float | None = None
    done: int = 0


class Filler:
    """`bytes_per_second` bounds how much of the memory bandwidth serving has to share. `start` before use."""

    def __init__(self, slots: Slots, bytes_per_second: float = 1e9) -> None:
        self._slots = slots
        self._pause = slots.expert_bytes / bytes_per_second
        self._jobs: deque[_Job] = deque()
        self._done: deque[Loaded] = deque()
        self._error: AfserveError | None = None
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
        """Nobody waits for this epoch any more: the fills that were not begun, and never will be."""
        with self._changed:
            left = [fill for job in self._jobs if job.epoch == epoch for fill in job.todo]
            self._jobs = deque(job for job in self._jobs if job.epoch != epoch)
            self._changed.notify()
            return left

    def finished(self) -> list[Loaded]:
        """What was completed since the last call. Raises what went wrong while loading."""
        with self._changed:
            if self._error is not None:
                raise self._error
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
        try:
            while self._await():
                self.work()
        except AfserveError as error:
            with self._changed:
                self._error = error

    def work(self) -> None:
        """The first fill of the first job, if there is one. For the thread, or for who drives a filler without one."""
        if (work := self._next()) is not None:
            job, fill = work
            self._slots.fill(fill.layer, fill.slot, fill.expert)
            self._loaded(job)

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
                    return job, job.todo.popleft()
                self._jobs.popleft()
                self._finish(job)
            return None

    def _loaded(self, job: _Job) -> None:
        """Its pause ends early for whoever came or went meanwhile."""
        with self._changed:
            job.done += 1
            if job.pause and not self._closing and job in self._jobs:
                self._changed.wait(job.pause)

    def _finish(self, job: _Job) -> None:
        seconds = 0.0 if job.began is None else time.monotonic() - job.began
        self._done.append(Loaded(job.epoch, job.done, job.done * self._slots.expert_bytes, seconds))
