"""A device whose calls take known times on a clock that is moved by hand: what is launched is done later.

It has two queues, as `afserve.engine.device_queues` wants them, and computes in blocks of a known length: whenever one
ends, the next is of a decode call where one waits, else of a prompt's. One queue takes all calls as they were launched.
Values are computed at once; copies to the host have them when the device has come there.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from afserve.clock import FakeClock
from afserve.comm.transport import HOST
from afserve.kernels.devices.device import Event


@dataclass(eq=False)
class _Work:
    """`left` seconds of the device, launched at `since`; `ended` is when it is done, once its last block runs."""

    since: float
    left: float
    ended: float | None = None


@dataclass
class ScriptedMark:
    device: "ScriptedDevice"
    work: _Work

    def done(self) -> bool:
        self.device.settle()
        return self.work.ended is not None and self.work.ended <= self.device.clock.now()

    def wait(self) -> None:
        """Nobody else moves the clock meanwhile."""
        while not self.done():
            self.device.clock.advance(max(1e-6, self.device.free - self.device.clock.now()))

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, ScriptedMark)
        assert self.work.ended is not None and earlier.work.ended is not None, "a mark that is not done"
        return self.work.ended - earlier.work.ended


@dataclass
class ScriptedDevice:
    clock: FakeClock
    block: float
    one_queue: bool = False
    free: float = 0.0  # when the block that runs ends
    taken: float = 0.0  # seconds of all blocks
    urgent: deque[_Work] = field(default_factory=deque)
    other: deque[_Work] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._current = self.urgent

    def decoding(self, *tensors: Tensor) -> AbstractContextManager[None]:
        return self._in(self.urgent)

    def prompts(self, *tensors: Tensor) -> AbstractContextManager[None]:
        return self._in(self.urgent if self.one_queue else self.other)

    @contextmanager
    def _in(self, queue: deque[_Work]) -> Iterator[None]:
        before, self._current = self._current, queue
        yield
        self._current = before

    def launch(self, seconds: float) -> _Work:
        """A call in the current queue."""
        self.settle()
        work = _Work(self.clock.now(), seconds)
        self._current.append(work)
        return work

    def mark(self) -> ScriptedMark:
        return ScriptedMark(self, self.launch(0.0))

    def settle(self) -> None:
        """Play what the device did until now."""
        now = self.clock.now()
        while self.free <= now and (queue := self._next()):
            work = queue[0]
            step = work.left if queue is self.urgent else min(work.left, self.block)
            self.free = max(self.free, work.since) + step
            work.left -= step
            self.taken += step
            if work.left <= 0.0:
                work.ended = self.free
                queue.popleft()

    def _next(self) -> deque[_Work] | None:
        """Where the next block is from: decoding's, if a call was launched by the end of the block that ran."""
        filled = [queue for queue in (self.urgent, self.other) if queue]
        there = [queue for queue in filled if queue[0].since <= self.free]
        return there[0] if there else min(filled, key=lambda queue: queue[0].since, default=None)


@dataclass
class _Copy:
    tensors: tuple[Tensor, ...]
    mark: ScriptedMark

    def copied(self) -> bool:
        return self.mark.done()

    def wait(self) -> None:
        self.mark.wait()


class ScriptedStage:
    """The way between a scripted device and mailboxes in host memory; copies take no time."""

    device = HOST

    def __init__(self, device: ScriptedDevice) -> None:
        self._device = device

    def to_host(self, key: Hashable, *tensors: Tensor) -> _Copy:
        return _Copy(tuple(tensor.clone() for tensor in tensors), self._device.mark())

    def to_device(self, key: Hashable, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)
