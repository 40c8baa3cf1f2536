"""A machine with CUDA devices that has none: tensors on them have shapes and devices, but no contents.

Host memory is real, so mailboxes, headers and flags work; what is on a device is fake. Every operation is watched: two
devices in one operation are an error at the line that does it, although PyTorch's fake mode lets an index or an
assignment of another device pass, and whatever makes the host wait for a device is counted. The device has come to an
event when it is asked for it the second time.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import FrameType
from typing import ClassVar

import torch
import xxhash
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import cpp_extension
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from afserve.engine.step.spoiled import FINE
from afserve.kernels.devices.device import Event, Queue
from afserve.kernels.devices.host import HostDevice

Launched = tuple[str, tuple[tuple[int, ...], ...]]  # an operation, and the shapes that it got
PINNED: set[int] = set()  # where memory begins that copies need not wait for
GUARD = Path(__file__).with_name("no_op_guard.cpp")
MAKE_ONLY = (
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten._reshape_alias",
    "aten._unsafe_view",
    "prim.",
)  # nothing is launched
COPIES = ("aten._to_copy", "aten.copy_")
_DEVICE_OF = torch.ops.prim.device.default
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten._unique2", "aten.bincount", "aten.masked_select")


def load_guard(folder: Path) -> None:
    """Compiles the guard where `folder` has none, in about two seconds, and loads it."""
    made_of = xxhash.xxh64_hexdigest(GUARD.read_bytes() + torch.__version__.encode())
    library = folder / f"no_op_guard-{made_of}.so"
    if not library.exists():
        include = [f"-I{path}" for path in cpp_extension.include_paths()]
        link = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10"]
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", *include, str(GUARD), "-o", str(made), *link]
        subprocess.run(command, check=True)
        made.replace(library)
    torch.ops.load_library(str(library))


class Watch(TorchDispatchMode):
    """`waits` counts what the host waited for, by operation and the file of afserve's that asked, `reads` what a device
    copied to pinned memory beside it, and `pageable` what was copied to a device from memory that is not pinned: the
    host waits there until a buffer of the driver's is free."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.pageable: Counter[str] = Counter()
        self.launches = 0
        self.recorded: list[Launched] | None = None  # while launches are recorded
        self.launched: list[str] | None = (
            None  # names of what the device is told, kernels too, while they are counted
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):  # half of all that is asked
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        name = _name_of(func)
        target = kwargs.get("device")
        on_host = all(x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in tensors)
        if on_host and (target is None or torch.device(target).type == "cpu"):
            with _disable_current_modes():
                return func(*args, **kwargs)
        self._check_devices(name, tensors)
        self.launches += 1
        waits, pageable = self._waits(name, tensors, kwargs), _is_pageable(name, tensors, kwargs)
        if self.recorded is not None:
            if waits or pageable:
                raise RuntimeError(f"{name} at {_line()} cannot be recorded")
            if not name.startswith("prim."):
                self.recorded.append((name, tuple(tuple(x.shape) for x in tensors)))
        if waits:
            self.waits[f"{name} at {_line().partition(':')[0]}"] += 1
        if pageable:
            self.pageable[f"{name} at {_line().partition(':')[0]}"] += 1
        if self.launched is not None and not func.is_view and not name.startswith(MAKE_ONLY):
            self.launched.append(name)
        if _is_read(name, args):
            self.reads[f"{name} at {_line().partition(':')[0]}"] += 1
            with _disable_current_modes():
                args[0].zero_()[-1] = FINE  # of contents there are none: tokens 0, and no row is marked
            return args[0]
        if name == "aten._local_scalar_dense":
            return FINE if _line().startswith("spoiled.py") else 0
        return func(*args, **kwargs)

    def _check_devices(self, name: str, tensors) -> None:
        devices = {x.device for x in tensors if x.dim() > 0}
        if len(devices) > 1 and not name.startswith(COPIES):
            raise AssertionError(
                f"{name} got tensors of {', '.join(map(str, sorted(devices, key=str)))} at {_line()}"
            )

    @staticmethod
    def _waits(name: str, tensors, kwargs) -> bool:
        from_device = any(x.device.type == "cuda" for x in tensors)
        if name.startswith(WAITS):
            return from_device
        if name.startswith("aten._to_copy"):
            target = kwargs.get("device")
            down = from_device and target is not None and torch.device(target).type == "cpu"
            return down and not kwargs.get("non_blocking")
        down = name.startswith("aten.copy_") and tensors[0].device.type == "cpu" and from_device
        return down and not _is_read(name, tensors)


