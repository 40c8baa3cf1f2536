"""Ways to read a disk, measured: by how many threads, in which pieces, through the page cache or past it, or by
DeepSpeed's asynchronous I/O; and which one was fastest.

The choice stands in a file of the folder that was measured, for whoever keeps blocks there. It knows no blocks.
"""

import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from afserve.comm.disk.files import File
from afserve.comm.disk.reader import DiskReader, ReadQueue
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
_PAGE, _MOST_DEPTH = 4096, 1024


@dataclass(frozen=True, slots=True)
class Way:
    """`readers` threads; `direct` past the page cache. With a `queue` it is DeepSpeed's asynchronous I/O, and threads
    read so where that cannot be had."""

    direct: bool = False
    readers: int = 2
    queue: ReadQueue | None = None

    @property
    def piece_bytes(self) -> int:
        """Of one read: many threads make small ones, so that the disk has enough to do and memory stays bounded."""
        if self.queue is not None:
            return min(self.queue.piece_bytes, self.most_piece_bytes)
        return min(_PIECE_BYTES, _PIECES_BYTES // max(1, self.readers))

    @property
    def most_piece_bytes(self) -> int:
        at_once = self.readers if self.queue is None else self.queue.asks
        return min(_MOST_PIECE_BYTES, _MOST_PIECES_BYTES // max(1, at_once))

    @property
    def threads(self) -> "Way":
        """The same without DeepSpeed."""
        return replace(self, queue=None)

    def __str__(self) -> str:
        if self.queue is not None:
            kib = self.queue.block_bytes >> 10
            return f"DeepSpeed's asynchronous I/O, {self.queue.asks} x {self.queue.depth} blocks of {kib} KiB at once"
        return f"{self.readers} thread{'s' * (self.readers > 1)}, {'past' if self.direct else 'through'} the page cache"


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second of sequential reading from a cold page cache, the median of the rounds, and seconds of a
    processor for each byte."""

    way: Way
    rate: float
    cost: float = 0.0


WAYS = (*(Way(False, readers) for readers in (1, 2, 4)), *(Way(True, readers) for readers in (1, 4, 16)))
DEEPSPEED_WAYS = tuple(Way(queue=ReadQueue(asks, 256 << 10, 16)) for asks in (2, 4))
Source = tuple[File, DiskReader | None]  # a file, and a process that reads it


def measure(
    folder: Path,
    size: int = MEASURED_BYTES,
    ways: tuple[Way, ...] = WAYS,
    rounds: int = _ROUNDS,
    command: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[Measured]:
    """Of each way that the file system has. Short reads take turns, since a shared disk changes its rate from second to
    second. `command` is that of `DiskReader`; `tell` gets the reason where a way with a queue cannot be had.
    Raises ConfigError where the folder cannot be used."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="io-") as own, ExitStack() as opened:
            path = Path(own) / "data"
            _write(path, size)
            sources: dict[Way, Source] = {}
            for way in ways:
                file = File(path, direct=way.direct)
                opened.callback(file.close)
                if way.queue is not None:
                    reader = DiskReader([file], way.queue, way.queue.asks, way.piece_bytes, command, tell)
                    opened.callback(reader.close)
                    reader.start()
                    sources[way] = file, reader
                elif file.direct == way.direct:
                    sources[way] = file, None
            usable = {way: one for way, one in sources.items() if one[1] is None or one[1].wait_ready()}
            return _in_turns(usable, size, rounds)
    except OSError as error:
        raise ConfigError(
            f"--io {folder}: {error}; give a folder with {size >> 20} MiB free", param="io"
        ) from error


def _in_turns(sources: dict[Way, Source], size: int, rounds: int) -> list[Measured]:
    segment, ways = size // _SEGMENTS, list(sources)
    taken: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(rounds):
        for at, way in enumerate(ways[turn % len(ways) :] + ways[: turn % len(ways)]):
            first = (turn + at) % _SEGMENTS * segment
            file, reader = sources[way]
            file.forget()
            try:
                began = _cpu_seconds(reader)
                seconds = read_seconds(file, range(first, first + segment), way, reader)
                taken[way].append((seconds, _cpu_seconds(reader) - began))
            except OSError:
                if reader is None:
                    raise
                taken.pop(way, None)  # it has ended, and said why
                ways = list(taken)
                break
    return [
        Measured(way, segment / median(wall for wall, _ in found), median(cpu for _, cpu in found) / segment)
        for way, found in taken.items()
        if found
    ]


def _cpu_seconds(reader: DiskReader | None) -> float:
    """Of a processor, of this process and the one that reads for it."""
    return time.process_time() + (reader.cpu_seconds if reader is not None else 0.0)


def fastest(found: Iterable[Measured]) -> Measured:
    """The way with the highest rate; of those that are nearly as fast the one that takes the least of a processor,
    which computes meanwhile. Where that is DeepSpeed's, its threads are the fastest of those."""
    ways = list(found)
    best = max(one.rate for one in ways)
    best_way = min((one for one in ways if one.rate >= _AS_FAST * best), key=lambda one: one.cost)
    threads = [one for one in ways if one.way.queue is None]
    if best_way.way.queue is None or not threads:
        return best_way
    return replace(best_way, way=replace(fastest(threads).way, queue=best_way.way.queue))


def save(folder: Path, chosen: Measured) -> None:
    """Raises ConfigError."""
    way = chosen.way
    found: dict[str, object] = {"direct": way.direct, "readers": way.readers, "rate": chosen.rate}
    if way.queue is not None:
        found["deepspeed"] = asdict(way.queue)
    try:
        (folder / CHOICE).write_text(json.dumps(found), encoding="utf-8")
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
    return Way(direct, readers, _queue(found.get("deepspeed")))


def _queue(found: object) -> ReadQueue | None:
    """None where it is none that may be used."""
    if not isinstance(found, dict):
        return None
    asks, block, depth = found.get("asks"), found.get("block_bytes"), found.get("depth")
    if not (isinstance(asks, int) and isinstance(block, int) and isinstance(depth, int)):
        return None
    whole = block % _PAGE == 0 and 0 < block <= _MOST_PIECE_BYTES
    return (
        ReadQueue(asks, block, depth)
        if whole and 1 <= asks <= _MOST_READERS and 1 <= depth <= _MOST_DEPTH
        else None
    )


def _write(path: Path, size: int) -> None:
    file, piece = File(path), memoryview(os.urandom(_WRITTEN_BYTES))
    try:
        for at in range(0, size, _WRITTEN_BYTES):
            file.write([piece[: size - at]], at)
    finally:
        file.close()


def read_seconds(file: File, place: range, way: Way, reader: DiskReader | None = None) -> float:
    """For the bytes of a file at `place`, into buffers that are used again; by `reader` where there is one. Raises
    OSError."""
    piece, guard = way.piece_bytes, threading.Lock()
    places = iter(range(place.start, place.stop, piece))
    failed: list[OSError] = []

    def read(buffer: memoryview) -> None:
        try:
            for at in _shared(places, guard):
                window = buffer[: place.stop - at]
                if reader is None:
                    file.read_into(window, at)
                else:
                    reader.read_into(window, file, at)
        except OSError as error:
            failed.append(error)

    buffers = reader.windows if reader is not None else [_touched(piece) for _ in range(way.readers)]
    threads = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
    began = time.perf_counter()
    _each(threads, threading.Thread.start)
    _each(threads, threading.Thread.join)
    seconds = time.perf_counter() - began
    if failed:
        raise failed[0]
    return seconds


def _touched(size: int) -> memoryview:
    """Memory that is there, so that it is not the time of its pages that is measured."""
    memory = mmap.mmap(-1, size)
    memory.write(bytes(size))
    return memoryview(memory)


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
