"""The seam to a device: what every device keeps, and which calls NVIDIA's runtime gets."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from afserve.errors import ConfigError
from afserve.kernels.devices import cuda
from afserve.kernels.devices.cuda import CudaDevice
from afserve.kernels.devices.device import Device
from afserve.kernels.devices.host import HostDevice
from afserve.kernels.devices.kinds import why_not
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import open_ops


class Runtime:
    """As `torch.cuda`, of one GPU whose streams do what they are told when somebody waits."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.registered: set[int] = set()
        self.refuses = 0
        self.Stream = lambda where, priority=0: Stream(self, where, f"stream {priority}")
        self.usual: dict[torch.device, Stream] = {}
        self.Event, self.CUDAGraph, self.MemPool = Event, partial(Graph, self), partial(Pool, self)

    def current_stream(self, where: torch.device) -> "Stream":
        return self.usual.setdefault(where, Stream(self, where, "usual"))

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.usual[stream.device] = self.current_stream(stream.device), stream
        yield
        self.usual[stream.device] = before

    @contextmanager
    def graph(self, graph: "Graph", stream: "Stream") -> Iterator[None]:
        self.log.append("record")
        with self.stream(stream):
            yield
        self.log.append("recorded")

    @contextmanager
    def use_mem_pool(self, pool: "Pool", where: torch.device) -> Iterator[None]:
        self.log.append(f"memory of {where} from {pool.name}")
        yield
        self.log.append(f"usual memory of {where}")

    @contextmanager
    def device(self, where: torch.device) -> Iterator[None]:
        self.log.append(f"enter {where}")
        yield
        self.log.append("leave")

    def synchronize(self, where: torch.device) -> None:
        self.log.append(f"finish {where}")

    def cudart(self) -> "Runtime":
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.add(address)
        return self.refuses

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)


class Graph:
    def __init__(self, runtime: Runtime) -> None:
        self.replay = partial(runtime.log.append, "replay")


class Pool:
    """Of the device that is current."""

    def __init__(self, runtime: Runtime) -> None:
        self.name = f"a pool after {runtime.log[-1]!r}"


class Stream:
    def __init__(self, runtime: Runtime, device: torch.device, name: str) -> None:
        self.runtime, self.device, self.told, self.at = runtime, device, 0, 0
        self.name = name if device.index == 0 else f"{name} of {device}"

    def wait_stream(self, other: "Stream") -> None:
        self.runtime.log.append(f"{self.name} behind {other.name}")

    def synchronize(self) -> None:
        self.at = self.told


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.timed = enable_timing

    def record(self, stream: Stream) -> None:
        stream.told += 1
        self.stream, self.place = stream, stream.told

    def query(self) -> bool:
        return self.stream.at >= self.place

    def synchronize(self) -> None:
        self.stream.at = max(self.stream.at, self.place)

    def elapsed_time(self, later: "Event") -> float:
        assert self.timed and later.timed
        return 1000.0 * (later.place - self.place)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made, zeros = Runtime(), torch.zeros

    def unpinned(count: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        return zeros(count, dtype=dtype)

    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(torch, "zeros", unpinned)
    return made


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest, runtime: Runtime) -> Device:
    return device_of(torch.device(request.param))


def test_a_place_is_reached_in_order_and_once_somebody_waits(device: Device) -> None:
    queue = device.queue(-1)
    first, second = queue.put_event(timed=True), queue.put_event(timed=True)
    assert first.done() == second.done() == (not device.later)
    second.wait()
    assert first.done() and second.done() and second.seconds_since(first) == (1.0 if device.later else 0.0)
    last = queue.put_event()
    queue.wait()
    assert last.done()


def test_pinned_memory_is_zeros_of_the_host(device: Device) -> None:
    memory = device.pinned(5, torch.int32)
    assert memory.is_cpu and memory.dtype == torch.int32 and memory.tolist() == [0] * 5


def test_what_is_inside_a_queue_comes_behind_the_current_one(device: Device, runtime: Runtime) -> None:
    with device.queue(-1).inside():
        inner = device.current().put_event()
    assert inner.done() == (not device.later)
    assert runtime.log == (["stream -1 behind usual"] if device.later else [])


def test_memory_is_pinned_until_its_copies_are_done(device: Device, runtime: Runtime) -> None:
    memory = torch.empty(64, dtype=torch.uint8)
    unpin = device.pin_pages(memory)
    assert runtime.registered == ({memory.data_ptr()} if device.later else set())
    unpin()
    assert not runtime.registered and runtime.log == (["finish cuda:0"] if device.later else [])


def test_memory_that_cannot_be_pinned_is_named(runtime: Runtime) -> None:
    runtime.refuses = 2
    with pytest.raises(OSError, match="64 bytes of memory cannot be pinned: 2"):
        CudaDevice(torch.device("cuda:0")).pin_pages(torch.empty(64, dtype=torch.uint8))


def test_what_several_devices_are_told_is_one_recording(runtime: Runtime) -> None:
    """The others' queues branch off from the first one's and join it, their memory is kept, and a replay comes behind
    what each was told before and before what it is told then."""
    second, device = torch.device("cuda:1"), CudaDevice(torch.device("cuda:0"))

    def launch() -> None:
        told = [device_of(where).current() for where in (device.where, second)]
        runtime.log.append([queue._stream.name for queue in told])  # type: ignore[attr-defined]

    replay = device.record_launch(launch, [second])
    assert runtime.log == [
        "enter cuda:1",
        "leave",
        "enter cuda:0",
        "memory of cuda:1 from a pool after 'enter cuda:1'",
        "record",
        "stream 0 of cuda:1 behind stream 0",
        "enter cuda:0",
        ["stream 0", "stream 0 of cuda:1"],
        "leave",
        "stream 0 behind stream 0 of cuda:1",
        "recorded",
        "usual memory of cuda:1",
        "leave",
    ]
    runtime.log.clear()
    replay()
    assert runtime.log == ["usual behind usual of cuda:1", "replay", "usual of cuda:1 behind usual"]
    branches = dict(device._beside)
    device.record_launch(launch, [second])
    assert device._beside == branches, "or each recording takes memory of cuBLAS on another queue"
    with device.queue().inside():
        device.record_launch(launch, [second])
    assert len(device._beside) == 2 * len(branches), "what two queues replay beside one another shares none"


def test_a_thread_enters_its_device(runtime: Runtime) -> None:
    with CudaDevice(torch.device("cuda:3")).as_current():
        assert runtime.log == ["enter cuda:3"]
    with HostDevice(torch.device("cpu")).as_current():
        assert runtime.log == ["enter cuda:3", "leave"]


def test_amds_gpus_are_none_although_their_pytorch_calls_them_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, device_count=lambda: 8))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert cuda.built_for_amd() and cuda.count_gpus() == 0
    with pytest.raises(ConfigError, match="torch sees no CUDA device here; use --device cpu"):
        open_ops("cuda:0")
    monkeypatch.setattr(torch.version, "hip", None)
    assert cuda.count_gpus() == 8
    assert (
        why_not("rocm:1").startswith("AMD") and why_not("cuda:1") == why_not("cpu") == why_not("disk") == ""
    )
