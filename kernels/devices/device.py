"""Where tensors are computed, as afserve sees it: queues of work, places in them, pinned memory. The one seam to a
vendor's runtime: `host.py` is a CPU, `cuda.py` NVIDIA's, and no other file calls one.

A device does later what it was told now, in the order of each queue. On a host everything is done when it was told.
Nothing here knows what is computed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a queue."""

    def done(self) -> bool:
        """Whether the device has come there."""

    def wait(self) -> None:
        """Until it has; the device is all that this waits for."""

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds of the device between two places that are done. Both were asked for as `timed`."""


class Queue(Protocol):
    """Work that is done one after the other."""

    def put_event(self, *, timed: bool = False) -> Event:
        """Behind all that is in the queue now."""

    def inside(self, *tensors: Tensor) -> AbstractContextManager[None]:
        """What is told to the device inside goes into this queue, behind what the current one has; the memory of these
        tensors stays theirs until then."""

    def beside(self) -> AbstractContextManager[None]:
        """As `inside`, and not behind what the current queue has."""

    def follow(self, other: "Queue") -> None:
        """What it is given from now on is behind all that `other` has, also one of another device."""

    def follow_event(self, event: Event) -> None:
        """The same of a place in another queue: the device waits there, and not who calls this."""

    def wait(self) -> None:
        """Until the queue is empty."""


class Device(Protocol):
    @property
    def where(self) -> torch.device: ...

    @property
    def later(self) -> bool:
        """Whether calls return before they are done."""

    def current(self) -> Queue:
        """This thread's."""

    def queue(self, priority: int = 0) -> Queue:
        """A new one. Work of a lower priority number goes first."""

    def as_current(self) -> AbstractContextManager[None]:
        """Inside it is the thread's device."""

    def finish(self) -> None:
        """Wait for all that it was told."""

    @property
    def records(self) -> bool:
        """Whether `record_launch` can be asked."""

    def record_launch(
        self, launch: Callable[[], None], further: Sequence[torch.device] = ()
    ) -> Callable[[], None]:
        """What `launch` tells the device, and `further` ones of its kind, is recorded and not done; what is returned
        tells them all of that at once, in the current queues, as often as it is called, over the same memory. Raises
        RuntimeError where something cannot be recorded."""

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros in memory of the host that the device copies to and from by itself."""

    def pin_pages(self, memory_Y: Tensor) -> Callable[[], None]:
        """Lets it copy so to and from this memory, until what is returned is called, which waits for the copies. Raises
        OSError where it cannot."""
