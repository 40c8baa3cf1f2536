"""Threads that read and write a store, so that nobody else ever waits for the disk.

Writes are bounded in bytes and reads in buffers: what does not fit is refused or waits its turn. Where whoever reads
has memory in the order of the file, it is read there. What was read is in `done` for whoever takes it out, who gives it
back. Where the way has a queue, a process of its own reads, and threads where that has ended. It knows no requests.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

from afserve.comm.disk.deepspeed_library import libraries
from afserve.comm.disk.passes import CacheMemory, Passes
from afserve.comm.disk.reader import DiskReader
from afserve.comm.disk.record import Blocks, Bytes, Name
from afserve.comm.disk.store import DiskStore, SlotRun
from afserve.comm.disk.ways import Way

_PIECE_BLOCKS = 8  # of one read at least, where that many are not too large
_BUFFERS = 2  # for each reader: one is filled while another is taken out
STAGED_BYTES = 64 << 20  # copied out of the cache and not yet written
_CLOSE_SECONDS = 10.0
_WINDOW_BYTES = 512 << 10  # read, checked and copied while a processor has it in its caches
# The memory of so many blocks of what a job reads, from this one on. Addresses are for `DiskWorkers.passes`.
Place = Callable[[int, int], Blocks | CacheMemory]


@dataclass(frozen=True, slots=True)
class Read:
    """The first `right` blocks of a span, in `buffer` from slot to slot, or without one in place."""

    job: int
    span: SlotRun
    right: int
    buffer: memoryview | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """A span to be read, and where to, from its first block on; None reads into a buffer."""

    number: int
    span: SlotRun
    place: Place | None


@dataclass(frozen=True, slots=True)
class _Check:
    """What was read of a job, `fetched` bytes of it. `blocks` that are a cache's are copied there from the buffer."""

    job: _Job
    blocks: Blocks | CacheMemory
    buffer: memoryview | None
    fetched: int | None


