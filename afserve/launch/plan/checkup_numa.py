"""What `doctor` says of NUMA nodes, and with --numa how fast the cores of each read the memory of each.

Reads are numpy's, by all usable cores of a NUMA node at once. Each row is the best of a few rounds: others on the
machine only take away.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from afserve.comm.binding import Binding, place
from afserve.launch.plan.checkup_disk import NOTE, OK, Finding
from afserve.launch.plan.footprint import gib
from afserve.launch.plan.numa import NumaNode, cores_in_words, numa_nodes, split, usable_cores

_BYTES = 256 << 20
_ROUNDS = 5


def numa() -> Finding:
    """One line: whether `up` binds here."""
    nodes = numa_nodes()
    seats = split(nodes, usable_cores())
    if len(seats) > 1:
        return Finding(
            "NUMA", OK, f"{len(seats)} nodes; up binds to them (--numa off: not); doctor --numa measures"
        )
    if len(nodes) > 1:
        return Finding("NUMA", OK, f"{len(nodes)} nodes, cores of this process are in one; nothing is bound")
    return Finding("NUMA", OK, "one node; there is nothing to bind" if nodes else "the system names no nodes")


def numa_in_full(size: int = _BYTES) -> Iterator[Finding]:
    """Every node, then rates. `size` bytes of each node's memory are read."""
    nodes, usable = numa_nodes(), usable_cores()
    for node in nodes:
        yield Finding("NUMA", OK, _drawn(node, usable))
    if len(nodes) < 2:
        yield Finding("NUMA", NOTE, "there is only one: no memory is farther than other memory")
    for reader in split(nodes, usable):
        yield from _reads(reader, nodes, size)


def _drawn(node: NumaNode, usable: frozenset[int]) -> str:
    own = cores_in_words(node.cores & usable)
    cores = f"cores {cores_in_words(node.cores)}" if node.cores else "no cores"
    if node.cores and own != cores_in_words(node.cores):
        cores += f" ({own or 'none'} usable)"
    memory = f"{gib(node.free)} free of {gib(node.memory)}" if node.memory else "no memory"
    far = ", ".join(f"{away} to {number}" for number, away in node.distance.items())
    return f"node {node.number}: {cores}; {memory}; distance {far or 'unknown'}"


def _reads(reader: Binding, nodes: Sequence[NumaNode], size: int) -> Iterator[Finding]:
    for node in nodes:
        if not node.memory:
            continue
        rate, why = _rate(reader.cores, node.number, size)
        who = f"cores of {reader.memory} read memory of {node.number}"
        kind = "local" if node.number == reader.memory else "remote"
        if why:
            yield Finding("NUMA", NOTE, f"{who}: not measured", why)
        else:
            yield Finding("NUMA", OK, f"{who}: {rate / 1e9:.1f} GB/s, {kind}, {len(reader.cores)} threads")


def _rate(cores: Sequence[int], memory: int, size: int) -> tuple[float, str]:
    """Bytes a second, or why there are none."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        whole = np.frombuffer(room, dtype=np.int64)
        try:
            if why := place(whole.ctypes.data, size, memory):
                return 0.0, why
            if hasattr(mmap, "MADV_HUGEPAGE"):
                room.madvise(mmap.MADV_HUGEPAGE)
            whole[:] = 1
            return size / min(_seconds(cores, np.array_split(whole, len(cores)))), ""
        finally:
            del whole  # a map that somebody looks into cannot be closed


def _seconds(cores: Sequence[int], parts: Sequence[NDArray[np.int64]]) -> list[float]:
    """Of each round."""
    with ThreadPoolExecutor(len(cores)) as pool:

        def turn() -> float:
            began = time.perf_counter()
            assert sum(pool.map(_read_on, cores, parts)) == sum(part.size for part in parts)
            return time.perf_counter() - began

        return [turn() for _ in range(_ROUNDS)]


def _read_on(core: int, part: NDArray[np.int64]) -> int:
    """On this thread, which is the pool's."""
    os.sched_setaffinity(0, {core})
    return int(part.sum())
