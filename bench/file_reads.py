"""How fast files are read from the disk and from the page cache, and getting them out of that. It knows no format."""

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 8 << 20
READERS = (1, 4)


def forget(files: Sequence[Path]) -> None:
    """Out of the page cache, written to the disk where that was not done yet."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def disk_speed(files: Sequence[Path], most: int) -> float:
    """Bytes per second of the fastest way: one or four readers, past the page cache or through it, with nothing in it.

    Each way reads the first `most` bytes of the files, in the order in which they come.
    """
    speeds = []
    for direct in (False, True):
        for readers in READERS:
            forget(files)
            speeds.append(_speed(files, most, readers, direct))
    forget(files)
    return max(speeds)


def cache_speed(files: Sequence[Path], most: int) -> float:
    """Bytes per second that one or four readers copy out of the page cache, which has them all: the faster."""
    _speed(files, most, 1, False)
    return max(_speed(files, most, readers, False) for readers in READERS)


def _speed(files: Sequence[Path], most: int, readers: int, direct: bool) -> float:
    pieces = _pieces(files, most)
    begin = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        read = sum(pool.map(lambda part: _read(pieces[part::readers], direct), range(readers)))
    return read / (time.perf_counter() - begin)


def _pieces(files: Sequence[Path], most: int) -> list[tuple[Path, int]]:
    """File and offset."""
    every = [(path, at) for path in files for at in range(0, path.stat().st_size, PIECE)]
    return every[: max(1, most // PIECE)]


def _read(pieces: Sequence[tuple[Path, int]], direct: bool) -> int:
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    opened: dict[Path, int] = {}
    done = 0
    with mmap.mmap(-1, PIECE) as buffer:  # on a page's boundary, as direct reads want it
        try:
            for path, at in pieces:
                if path not in opened:
                    opened[path] = os.open(path, flags)
                done += os.preadv(opened[path], [buffer], at)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
    return done
