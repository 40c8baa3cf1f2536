"""Processes by name, while others of them end."""

from collections.abc import Iterable, Iterator

import psutil


def named(processes: Iterable[psutil.Process]) -> Iterator[tuple[str, psutil.Process]]:
    """(name, process) of those that still run when they are asked for their name."""
    for process in processes:
        try:
            yield process.name(), process
        except psutil.NoSuchProcess:
            continue


def children_named(pid: int, name: str) -> list[psutil.Process]:
    """What runs below this process under this name, at any depth."""
    found = named(psutil.Process(pid).children(recursive=True))
    return [process for called, process in found if called == name]
