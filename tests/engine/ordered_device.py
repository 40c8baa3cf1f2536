"""A device that does at once what it is told, and knows what each of its queues is behind: a place that is overwritten
while something may still read it, or read before it was written, is found whatever came first this time."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from afserve.kernels.devices.device import Event, Queue
from afserve.kernels.devices.host import HostDevice


class OrderedEvent:
    """`behind`: what is done where it has come."""

    def __init__(self, behind: frozenset[int]) -> None:
        self.behind = behind

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


class OrderedQueue:
    def __init__(self, device: "OrderedDevice") -> None:
        self.device = device
        self.done: set[int] = set()

    def put_event(self, *, timed: bool = False) -> Event:
        return OrderedEvent(frozenset(self.done))

    @contextmanager
    def inside(self, *tensors: torch.Tensor) -> Iterator[None]:
        self.follow(self.device.current())
        with self.beside():
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, self.device.of.queue = self.device.current(), self
        yield
        self.device.of.queue = before

    def follow(self, other: Queue) -> None:
        assert isinstance(other, OrderedQueue)
        self.done |= other.done

    def follow_event(self, event: Event) -> None:
        assert isinstance(event, OrderedEvent)
        self.done |= event.behind

    def wait(self) -> None:
        return


class OrderedDevice(HostDevice):
    later = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.of = threading.local()  # each thread's queue
        self._usual = OrderedQueue(self)
        self._guard, self._told = threading.Lock(), 0
        self._wrote: dict[object, int] = {}
        self._read: defaultdict[object, set[int]] = defaultdict(set)

    def current(self) -> OrderedQueue:
        found: OrderedQueue = getattr(self.of, "queue", self._usual)
        return found

    def queue(self, priority: int = 0) -> OrderedQueue:
        return OrderedQueue(self)

    def reads(self, place: object) -> None:
        """The thread's queue does so next."""
        with self._guard:
            queue = self.current()
            assert self._wrote[place] in queue.done, f"{place} may not have come"
            self._read[place].add(self._next(queue))

    def writes(self, place: object) -> None:
        with self._guard:
            queue = self.current()
            assert queue is not self._usual, f"{place} is written in the queue that computes"
            assert self._read.pop(place, set()) <= queue.done, f"{place} may still be read"
            self._wrote[place] = self._next(queue)

    def _next(self, queue: OrderedQueue) -> int:
        self._told += 1
        queue.done.add(self._told)
        return self._told
