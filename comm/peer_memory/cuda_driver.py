"""Memory of an NVIDIA GPU that other processes map: the driver's virtual memory management, through ctypes.

A process makes physical memory, exports it as a file descriptor and maps it; another one imports the descriptor and
maps the same memory, also on the same GPU. Nothing of PyTorch is in between. Functions, structures and numbers:
`cuda.h` of CUDA 12 and 13, "Virtual Memory Management" of the CUDA Driver API.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from typing import Any

import torch
from torch import Tensor

from afserve.comm.peer_memory.described import bytes_at
from afserve.comm.peer_memory.driver import Made, MemoryRefused

_LIBRARY = "libcuda.so.1"
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_SMALLEST = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_MANAGES_MEMORY, _EXPORTS_FILES = 102, 103  # attributes of a device


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


class _Mapping:
    """Memory at an address of this process. It is unmapped with the last tensor of it."""

    def __init__(self, driver: "CudaDriver", handle: int, whole: int) -> None:
        self._driver, self._whole = driver, whole
        self.address = driver.map_memory(handle, whole)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._driver.unmap_memory(self.address, self._whole)


class CudaDriver:
    """Of one GPU; `library` replaces libcuda in tests. Raises MemoryRefused where this GPU cannot share memory so."""

    name = "cuda"

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self._device, self._number = device, device.index or 0
        self._cuda = library or _loaded()
        self._call("cuInit", c_uint(0))
        found, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(found), c_int(self._number))
        self._call("cuDevicePrimaryCtxRetain", byref(context), found)
        self._context = context
        for attribute, what in (
            (_MANAGES_MEMORY, "manage memory"),
            (_EXPORTS_FILES, "export memory as a file"),
        ):
            able = c_int()
            self._call("cuDeviceGetAttribute", byref(able), c_int(attribute), found)
            if not able.value:
                raise MemoryRefused(
                    f"{device} cannot {what} (a virtual or very old GPU); use another --transport"
                )
        self._properties = Properties(_PINNED, _FILE, Location(_ON_DEVICE, self._number))

    def make(self, size: int) -> Made:
        step, handle, file = c_size_t(), c_ulonglong(), c_int(-1)
        with self._current():
            self._call(
                "cuMemGetAllocationGranularity", byref(step), byref(self._properties), c_int(_SMALLEST)
            )
            whole = -(-size // step.value) * step.value
            self._call("cuMemCreate", byref(handle), c_size_t(whole), byref(self._properties), c_ulonglong(0))
            try:
                memory_B = self._bytes_of(handle.value, size, whole, export=file)
                self._call("cuMemsetD8_v2", c_ulonglong(memory_B.data_ptr()), c_ubyte(0), c_size_t(whole))
                self._call("cuCtxSynchronize")
            except MemoryRefused:
                if file.value >= 0:
                    os.close(file.value)
                raise
        return Made(memory_B, file.value, whole)

    def open(self, file: int, size: int, whole: int) -> Tensor:
        handle = c_ulonglong()
        with self._current():
            self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(file), c_int(_FILE))
            return self._bytes_of(handle.value, size, whole)

    def map_memory(self, handle: int, whole: int) -> int:
        """The address at which this GPU reads and writes it."""
        address = c_ulonglong()
        self._call(
            "cuMemAddressReserve",
            byref(address),
            c_size_t(whole),
            c_size_t(0),
            c_ulonglong(0),
            c_ulonglong(0),
        )
        try:
            self._call("cuMemMap", address, c_size_t(whole), c_size_t(0), c_ulonglong(handle), c_ulonglong(0))
            access = Access(Location(_ON_DEVICE, self._number), _READ_WRITE)
            self._call("cuMemSetAccess", address, c_size_t(whole), byref(access), c_size_t(1))
        except MemoryRefused:
            self._cuda.cuMemUnmap(address, c_size_t(whole))  # an error where it was not mapped
            self._cuda.cuMemAddressFree(address, c_size_t(whole))
            raise
        return address.value

    def unmap_memory(self, address: int, whole: int) -> None:
        """Nobody is told of errors: at a process's end the driver may be gone already."""
        self._cuda.cuCtxPushCurrent_v2(self._context)
        self._cuda.cuMemUnmap(c_ulonglong(address), c_size_t(whole))
        self._cuda.cuMemAddressFree(c_ulonglong(address), c_size_t(whole))
        self._cuda.cuCtxPopCurrent_v2(byref(c_void_p()))

    def _bytes_of(self, handle: int, size: int, whole: int, export: c_int | None = None) -> Tensor:
        """The handle is not needed any more once memory is mapped and exported."""
        try:
            mapping = _Mapping(self, handle, whole)
            if export is not None:
                self._call(
                    "cuMemExportToShareableHandle",
                    byref(export),
                    c_ulonglong(handle),
                    c_int(_FILE),
                    c_ulonglong(0),
                )
            return bytes_at(mapping.address, size, self._device, mapping)
        finally:
            self._call("cuMemRelease", c_ulonglong(handle))

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(byref(c_void_p()))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code:
            name = c_char_p()
            self._cuda.cuGetErrorName(c_int(code), byref(name))
            said = (name.value or b"").decode() or f"error {code}"
            raise MemoryRefused(f"{self._device}: {function} says {said}")


def _loaded() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MemoryRefused(f"the NVIDIA driver's {_LIBRARY} cannot be loaded ({error})") from error


assert ctypes.sizeof(Properties) == 32 and ctypes.sizeof(Access) == 12, "structures that are not the driver's"
