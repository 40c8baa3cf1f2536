"""A CPU as a device: whatever it is told is done when the call returns."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from afserve.kernels.devices.device import Event, Queue


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


class _Empty:
    def put_event(self, *, timed: bool = False) -> Event:
        return _Done()

    def inside(self, *tensors: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self, other: Queue) -> None:
        return

    def follow_event(self, event: Event) -> None:
        return

    def wait(self) -> None:
        return


class HostDevice:
    later = records = False

    def __init__(self, where: torch.device) -> None:
        self.where = where

    def current(self) -> Queue:
        return _Empty()

    def queue(self, priority: int = 0) -> Queue:
        return _Empty()

    def as_current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        return

    def record_launch(
        self, launch: Callable[[], None], further: Sequence[torch.device] = ()
    ) -> Callable[[], None]:
        raise RuntimeError("a CPU does at once what it is told")

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """NumPy's zeros take no page before it is written to."""
        return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)

    def pin_pages(self, memory_Y: Tensor) -> Callable[[], None]:
        return lambda: None
