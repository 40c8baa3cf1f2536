"""Wraps any transport and injects faults from a seed: it delays, drops, repeats or reorders messages, or kills its end.

For tests and drills. It counts time in turns, one turn for each call of `ready` or `wait`. A fault is decided when a
message is posted. It knows nothing of the transport inside.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from afserve.comm.transport import Box, Dialled, Header, Layout, Offers, Parcel, Transport
from afserve.errors import PeerLost


class Killed(Exception):
    """This end has died on purpose; whoever drives it stops here."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares of messages, 0 to 1. `delay` is the most turns a message is kept back; delays reorder across boxes.

    `kill_at` is the operation, counted from 0 over stage, post, ready, wait and take, at which the end dies.
    """

    seed: int = 0
    drop: float = 0.0
    repeat: float = 0.0
    delay: int = 0
    kill_at: int | None = None


class FaultyTransport:
    """The same contract over `inner`, but for what `faults` does to it."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._later: list[tuple[int, Box]] = []
        self._turn = 0
        self._operations = 0
        self.dropped = 0

    @property
    def layout(self) -> Layout:
        return self._inner.layout

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def offers(self) -> Offers:
        return Offers()

    def boxes(self) -> list[Box]:
        return self._inner.boxes()

    def next_sequence(self, box: Box) -> int:
        return self._inner.next_sequence(box)

    def stage(self, box: Box, header: Header) -> Parcel:
        self._operation()
        return self._inner.stage(box, header)

    def post(self, box: Box) -> None:
        self._operation()
        if self._random.random() < self._faults.drop:
            self.dropped += 1
            return
        due = self._turn + self._random.randint(0, self._faults.delay)
        self._later.append((due, box))
        if self._random.random() < self._faults.repeat:
            self._later.append((due, box))
        self._deliver()

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        self._operation()
        self._pass()
        return self._inner.ready(boxes)

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        self._operation()
        self._pass()
        return self._inner.wait(boxes, 0.0 if self._later else timeout)

    def take(self, box: Box) -> Parcel:
        self._operation()
        return self._inner.take(box)

    def refuse(self, box: Box, reason: str) -> None:
        self._inner.refuse(box, reason)

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        return self._inner.dial(expert, address, timeout)

    def attach(self, dialled: Dialled) -> None:
        self._forget(dialled.expert)
        self._inner.attach(dialled)

    def detach(self, expert: int) -> None:
        self._forget(expert)
        self._inner.detach(expert)

    def close(self) -> None:
        self._inner.close()

    def _forget(self, expert: int) -> None:
        """What was kept back for it is not delivered to another one in its place."""
        self._later = [(turn, box) for turn, box in self._later if box.expert != expert]

    def _operation(self) -> None:
        if self._operations == self._faults.kill_at:
            self._inner.close()
            raise Killed(f"killed at operation {self._operations}")
        self._operations += 1

    def _pass(self) -> None:
        self._turn += 1
        self._deliver()

    def _deliver(self) -> None:
        due = [box for turn, box in self._later if turn <= self._turn]
        self._later = [item for item in self._later if item[0] > self._turn]
        for box in due:
            with suppress(PeerLost):  # it is late for somebody who is gone; `wait` says so
                self._inner.post(box)
