"""What this machine offers: cores and memory that this process may really use, container limits included.

Reads /proc, /sys and cgroup files; decides nothing.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from afserve.comm.binding import Binding

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Machine:
    """`memory` is what is free now in bytes, `memory_total` what there is; both respect a container's limit.

    `numa` is what nodes may be bound to, where somebody has looked.
    """

    cores: int
    memory: int
    memory_total: int
    limited_by: str = ""
    numa: tuple[Binding, ...] = ()


def this_machine(root: Path = _CGROUP) -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(root)
    memory = psutil.virtual_memory()
    limit, used = _memory_limit(root)
    free, total, why = memory.available, memory.total, ""
    if limit < total:
        free, total, why = min(free, max(0, limit - used)), limit, "container memory limit"
    if quota is not None and quota < cores:
        cores, why = max(1, int(quota)), ", ".join(filter(None, [why, "container CPU quota"]))
    return Machine(cores, free, total, why)


def _own_group(root: Path) -> Path:
    """This process's cgroup v2 folder, or the root inside a container's own namespace."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return root
    path = next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), "/")
    own = root / path.lstrip("/")
    return own if own.is_dir() else root


def _cpu_quota(root: Path) -> float | None:
    """Cores, from cgroup v2 cpu.max or v1 cpu.cfs_quota_us."""
    text = read_words(_own_group(root) / "cpu.max").split()
    if len(text) == 2 and text[0] != "max":
        return int(text[0]) / int(text[1])
    quota, period = read_words(root / "cpu/cpu.cfs_quota_us"), read_words(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _memory_limit(root: Path) -> tuple[int, int]:
    """(limit, used without reclaimable file cache), from cgroup v2 or v1; a huge limit when there is none."""
    own = _own_group(root)
    limit, used = read_words(own / "memory.max"), read_words(own / "memory.current")
    if limit.isdigit() and used.isdigit():
        return int(limit), max(0, int(used) - _statistic(own / "memory.stat", "inactive_file"))
    folder = root / "memory"
    limit, used = read_words(folder / "memory.limit_in_bytes"), read_words(folder / "memory.usage_in_bytes")
    if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
        return int(limit), max(0, int(used) - _statistic(folder / "memory.stat", "total_inactive_file"))
    return _UNLIMITED, 0


def _statistic(path: Path, name: str) -> int:
    for line in read_words(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def read_words(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
