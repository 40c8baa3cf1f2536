"""Where a process computes and where its memory lies: cores and a NUMA node, bound by system calls of Linux.

Memory is preferred, not forced: where a NUMA node has none left, the kernel takes the next one and kills nobody. Where
a container's rules or the kernel refuse, the reason is returned, and cores are bound all the same.
"""

import ctypes
import mmap
import os
import platform
from dataclasses import dataclass

from afserve.member import NodeId, Role

_CALLS = {"x86_64": (237, 238, 239), "aarch64": (235, 237, 236)}  # mbind, set_mempolicy, get_mempolicy
_MBIND, _SET_MEMPOLICY, _GET_MEMPOLICY = _CALLS.get(platform.machine(), (-1, -1, -1))
_PREFERRED, _BIND = 1, 2
_MODE_BITS = 0xFFF  # the others are flags
_AT_ADDRESS = 2
_MOST = 1024  # NUMA nodes that a kernel is built for at most
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_MOST // _LONG_BITS)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Binding:
    """`memory` is the NUMA node whose memory is taken first. `refused` is why the kernel lets nobody say so; then only
    cores are bound."""

    cores: tuple[int, ...]
    memory: int
    refused: str = ""


def seat(node: NodeId, count: int) -> int:
    """Which of `count` NUMA nodes is a node's. Attention nodes sit from the first one up and expert nodes from the last
    one down, so that each has as many wherever the sum of both divides. Example: one of each role on two NUMA nodes."""
    place = node.index % count
    return place if node.role is Role.ATTENTION else count - 1 - place


def bind(binding: Binding) -> str:
    """This thread, and every thread and process that it begins later. Returns what was refused and why, else nothing.

    What is in memory already stays where it is.
    """
    try:
        os.sched_setaffinity(0, binding.cores)
    except OSError as error:
        return f"cores {', '.join(map(str, binding.cores))}: {error.strerror}"
    if binding.refused:
        return ""
    return _told(binding.memory, _call(_SET_MEMPOLICY, _PREFERRED, _mask(binding.memory), _MOST + 1))


def place(address: int, size: int, memory: int) -> str:
    """Pages of `address` on, a whole number of them, that nobody has touched yet. Of shared memory it holds for whoever
    touches them. Returns as `bind`."""
    where = ctypes.c_void_p(address), ctypes.c_ulong(size)
    return _told(memory, _call(_MBIND, *where, _PREFERRED, _mask(memory), _MOST + 1, 0))


def refusal(memory: int) -> str:
    """Why no memory of this NUMA node can be asked for here; nothing if it can."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        return place(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE, memory)


def own_memory(address: int | None = None) -> int | None:
    """The NUMA node that this thread's memory comes from first, or memory at an address, whoever bound it; None where
    that is open."""
    mode, mask = ctypes.c_int(0), _Mask()
    where = ctypes.c_void_p(address), ctypes.c_ulong(0 if address is None else _AT_ADDRESS)
    if _call(_GET_MEMPOLICY, ctypes.byref(mode), mask, ctypes.c_ulong(_MOST), *where):
        return None
    if mode.value & _MODE_BITS not in (_PREFERRED, _BIND):
        return None
    return next(
        (number for number in range(_MOST) if mask[number // _LONG_BITS] >> number % _LONG_BITS & 1), None
    )


def _mask(memory: int) -> "ctypes.Array[ctypes.c_ulong]":
    mask = _Mask()
    mask[memory // _LONG_BITS] = 1 << memory % _LONG_BITS
    return mask


def _call(number: int, *arguments: object) -> int:
    """0, or the error."""
    if number < 0:
        return 38  # ENOSYS: nobody has looked up this processor's numbers
    return ctypes.get_errno() if _LIBC.syscall(ctypes.c_long(number), *arguments) else 0


def _told(memory: int, error: int) -> str:
    return f"memory of NUMA node {memory}: {os.strerror(error)}" if error else ""
