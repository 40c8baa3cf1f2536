"""Ways to read a disk, measured: by how many threads, in which pieces, through the page cache or past it; and which one
was fastest.

The choice stands in a file of the folder that was measured, for whoever keeps blocks there. It knows no blocks.
"""

import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from afserve.comm.disk.files import File
from afserve.errors import CheckpointError, ConfigError
from afserve.json_file import read_object

CHOICE = "io.json"
MEASURED_BYTES = 256 << 20
_SEGMENTS, _ROUNDS = 4, 12  # of the file; a round reads one of them in each way
_AS_FAST = 0.95  # of the best rate counts as that rate
_WRITTEN_BYTES = 4 << 20
_MOST_BYTES = 1 << 12
_MOST_READERS = 16
_PIECE_BYTES, _PIECES_BYTES = 4 << 20, 16 << 20  # of one read, and of all readers' at once
_MOST_PIECE_BYTES, _MOST_PIECES_BYTES = 16 << 20, 64 << 20  # where blocks are large


@dataclass(frozen=True, slots=True)
class Way:
    """`readers` threads; `direct` past the page cache."""

    direct: bool = False
    readers: int = 2

    @property
    def piece_bytes(self) -> int:
        """Of one read: many threads make small ones, so that the disk has enough to do and memory stays bounded."""
        return min(_PIECE_BYTES, _PIECES_BYTES // max(1, self.readers))

    @property
    def most_piece_bytes(self) -> int:
        return min(_MOST_PIECE_BYTES, _MOST_PIECES_BYTES // max(1, self.readers))

    def __str__(self) -> str:
        return f"{self.readers} thread{'s' * (self.readers > 1)}, {'past' if self.direct else 'through'} the page cache"


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second of sequential reading from a cold page cache, the median of the rounds, and seconds of a
    processor for each byte."""

    way: Way
    rate: float
    cost: float = 0.0


WAYS = (
    *(Way(False, readers) for readers in (1, 2, 4)),
    *(Way(True, readers) for readers in (1, 4, 16)),
)


def measure(
    folder: Path, size: int = MEASURED_BYTES, ways: tuple[Way, ...] = WAYS, rounds: int = _ROUNDS
) -> list[Measured]:
    """Of each way that the file system has. Short reads take turns, since a shared disk changes its rate from second to
    second. Raises ConfigError where the folder cannot be used."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="io-") as own:
            path = Path(own) / "data"
            _write(path, size)
            files = {direct: File(path, direct=direct) for direct in {way.direct for way in ways}}
            try:
                usable = [way for way in ways if files[way.direct].direct == way.direct]
                return _in_turns(files, usable, size, rounds)
            finally:
                for file in files.values():
                    file.close()
    except OSError as error:
        raise ConfigError(
            f"--io {folder}: {error}; give a folder with {size >> 20} MiB free", param="io"
        ) from error


def _in_turns(files: dict[bool, File], ways: list[Way], size: int, rounds: int) -> list[Measured]:
    segment = size // _SEGMENTS
    taken: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(rounds):
        for at, way in enumerate(ways[turn % len(ways) :] + ways[: turn % len(ways)]):
            first = (turn + at) % _SEGMENTS * segment
            file = files[way.direct]
            file.forget()
            began = time.process_time()
            seconds = read_seconds(file, range(first, first + segment), way)
            taken[way].append((seconds, time.process_time() - began))
    return [
        Measured(way, segment / median(wall for wall, _ in found), median(cpu for _, cpu in found) / segment)
        for way, found in taken.items()
    ]


def fastest(found: Iterable[Measured]) -> Measured:
    """The way with the highest rate; of those that are nearly as fast the one that takes the least of a processor,
    which computes meanwhile."""
    ways = list(found)
    best = max(one.rate for one in ways)
    return min((one for one in ways if one.rate >= _AS_FAST * best), key=lambda one: one.cost)


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
    file, piece = File(path), memoryview(os.urandom(_WRITTEN_BYTES))
    try:
        for at in range(0, size, _WRITTEN_BYTES):
            file.write([piece[: size - at]], at)
    finally:
        file.close()


def read_seconds(file: File, place: range, way: Way) -> float:
    """For the bytes of a file at `place`, into buffers that are used again. Raises OSError."""
    piece, guard = way.piece_bytes, threading.Lock()
    places = iter(range(place.start, place.stop, piece))
    failed: list[OSError] = []

    def read(memory: mmap.mmap) -> None:
        buffer = memoryview(memory)
        try:
            for at in _shared(places, guard):
                file.read_into(buffer[: place.stop - at], at)
        except OSError as error:
            failed.append(error)

    memories = [_touched(piece) for _ in range(way.readers)]
    threads = [threading.Thread(target=read, args=(memory,)) for memory in memories]
    began = time.perf_counter()
    _each(threads, threading.Thread.start)
    _each(threads, threading.Thread.join)
    seconds = time.perf_counter() - began
    if failed:
        raise failed[0]
    return seconds


def _touched(size: int) -> mmap.mmap:
    """Memory that is there, so that it is not the time of its pages that is measured."""
    memory = mmap.mmap(-1, size)
    memory.write(bytes(size))
    return memory


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
