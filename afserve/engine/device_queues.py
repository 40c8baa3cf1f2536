"""Two queues of an expert node's device: what decodes goes before prompts, without the host cutting a prompt's call.

Whenever a thread block ends, a GPU takes the next one from the stream of the highest priority ("stream priorities" of
NVIDIA's CUDA C++ Programming Guide). A block is a tile of the gate and up products, 52 us of 128 x 128 x
7168 on an H200. Each of decoding's two products waits for one, and experts are read once for all rows of a prompt's
message. What was launched before in the device's usual stream, weights that moved in among it, comes before either
queue.

Prompts get `floor` of the time: what decoding took is measured on the device, and when it took more than the rest,
its messages are not launched for a moment. It knows boxes, no contents.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from afserve.clock import Clock
from afserve.comm.transport import Box
from afserve.kernels.devices.device import Device, Event, Queue
from afserve.kernels.devices.opened import device_of

T = TypeVar("T")

_AHEAD = 2  # calls of prompts: one that runs, and one so that the device does not wait for the host


class QueuePair(Protocol):
    """What is launched inside a queue's context is in that queue; `tensors` of another one stay until it is done."""

    def decoding(self, *tensors: Tensor) -> AbstractContextManager[None]: ...

    def prompts(self, *tensors: Tensor) -> AbstractContextManager[None]: ...

    def mark(self) -> Event:
        """In the queue that is current."""


class DeviceQueues:
    """Of one thread. `look` is called often: nothing else notices that something is done."""

    def __init__(self, device: QueuePair, clock: Clock, floor: float) -> None:
        self.device = device
        self._clock, self._floor = clock, floor
        self._prompts: deque[tuple[Event, Collection[Box]]] = deque()
        self._decodes: deque[tuple[Event, Event]] = deque()
        self._since = self._now = 0.0  # prompts have been there since, and were at the last look
        self._taken = 0.0  # by decoding since

    def look(self) -> None:
        """Count what was done since the last time."""
        self._now = self._clock.now()
        while self._decodes and self._decodes[0][1].done():
            begin, end = self._decodes.popleft()
            self._taken += end.seconds_since(begin)
        while self._prompts and self._prompts[0][0].done():
            self._prompts.popleft()

    @property
    def is_due(self) -> bool:
        """Whether prompts that were launched had less than their share, so that decoding is not launched."""
        passed = self._now - self._since
        return bool(self._prompts) and passed - self._taken < self._floor * passed

    @property
    def full(self) -> bool:
        """Whether enough is launched of prompts: what waits on the host meets others of its layer."""
        return len(self._prompts) >= _AHEAD

    @property
    def busy(self) -> bool:
        return bool(self._prompts)

    def holds(self, box: Box) -> bool:
        """Whether a prompt's call for this box is not done: what follows in the box has to come behind it."""
        return any(box in boxes for _, boxes in self._prompts)

    @contextmanager
    def decoding(self, *tensors: Tensor) -> Iterator[None]:
        """Its time is taken while prompts are there."""
        with self.device.decoding(*tensors):
            begin = self.device.mark() if self._prompts else None
            yield
            if begin is not None:
                self._decodes.append((begin, self.device.mark()))

    @contextmanager
    def prompts(self, boxes: Collection[Box], *tensors: Tensor) -> Iterator[None]:
        """One call, for the messages of `boxes`."""
        if not self._prompts:
            self._since = self._now = self._clock.now()
            self._taken = 0.0
            self._decodes.clear()
        with self.device.prompts(*tensors):
            yield
            self._prompts.append((self.device.mark(), boxes))


class DeviceQueuePair:
    def __init__(self, device: Device) -> None:
        self._decoding, self._prompts = device.queue(-1), device.queue(0)  # a lower number goes first
        self._device = device

    def decoding(self, *tensors: Tensor) -> AbstractContextManager[None]:
        return self._decoding.inside(*tensors)

    def prompts(self, *tensors: Tensor) -> AbstractContextManager[None]:
        return self._prompts.inside(*tensors)

    def mark(self) -> Event:
        return self._device.current().put_event(timed=True)


def queues_of(device: Device) -> QueuePair | None:
    """None where calls are over when they return."""
    return DeviceQueuePair(device) if device.later else None


def queue_per_box(device: Device) -> Callable[[Box], AbstractContextManager[None]] | None:
    """Where kernels of different boxes wait for messages beside each other; None where `queues_of` gives none.
    PyTorch has 32 of a priority on CUDA: boxes beyond share, and a step of one waits behind the layers of another."""
    if not device.later:
        return None
    queues: dict[Box, Queue] = {}

    def inside(box: Box) -> AbstractContextManager[None]:
        if box not in queues:
            queues[box] = device.queue()
        return queues[box].inside()

    return inside


def in_queues_apart(
    loops: Sequence[Iterator[T]], places: Sequence[torch.device], libraries: str
) -> list[Iterator[T]]:
    """Each loop's own queue on every device, of which the first leads: what one has launched that waits for other nodes
    holds up no other loop. Whatever is launched between two turns of a loop comes before its next. As they are where
    calls are over when they return, and where a library of kernels has memory that all launches share."""
    devices = [device_of(place) for place in places]
    if len(loops) < 2 or libraries or not devices[0].later:
        return list(loops)
    return [_turns_inside(loop, [device.queue() for device in devices]) for loop in loops]


def _turns_inside(loop: Iterator[T], queues: Sequence[Queue]) -> Iterator[T]:
    while True:
        with ExitStack() as inside:
            for queue in reversed(queues):  # the first device is the thread's current one inside
                inside.enter_context(queue.inside())
            made = next(loop)
        yield made


@contextmanager
def alone_on(device: Device) -> Iterator[None]:
    """For a thread that writes what kernels of other queues may still read: it begins when the device has done all that
    was launched, and ends when what it launches is done. Meanwhile this is the thread's device."""
    with device.as_current():
        device.finish()
        yield
        device.finish()
