"""NVIDIA's GPUs through PyTorch: queues are CUDA streams. The only file that calls `torch.cuda`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from afserve.kernels.devices.device import Event, Queue


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=timed)
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent), "an event of another device"
        return 1e-3 * float(earlier._event.elapsed_time(self._event))


@dataclass(frozen=True, slots=True)
class _CudaQueue:
    _stream: torch.cuda.Stream

    def put_event(self, *, timed: bool = False) -> Event:
        return _CudaEvent(self._stream, timed)

    @contextmanager
    def inside(self, *tensors: Tensor) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def beside(self) -> AbstractContextManager[None]:
        made: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return made

    def follow(self, other: Queue) -> None:
        assert isinstance(other, _CudaQueue), "a queue of another kind of device"
        self._stream.wait_stream(other._stream)

    def follow_event(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent), "an event of another kind of device"
        self._stream.wait_event(event._event)

    def wait(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    later = records = True

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._beside: dict[tuple[torch.cuda.Stream, torch.device], torch.cuda.Stream] = {}

    def current(self) -> Queue:
        return _CudaQueue(torch.cuda.current_stream(self.where))

    def queue(self, priority: int = 0) -> Queue:
        return _CudaQueue(torch.cuda.Stream(self.where, priority=priority))

    def as_current(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self.where)

    def finish(self) -> None:
        torch.cuda.synchronize(self.where)

    def record_launch(
        self, launch: Callable[[], None], further: Sequence[torch.device] = ()
    ) -> Callable[[], None]:
        """A CUDA graph, with memory of its own on each device: PyTorch's graph sees to that of the first alone."""
        graph, pools = torch.cuda.CUDAGraph(), [_pool_on(where) for where in further]
        with self.as_current(), ExitStack() as kept:
            for where, pool in zip(further, pools, strict=True):
                kept.enter_context(torch.cuda.use_mem_pool(pool, where))
            own = self._recording(torch.cuda.current_stream(self.where), self.where)
            kept.enter_context(torch.cuda.graph(graph, stream=own))
            with self._forked(further):
                launch()
        return partial(self._replay, graph, further, pools) if further else graph.replay

    def _recording(self, lead: torch.cuda.Stream, where: torch.device) -> torch.cuda.Stream:
        """For what `lead` replays: cuBLAS has memory for each stream, and recordings of two queues may be replayed
        beside one another."""
        if (lead, where) not in self._beside:
            self._beside[lead, where] = torch.cuda.Stream(where)
        return self._beside[lead, where]

    @contextmanager
    def _forked(self, further: Sequence[torch.device]) -> Iterator[None]:
        """What is told to the other devices inside becomes a part of the graph that is recorded on this one: their
        queues branch off from this one's, and join it again."""
        lead = torch.cuda.current_stream(self.where)
        streams = [self._recording(lead, where) for where in further]
        with ExitStack() as current:
            for stream in streams:
                stream.wait_stream(lead)
                current.enter_context(torch.cuda.stream(stream))
            with self.as_current():  # each stream made its own device current
                yield
            for stream in streams:
                lead.wait_stream(stream)

    def _replay(
        self, graph: torch.cuda.CUDAGraph, further: Sequence[torch.device], _pools: Sequence[object]
    ) -> None:
        """Behind what each device was told before, and before what it is told from now on."""
        own, others = self.current(), [CudaDevice(where).current() for where in further]
        for other in others:
            own.follow(other)
        graph.replay()
        for other in others:
            other.follow(own)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """A thread whose device is another one would begin a context there."""
        with self.as_current():
            return torch.zeros(count, dtype=dtype, pin_memory=True)

    def pin_pages(self, memory_Y: Tensor) -> Callable[[], None]:
        error = torch.cuda.cudart().cudaHostRegister(memory_Y.data_ptr(), memory_Y.numel(), 0)
        if int(error):
            raise OSError(f"{memory_Y.numel():,} bytes of memory cannot be pinned: {error}")
        return partial(self._unpin, memory_Y.data_ptr())

    def _unpin(self, address: int) -> None:
        self.finish()
        torch.cuda.cudart().cudaHostUnregister(address)


def _pool_on(where: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(where):
        return torch.cuda.MemPool()


@dataclass(frozen=True, slots=True)
class Chip:
    name: str
    capability: tuple[int, int]
    processors: int


def count_gpus() -> int:
    """Those of NVIDIA's that PyTorch can use here; one that is built for AMD calls theirs CUDA devices, too."""
    return torch.cuda.device_count() if torch.cuda.is_available() and not built_for_amd() else 0


def built_for_amd() -> bool:
    return torch.version.hip is not None


def numbered(where: torch.device) -> torch.device:
    """With its number: the thread's current device has one, too."""
    return torch.device("cuda", torch.cuda.current_device()) if where.index is None else where


def chip_of(where: torch.device) -> Chip:
    found = torch.cuda.get_device_properties(where)
    return Chip(found.name, (found.major, found.minor), found.multi_processor_count)


def memory_of(where: torch.device) -> tuple[int, int]:
    """Bytes that are free, and all."""
    return torch.cuda.mem_get_info(where)


def make_current(where: torch.device) -> None:
    """The process's, where Triton launches."""
    torch.cuda.set_device(where)


@cache
def reaches(where: torch.device, other: torch.device) -> bool:
    """Whether kernels of the one read the other's memory, once rows were copied from the one to the other."""
    return where == other or torch.cuda.can_device_access_peer(where, other)


def all_reach(count: int) -> bool:
    """Whether each of the first GPUs can write the memory of every other."""
    others = [(a, b) for a in range(count) for b in range(count) if a != b]
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in others)
