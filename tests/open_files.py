"""What this process has open, by what it is: a number alone says nothing where something else is closed meanwhile."""

import gc
import os
import time
from contextlib import suppress
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """Each descriptor with what it stands for. What nobody refers to any more is gone first."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def left_open(before: set[tuple[str, str]], kind: str = "", seconds: float = 60.0) -> set[tuple[str, str]]:
    """What of a kind (`socket:`, a folder) is open beyond `before`. Other threads have `seconds` to close theirs."""
    until = time.monotonic() + seconds
    while left := {one for one in open_files() - before if one[1].startswith(kind)}:
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return left


def mapped_memory() -> set[tuple[str, ...]]:
    """Inode and name of each anonymous file that is mapped. What nobody refers to any more is gone first."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {tuple(line.split()[4:]) for line in lines if "memfd" in line}
