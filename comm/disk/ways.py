"""Ways to read a disk, measured: with how many threads, through the page cache or past it; and which one was fastest.

The choice stands in a file of the folder that was measured, for whoever keeps blocks there. It knows no blocks.
"""

import itertools
import json
import mmap
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from afserve.comm.disk.files import File
from afserve.errors import CheckpointError, ConfigError
from afserve.json_file import read_object

CHOICE = "io.json"
PIECE_BYTES = 4 << 20
MEASURED_BYTES = 256 << 20
_ROUNDS = 3
_MOST_BYTES = 1 << 12
_MOST_READERS = 16


@dataclass(frozen=True, slots=True)
class Way:
    """`readers` threads; `direct` past the page cache."""

    direct: bool = False
    readers: int = 2

    def __str__(self) -> str:
        return f"{self.readers} thread{'s' * (self.readers > 1)}, {'past' if self.direct else 'through'} the page cache"


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second of sequential reading from a cold page cache, the best of the rounds."""

    way: Way
    rate: float


WAYS = tuple(Way(direct, readers) for direct, readers in itertools.product((False, True), (1, 2, 4)))


def measure(folder: Path, size: int = MEASURED_BYTES, ways: tuple[Way, ...] = WAYS) -> list[Measured]:
    """Of each way that the file system has; rounds alternate. Raises ConfigError where the folder cannot be used."""
    best: dict[Way, float] = {}
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="io-") as own:
            path = Path(own) / "data"
            _write(path, size)
            for _, way in itertools.product(range(_ROUNDS), ways):
                file = File(path, direct=way.direct)
                try:
                    if file.direct == way.direct:
                        best[way] = max(best.get(way, 0.0), size / read_seconds(file, size, way.readers))
                finally:
                    file.close()
    except OSError as error:
        raise ConfigError(
            f"--io {folder}: {error}; give a folder with {size >> 20} MiB free", param="io"
        ) from error
    return [Measured(way, rate) for way, rate in best.items()]


def save(folder: Path, chosen: Measured) -> None:
    """Raises ConfigError."""
    try:
        (folder / CHOICE).write_text(
            json.dumps({**asdict(chosen.way), "rate": chosen.rate}), encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(
            f"--io {folder}: {error}; give a folder that you may write to", param="io"
        ) from error


def chosen(folder: Path) -> Way:
    """What was measured as fastest here; what is good anywhere, where nothing was."""
    try:
        found = read_object(folder / CHOICE, _MOST_BYTES)
    except (OSError, CheckpointError):
        return Way()
    direct, readers = found.get("direct"), found.get("readers")
    if not isinstance(direct, bool) or not isinstance(readers, int) or not 1 <= readers <= _MOST_READERS:
        return Way()
    return Way(direct, readers)


def _write(path: Path, size: int) -> None:
    file, piece = File(path), memoryview(bytearray(PIECE_BYTES))
    try:
        for at in range(0, size, PIECE_BYTES):
            file.write([piece[: size - at]], at)
    finally:
        file.close()


def read_seconds(file: File, size: int, readers: int) -> float:
    """For the first `size` bytes, from a cold page cache. Raises OSError."""
    file.forget()
    places, guard = iter(range(0, size, PIECE_BYTES)), threading.Lock()
    failed: list[OSError] = []

    def read() -> None:
        buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
        try:
            for at in _shared(places, guard):
                file.read_into(buffer[: size - at], at)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    began = time.perf_counter()
    _each(threads, threading.Thread.start)
    _each(threads, threading.Thread.join)
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def _shared(places: Iterator[int], guard: threading.Lock) -> Iterator[int]:
    while True:
        with guard:
            at = next(places, None)
        if at is None:
            return
        yield at


def _each(threads: list[threading.Thread], act: Callable[[threading.Thread], None]) -> None:
    for thread in threads:
        act(thread)