@cache
def _name_of(func: object) -> str:
    return str(func).removesuffix(".default")


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Those in lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def current_watch() -> Watch | None:
    """That of the context which the caller is in."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Watch)), None)


def _watch() -> Watch:
    watch = current_watch()
    assert watch is not None, "nothing is pretended"
    return watch


def _is_read(name: str, args) -> bool:
    """A copy that the device makes beside the host."""
    if not name.startswith("aten.copy_") or isinstance(args[0], FakeTensor) or args[0].device.type != "cpu":
        return False
    return args[1].device.type == "cuda" and args[0].untyped_storage().data_ptr() in PINNED


def _is_pageable(name: str, tensors, kwargs) -> bool:
    if name.startswith("aten.copy_"):
        target, source = tensors[0].device.type, tensors[1]
    elif name.startswith("aten._to_copy"):
        target, source = torch.device(kwargs.get("device") or tensors[0].device).type, tensors[0]
    else:
        return False
    if target != "cuda" or source.device.type != "cpu" or isinstance(source, FakeTensor):
        return False
    return source.untyped_storage().data_ptr() not in PINNED


def _line() -> str:
    """Of the code under test, not of PyTorch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and file != __file__:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextmanager
def pretended() -> Iterator[Watch]:
    watch = Watch()
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        yield watch


class PretendedEvent:
    """In the order in which they were put, whatever queue it was."""

    put = come = 0

    def __init__(self) -> None:
        PretendedEvent.put += 1
        self._number, self._asked = PretendedEvent.put, False

    def done(self) -> bool:
        if self._asked:
            PretendedEvent.come = max(PretendedEvent.come, self._number)
        self._asked = True
        return self._number <= PretendedEvent.come

    def wait(self) -> None:
        if self._number > PretendedEvent.come:
            _watch().waits[f"event at {_line().partition(':')[0]}"] += 1
            PretendedEvent.come = self._number

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


class PretendedQueue:
    def put_event(self, *, timed: bool = False) -> Event:
        return PretendedEvent()

    def inside(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self, other: Queue) -> None:
        return

    def follow_event(self, event: Event) -> None:
        return

    def wait(self) -> None:
        _watch().waits[f"queue at {_line().partition(':')[0]}"] += 1


class PretendedDevice(HostDevice):
    """In the place of `CudaDevice`: it does at once what it is told. Its pinned memory is real, and known as such. What
    makes the host wait cannot be recorded; `recordings` has what was launched, each time the same was."""

    later = records = True
    recordings: ClassVar[list[list[list[Launched]]]] = []

    def current(self) -> Queue:
        return PretendedQueue()

    def queue(self, priority: int = 0) -> Queue:
        return PretendedQueue()

    def record_launch(
        self, launch: Callable[[], None], further: Sequence[torch.device] = ()
    ) -> Callable[[], None]:
        times: list[list[Launched]] = []
        self.recordings.append(times)

        def run() -> None:
            watch = _watch()
            watch.recorded = []
            try:
                launch()
            finally:
                times.append(watch.recorded)
                watch.recorded = None

        run()
        return run

    def pin_pages(self, memory_Y: torch.Tensor) -> Callable[[], None]:
        PINNED.add(memory_Y.untyped_storage().data_ptr())
        return super().pin_pages(memory_Y)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            memory = super().pinned(count, dtype)
        PINNED.add(memory.untyped_storage().data_ptr())
        return memory


class HostCopy:
    """Done as soon as it is asked."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors

    def copied(self) -> bool:
        return True

    def wait(self) -> None:
        return


class PretendedStage:
    """What comes from a pretended device is zeros: every choice is of expert 0. Pinned memory takes a real one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, key: Hashable, *tensors: torch.Tensor) -> HostCopy:
        assert all(x.device == self.device for x in tensors), f"{key}: {[x.device for x in tensors]}"
        shapes = [(x.shape, x.dtype) for x in tensors]
        with _disable_current_modes():
            return HostCopy(tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes))

    def to_device(self, key: Hashable, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert all(x.device.type == "cpu" for x in tensors), f"{key}: {[x.device for x in tensors]}"
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in tensors)


def pretended_stage(device: torch.device, payloads: torch.device) -> PretendedStage | None:
    """In the place of `staging.stage_for`."""
    return None if device.type == payloads.type else PretendedStage(device)
