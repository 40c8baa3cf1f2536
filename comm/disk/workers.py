"""Threads that read and write a store, so that nobody else ever waits for the disk.

Writes are bounded in bytes and reads in buffers: what does not fit is refused or waits its turn. What was read is in
`done` for whoever takes it out, who gives the buffer back. It knows no requests.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from afserve.comm.disk.record import Bytes, Name
from afserve.comm.disk.store import DiskStore, Span

PIECE_BYTES, MOST_PIECE_BYTES = (
    4 << 20,
    16 << 20,
)  # of one read: eight blocks, within these, or one larger block
_PIECE_BLOCKS = 8
READERS = 2
_BUFFERS = 2  # for each reader: one is filled while another is taken out
STAGED_BYTES = 64 << 20  # copied out of the cache and not yet written
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Read:
    """The first `right` blocks of a span, in `buffer` from slot to slot."""

    job: int
    span: Span
    right: int
    buffer: memoryview


class DiskWorkers:
    """`wake` is called, from a thread, when something is in `done` or there is room for writes again; `tell` once, when
    nothing can be written any more. `refused` counts blocks that came too late for that."""

    def __init__(
        self,
        store: DiskStore,
        wake: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda line: None,
        readers: int = READERS,
    ) -> None:
        self.store, self._wake, self._tell = store, wake, tell
        self.done: deque[Read] = deque()
        self.writable, self.refused = True, 0
        self._guard = threading.Lock()
        self._staged = 0
        self._queued: set[Name] = set()
        self._wanted: set[int] = set()
        self._reads: SimpleQueue[tuple[int, Span] | None] = SimpleQueue()
        self._writes: SimpleQueue[tuple[Sequence[Name], Bytes] | None] = SimpleQueue()
        self._buffers: SimpleQueue[memoryview | None] = SimpleQueue()
        pitch = store.kind.pitch
        self._piece = max(pitch, min(MOST_PIECE_BYTES, max(PIECE_BYTES, _PIECE_BLOCKS * pitch)))
        self._memory = [mmap.mmap(-1, self._piece) for _ in range(readers * _BUFFERS)]
        self._threads = [
            threading.Thread(target=self._read, name=f"disk-read-{n}", daemon=True) for n in range(readers)
        ]
        self._threads.append(threading.Thread(target=self._write, name="disk-write", daemon=True))

    def start(self) -> None:
        for memory in self._memory:
            self._buffers.put(memoryview(memory))
        for thread in self._threads:
            thread.start()

    # ---- writing

    @property
    def room(self) -> int:
        """Bytes that may be given to `write` now."""
        return max(0, STAGED_BYTES - self._staged) if self.writable else 0

    def wants(self, name: Name) -> bool:
        return self.writable and name not in self._queued and self.store.wants(name)

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

    def read(self, job: int, names: Sequence[Name]) -> int:
        """Begin to read the first of these that are there; how many those are. They come until `end`."""
        spans = self.store.spans(names, self._piece)
        self._wanted.add(job)
        for span in spans:
            self._reads.put((job, span))
        return sum(len(span.names) for span in spans)

    def end(self, job: int) -> None:
        """What of it was not read yet never is; what is in `done` stays there."""
        self._wanted.discard(job)

    def give_back(self, read: Read) -> None:
        self._buffers.put(read.buffer)

    # ---- threads

    def _read(self) -> None:
        while (job := self._reads.get()) is not None:
            number, span = job
            if number not in self._wanted:
                continue
            buffer = self._buffers.get()
            if buffer is None:
                return
            self.done.append(Read(number, span, self.store.read(span, buffer), buffer))
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
        for _ in self._threads[:-1]:
            self._reads.put(None)
            self._buffers.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CLOSE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self.store.close()