class DiskWorkers:
    """`wake` is called, from a thread, when something is in `done` or there is room for writes again; `tell` once, when
    nothing can be written any more, and once, when a `way` with a queue cannot be had or has ended. `refused` counts
    blocks that came too late to be written."""

    def __init__(
        self,
        store: DiskStore,
        wake: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda line: None,
        way: Way = Way(),  # noqa: B008
        command: Sequence[str] = (),
    ) -> None:
        """`command` is that of `DiskReader`."""
        self.store, self._wake, self._tell = store, wake, tell
        self.done: deque[Read] = deque()
        self.writable, self.refused = True, 0
        self._guard = threading.Lock()
        self._staged = 0
        self._queued: set[Name] = set()
        self._wanted: set[int] = set()
        self._begun: dict[
            tuple[int, int], int
        ] = {}  # blocks that are being read, or in `done`, by job and begin
        self._reads: SimpleQueue[_Job | None] = SimpleQueue()
        self._writes: SimpleQueue[tuple[Sequence[Name], Bytes] | None] = SimpleQueue()
        self._checks: SimpleQueue[_Check | None] = SimpleQueue()
        self._buffers: SimpleQueue[memoryview | None] = SimpleQueue()
        self.in_place = store.dense and not way.direct and way.queue is None
        self.passes = Passes.open(store.kind.block_bytes)
        pitch = store.kind.pitch
        self._piece = max(pitch, min(way.most_piece_bytes, max(way.piece_bytes, _PIECE_BLOCKS * pitch)))
        self._way = way
        self._reader = self._opened(command)
        at_once = way.readers if self._reader is None else max(way.readers, self._reader.queue.asks)
        self._threads = [
            threading.Thread(target=self._read, name=f"disk-read-{n}", daemon=True) for n in range(at_once)
        ]
        self._threads.append(threading.Thread(target=self._check, name="disk-check", daemon=True))
        self._threads.append(threading.Thread(target=self._write, name="disk-write", daemon=True))

    def _opened(self, command: Sequence[str]) -> DiskReader | None:
        if (queue := self._way.queue) is None:
            return None
        if not command and libraries() is None:
            self._tell_ended("it is not built here for this version of torch")
            return None
        size = -(-self._piece // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            return DiskReader(
                [self.store.data], queue, queue.asks * _BUFFERS, size, command, self._tell_ended
            )
        except OSError as error:
            self._tell_ended(str(error))
            return None

    def _tell_ended(self, why: str) -> None:
        self._tell(
            f"{self.store.folder} is not read by DeepSpeed's asynchronous I/O: {why}; this node reads it by "
            f"{self._way.threads} from here on. `afserve doctor --io` measures it again"
        )

    def start(self) -> None:
        count = len(self._threads[:-2]) * _BUFFERS
        windows = self._reader.windows if self._reader is not None else []
        for buffer in [*windows, *(self._buffer() for _ in range(count - len(windows)))]:
            self._buffers.put(buffer)
        if self._reader is not None:
            self._reader.start()
        for thread in self._threads:
            thread.start()

    def _buffer(self) -> memoryview:
        return memoryview(mmap.mmap(-1, self._piece))

    # ---- writing

    @property
    def staging_room(self) -> int:
        """Bytes that may be given to `write` now."""
        return max(0, STAGED_BYTES - self._staged) if self.writable else 0

    def worth_writing(self, names: Iterable[Name]) -> list[Name]:
        """Those that are worth writing."""
        return (
            [name for name in self.store.worth_writing(names) if name not in self._queued]
            if self.writable
            else []
        )

    def write(self, names: Sequence[Name], payload: Bytes) -> None:
        """Keep these blocks; `payload` must not change any more."""
        with self._guard:
            self._staged += len(payload)
            self._queued.update(names)
        self._writes.put((names, payload))

    @property
    def writing(self) -> bool:
        return bool(self._staged)

    # ---- reading

    def read(self, job: int, names: Sequence[Name], begin: int = 0, place: Place | None = None) -> int:
        """Begin to read the first of these that are there; how many those are. They come until `end`. The first one is
        at `begin` of what the job reads. With a `place` they come to its memory: where that may be done `in_place`, or
        by `passes`."""
        spans = self.store.spans(names, self._piece)
        self._wanted.add(job)
        for span in spans:
            moved = span if not begin else replace(span, begin=begin + span.begin)
            self._reads.put(_Job(job, moved, place))
        return sum(len(span.names) for span in spans)

    def end(self, job: int) -> list[tuple[int, int]]:
        """What of it was not read yet never is; what is being read comes to `done`, and stays there. Returns where
        that begins, and how many blocks it has: until it was given back, its memory may be written to."""
        with self._guard:
            self._wanted.discard(job)
            return [(begin, count) for (number, begin), count in self._begun.items() if number == job]

    def return_buffer(self, read: Read) -> None:
        with self._guard:
            self._begun.pop((read.job, read.span.begin), None)
        if read.buffer is not None:
            self._buffers.put(read.buffer)

    # ---- threads

    def _read(self) -> None:
        while (job := self._reads.get()) is not None:
            if (buffer := self._buffers.get()) is None:
                return
            if not self._begins(job):
                self._buffers.put(buffer)
                continue
            if self._reader is not None and self._reader.ready:
                if self._asked(self._reader, job, buffer):
                    continue
                buffer = self._buffer()  # the other one may still be written to
            if job.place is None:
                fetched = self.store.fetch(job.span, buffer)
                self._checks.put(_Check(job, self.store.in_buffer(job.span, buffer), buffer, fetched))
            else:
                self._read_in_place(job, job.place(job.span.begin, len(job.span.names)), buffer)
                self._buffers.put(buffer)

    def _asked(self, reader: DiskReader, job: _Job, window: memoryview) -> bool:
        """Whether the process read it."""
        try:
            fetched = self.store.fetch_by(reader, job.span, window)
        except OSError:
            return False
        place, span = job.place, job.span
        blocks = self.store.in_buffer(span, window) if place is None else place(span.begin, len(span.names))
        self._checks.put(_Check(job, blocks, window, fetched))
        return True

    def _read_in_place(self, job: _Job, blocks: Blocks | CacheMemory, buffer: memoryview) -> None:
        if not isinstance(blocks, CacheMemory):
            self._checks.put(_Check(job, blocks, None, self.store.fetch_parts(job.span, blocks)))
            return
        assert self.passes is not None
        window = buffer[: max(_WINDOW_BYTES, self.store.kind.pitch)]
        right = self.store.fetch_checked(self.passes, job.span, blocks, window)
        self.done.append(Read(job.number, job.span, right))
        self._wake()

    def _begins(self, job: _Job) -> bool:
        """Whether it is still wanted."""
        with self._guard:
            wanted = job.number in self._wanted
            if wanted:
                self._begun[job.number, job.span.begin] = len(job.span.names)
            return wanted

    def _check(self) -> None:
        """Beside the reads, so that the disk does not wait for checksums."""
        while (one := self._checks.get()) is not None:
            job, blocks, buffer = one.job, one.blocks, one.buffer
            if not isinstance(blocks, CacheMemory):
                right = self.store.check_read(job.span, blocks, one.fetched)
            else:
                assert self.passes is not None and buffer is not None and one.fetched is not None
                right = self.store.copy_checked(self.passes, job.span, blocks, buffer, one.fetched)
                self._buffers.put(buffer)
                buffer = None
            self.done.append(Read(job.number, job.span, right, buffer))
            self._wake()

    def _write(self) -> None:
        while (job := self._writes.get()) is not None:
            names, payload = job
            try:
                if self.writable:
                    self.store.write(names, payload)
                else:
                    self.refused += len(names)
            except OSError as error:
                self.writable = False
                self.refused += len(names)
                self._tell(
                    f"KV is not written to {self.store.folder} any more: {error}; what is there is still read. "
                    "Free some space or give another --kv-ssd, and restart the node"
                )
            with self._guard:
                self._staged -= len(payload)
                self._queued.difference_update(names)
            self._wake()

    def close(self) -> None:
        """What was given to `write` is written first, where that takes less than ten seconds."""
        self._writes.put(None)
        self._checks.put(None)
        for _ in self._threads[:-2]:
            self._reads.put(None)
            self._buffers.put(None)
        if self._reader is not None:
            self._reader.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CLOSE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self.store.close()
