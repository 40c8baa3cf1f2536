"""Reads files with DeepSpeed's asynchronous I/O: what runs in the process that `reader.py` starts.

Its libraries were built before and are loaded as files; DeepSpeed's Python package is not imported. They neither
say that a read failed nor how much came, and end the process where a file is too short. So whoever asks has
checksums, and asks for what is in the file. It builds nothing.
"""

import ctypes
import errno
import mmap
import os
import resource
import sys
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afserve.comm.disk.deepspeed_library import ASYNC_IO, PIN_MEMORY, libraries
from afserve.comm.disk.reader_child import serve
from afserve.comm.disk.reader_wire import ReadAsk, ReaderSetup

_MAP_FIXED = 0x10


class DeepSpeedFiles:
    """A `FileBackend`: a handle, which is a thread and a queue of the kernel, for each channel."""

    def __init__(self, setup: ReaderSetup) -> None:
        async_io = _loaded()
        self._handles = [
            async_io.aio_handle(setup.block_bytes, setup.depth, False, True, 1) for _ in setup.channels
        ]
        self._bytes = setup.window_bytes
        self._windows_WB = [
            _shared(self._handles[0], setup.memory, at * self._bytes, self._bytes)
            for at in range(setup.windows)
        ]

    def read(self, channel: int, ask: ReadAsk) -> None:
        window, begin = divmod(ask.place, self._bytes)
        bytes_B, path = self._windows_WB[window][begin : begin + ask.size], f"/proc/self/fd/{ask.descriptor}"
        if self._handles[channel].sync_pread(bytes_B, path, ask.offset) != 1:
            raise OSError(errno.EIO, f"{path} cannot be read past the page cache")


def _loaded() -> Any:
    """The module. Raises OSError."""
    found = libraries()
    if found is None:
        raise FileNotFoundError("it is not built here for this version of torch")
    _module(PIN_MEMORY, found[0])
    ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)  # the other one looks for its table of memory
    return _module(ASYNC_IO, found[1])


def _module(name: str, path: Path) -> Any:
    spec = util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shared(handle: Any, memory: int, offset: int, size: int) -> Tensor:
    """Locked memory of DeepSpeed's, behind whose addresses lies the memory of `memory` from now on: it copies what it
    reads into any other. The lock goes with its pages; the kernel holds those that are read into. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check_lock(libc, size)
    window_B: Tensor = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    address = ctypes.c_void_p(window_B.data_ptr())
    libc.mmap.restype = ctypes.c_void_p
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    found = libc.mmap(address, ctypes.c_size_t(size), rights, flags, memory, ctypes.c_long(offset))
    if found != address.value or not handle.is_pinned(window_B):
        raise OSError("DeepSpeed's memory cannot be shared")
    return window_B


def _check_lock(libc: ctypes.CDLL, size: int) -> None:
    """DeepSpeed ends the process where memory cannot be locked. Raises OSError."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    with mmap.mmap(-1, size) as tried:
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(tried)))
        if libc.mlock(address, ctypes.c_size_t(size)):
            why = os.strerror(ctypes.get_errno())
            raise OSError(f"{size >> 20} MiB of memory cannot be locked: {why}; raise `ulimit -l`")


if __name__ == "__main__":
    serve(DeepSpeedFiles, sys.argv[1:])
