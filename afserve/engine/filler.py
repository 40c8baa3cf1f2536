"""Fills spare slots of an expert bank in the background while the bank serves, at a bounded rate.

One thread per node, asleep unless there is something to load. It never touches a slot that is in use: whoever hands
it fills has made sure of that (`migrate.SlotUse`). It knows no epochs' meaning, only when a set of fills is complete.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from afserve.errors import AfserveError
from afserve.placement.placement import Fill


class Slots(Protocol):
    expert_bytes: int

    def fill(self, layer: int, slot: int, expert: int) -> None: ...


class Filler:
    """`bytes_per_second` bounds how much of the memory bandwidth serving has to share. `start` before use."""

    def __init__(self, slots: Slots, bytes_per_second: float = 1e9) -> None:
        self._slots = slots
        self._pause = slots.expert_bytes / bytes_per_second
        self._todo: deque[tuple[int, Sequence[Fill]]] = deque()
        self._done: deque[int] = deque()
        self._error: AfserveError | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="slot-filler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, epoch: int, fills: Sequence[Fill]) -> None:
        """Load these after those submitted before; `finished` reports the epoch."""
        with self._changed:
            self._todo.append((epoch, fills))
            self._changed.notify()

    def finished(self) -> list[int]:
        """Epochs completed since the last call. Raises what went wrong while loading."""
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
        while (work := self._next()) is not None:
            epoch, fills = work
            try:
                complete = all(self._load(fill) for fill in fills)
            except AfserveError as error:
                self._fail(error)
                return
            if complete:
                with self._changed:
                    self._done.append(epoch)

    def _next(self) -> tuple[int, Sequence[Fill]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(self._todo))
            return None if self._closing else self._todo.popleft()

    def _load(self, fill: Fill) -> bool:
        """One expert, then a pause; False when closing."""
        self._slots.fill(fill.layer, fill.slot, fill.expert)
        with self._changed:
            return not self._changed.wait_for(lambda: self._closing, timeout=self._pause)

    def _fail(self, error: AfserveError) -> None:
        with self._changed:
            self._error = error
