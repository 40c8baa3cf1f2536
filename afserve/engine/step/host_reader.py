"""Numbers of a step on their way from a device: it copies them into pinned memory by itself, and whoever wants them
goes on with other work until they are there. What computes nothing later has them at once."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from afserve.kernels.devices.device import Device, Event

_LOOK = 50e-6  # seconds between two looks at a copy
T = TypeVar("T")
Reads = Generator[Tensor, list[int], T]
"""Yields whole numbers that lie on the device, and is sent them as the host's; returns what they were read for."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A copy under way; it is `copied` when the device has come there."""

    copied: Event

    def wait(self, timeout: float) -> None:
        """So many seconds at most: a device tells by its event alone that it is done."""
        until = time.monotonic() + timeout
        while not self.copied.done() and time.monotonic() < until:
            time.sleep(_LOOK)


class HostReader:
    """Of one micro-batch: a read ends before the next one begins."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room_N = torch.empty(0, dtype=torch.int64)

    def fetch_columns(self, *columns: Tensor) -> Generator[Fetch, None, list[int]]:
        """Columns of whole numbers, one behind the other: one copy, however many there are. Yields as long as it is not
        there."""
        whole_N = torch.cat(columns) if len(columns) > 1 else columns[0]
        if not self._device.later:
            told: list[int] = whole_N.tolist()
            return told
        count = len(whole_N)
        if count > len(self._room_N):
            self._room_N = self._device.pinned(1 << (count - 1).bit_length(), torch.int64)
        host_N = self._room_N[:count]
        host_N.copy_(whole_N, non_blocking=True)
        fetch = Fetch(self._device.current().put_event())
        while not fetch.copied.done():
            yield fetch
        read: list[int] = host_N.tolist()
        return read

    def fetch_reads(
        self, reads: Reads[T], mark_1: Tensor | None
    ) -> Generator[Fetch, None, tuple[T, int | None]]:
        """What the numbers were read for, and the number behind `mark_1`, which comes along with what is read first."""
        mark: int | None = None
        try:
            wanted_N = next(reads)
            while True:
                if mark_1 is None:
                    told = yield from self.fetch_columns(wanted_N)
                else:
                    *told, mark = yield from self.fetch_columns(wanted_N, mark_1)
                    mark_1 = None
                wanted_N = reads.send(told)
        except StopIteration as ended:
            if mark_1 is not None:  # nothing was read
                (mark,) = yield from self.fetch_columns(mark_1)
            return ended.value, mark


def read_at_once(reads: Reads[T]) -> T:
    """It waits for a device."""
    try:
        wanted_N = next(reads)
        while True:
            wanted_N = reads.send(wanted_N.tolist())
    except StopIteration as ended:
        found: T = ended.value
        return found
