"""Named blocks in files: found after a restart, never more than a given size, and never other bytes than were written.

A write forgets what stands in the slots, in memory and in the file, then writes the blocks, then their records. So a
process that is killed leaves slots without a record. Whatever else may happen to the files, a block is given out only
where its checksum is right. All calls may come from any thread, writes from one at a time.
"""

import ctypes
import errno
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from afserve.comm.disk.files import File, Lane
from afserve.comm.disk.passes import CacheMemory, Passes
from afserve.comm.disk.reader import DiskReader
from afserve.comm.disk.record import (
    HEAD_BYTES,
    NO_RECORD,
    RECORD_BYTES,
    BlockRecord,
    Blocks,
    Bytes,
    Name,
    StoreFormat,
    checksum_of,
    decode_records,
    encode_head,
    encode_record,
    is_head_of,
)
from afserve.comm.disk.ring import Ring

_ALIGNED = 512  # bytes between slots are a multiple: reads past the page cache need that
SPARED_BYTES = 1 << 30  # of the file system stay free
_FOLDER_DIGITS = 16
DAMAGED, UNREADABLE = "damaged", "unreadable"


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Blocks side by side in the data file, from slot `first` on; `begin` is the place of the first in what was
    asked."""

    begin: int
    first: int
    names: tuple[Name, ...]
    records: tuple[BlockRecord, ...]


class DiskStore:
    """`limit` bytes at most are kept. `dropped` counts blocks that were given up when they were read, by reason."""

    def __init__(self, lane: Lane, kind: StoreFormat, limit: int, spared: int = SPARED_BYTES) -> None:
        """Takes the lane over. Raises OSError."""
        self._lane, self.kind, self._spared = lane, kind, spared
        self._guard = threading.Lock()
        self.dropped: Counter[str] = Counter()
        self.bytes_read = self.bytes_written = 0
        self._ring = Ring(max(1, limit // kind.pitch), self._restart())
        end = self._ring.capacity * kind.pitch
        if lane.data.size_bytes > end:
            lane.data.cut(end)
            lane.index.cut(HEAD_BYTES + self._ring.capacity * RECORD_BYTES)

    @classmethod
    def open(
        cls,
        folder: Path,
        what: str,
        block_bytes: int,
        limit: int,
        lane: int = 0,
        *,
        spared: int = SPARED_BYTES,
        direct: bool = False,
    ) -> "DiskStore":
        """The store of blocks of `what` (a digest) below `folder`, in this lane or the next free one. Raises OSError.

        Blocks of another kind are in another folder. `direct` reads go past the page cache.
        """
        kind = StoreFormat(what, block_bytes, -(-block_bytes // _ALIGNED) * _ALIGNED)
        own = Lane.take(folder / what[:_FOLDER_DIGITS], lane, direct=direct)
        try:
            return cls(own, kind, limit, spared)
        except BaseException:
            own.close()
            raise

    def left_beside(self, limit: int) -> "DiskStore | None":
        """What another process of this host has left of the same blocks; None where there is nothing. It is this one's
        from now on. Raises OSError."""
        if (lane := Lane.left(self.folder.parent, direct=self._lane.data.direct)) is None:
            return None
        try:
            return DiskStore(lane, self.kind, limit, self._spared)
        except BaseException:
            lane.close()
            raise

    def _restart(self) -> list[tuple[int, BlockRecord]]:
        """What an earlier process left; of another kind, or without a head, it is thrown away."""
        index = self._lane.index
        if is_head_of(self.kind, index.read(0, HEAD_BYTES)):
            return list(decode_records(index.read(HEAD_BYTES, index.size_bytes)))
        index.cut(0)
        self._lane.data.cut(0)
        index.write([encode_head(self.kind)], 0)
        return []

    # ---- what is there

    @property
    def folder(self) -> Path:
        return self._lane.folder

    @property
    def blocks(self) -> int:
        return len(self._ring)

    @property
    def capacity(self) -> int:
        """Blocks."""
        return self._ring.capacity

    @property
    def overwritten(self) -> int:
        return self._ring.overwritten

    def run(self, names: Sequence[Name]) -> int:
        """How many of these are there, from the first on."""
        with self._guard:
            return self._ring.run(names)

    def holds(self, names: Iterable[Name]) -> list[bool]:
        """Of each whether it is there."""
        with self._guard:
            return self._ring.holds(names)

    def worth_writing(self, names: Iterable[Name]) -> list[Name]:
        """Those that are worth writing: they are not there, or would be overwritten soon."""
        with self._guard:
            return self._ring.worth_writing(names)

    # ---- writing

    def write(self, names: Sequence[Name], payload: Bytes) -> None:
        """Keep these blocks, one behind the other in `payload`. Raises OSError once nothing can be kept any more."""
        size = self.kind.block_bytes
        view, done = memoryview(payload).cast("B"), 0
        assert len(view) == len(names) * size, f"{len(view)} bytes for {len(names)} blocks of {size}"
        if self._lane.data.is_removed or self._lane.index.is_removed:
            raise OSError("its files were removed")
        while done < len(names):
            slots = self._take(len(names) - done)
            blocks = [view[(done + i) * size : (done + i + 1) * size] for i in range(len(slots))]
            try:
                self._fill(slots, names[done : done + len(slots)], blocks)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise  # not for lack of room: what is there may still be read
                with self._guard:
                    if not self._ring.end_at(slots.start):
                        raise
                continue
            done += len(slots)

    def _take(self, count: int) -> range:
        """Where the file would grow and the file system is nearly full, the ring ends and begins anew."""
        with self._guard:
            used = self._ring.slots_written
            slots = self._ring.take(count)
        grows = (slots.stop - used) * self.kind.pitch
        if grows > 0 and self._lane.data.free_bytes() < grows + self._spared:
            with self._guard:
                if not self._ring.end_at(used):
                    raise OSError(f"less than {self._spared >> 20} MiB are free")
                slots = range(slots.start, min(slots.stop, used)) or self._ring.take(count)
        return slots

    def _fill(self, slots: range, names: Sequence[Name], blocks: Sequence[memoryview]) -> None:
        index, pitch = self._lane.index, self.kind.pitch
        place = HEAD_BYTES + slots.start * RECORD_BYTES
        index.write([NO_RECORD * len(slots)], place)
        gap = bytes(pitch - self.kind.block_bytes)
        parts = [part for block in blocks for part in (block, gap)] if gap else blocks
        self._lane.data.write(parts, slots.start * pitch)
        sums = [checksum_of(name, block) for name, block in zip(names, blocks, strict=True)]
        with self._guard:
            records = [self._ring.put(*one) for one in zip(slots, names, sums, strict=True)]
            self.bytes_written += len(slots) * self.kind.block_bytes
        index.write([b"".join(map(encode_record, slots, records))], place)

    # ---- reading

    def spans(self, names: Sequence[Name], most_bytes: int) -> list[SlotRun]:
        """Where the first of these are that are there, in spans of at most so many bytes (one block at least)."""
        most = max(1, most_bytes // self.kind.pitch)
        with self._guard:
            slots, records = self._ring.places(names)
        spans, begin = [], 0
        for at in range(1, len(slots) + 1):
            if at == len(slots) or slots[at] != slots[at - 1] + 1 or at - begin == most:
                spans.append(SlotRun(begin, slots[begin], tuple(names[begin:at]), tuple(records[begin:at])))
                begin = at
        return spans

    def fetch(self, span: SlotRun, buffer: memoryview) -> int | None:
        """Fill `buffer` with the span's slots; how many bytes came, None where they cannot be read."""
        pitch = self.kind.pitch
        try:
            return self._lane.data.read_into(buffer[: len(span.names) * pitch], span.first * pitch)
        except OSError:
            return None

    def fetch_by(self, reader: DiskReader, span: SlotRun, window: memoryview) -> int:
        """As `fetch`, by another process, into a window of its memory. Raises OSError, as `DiskReader.read_into`."""
        pitch = self.kind.pitch
        return reader.read_into(window[: len(span.names) * pitch], self._lane.data, span.first * pitch)

    @property
    def data(self) -> File:
        """For a process that reads it."""
        return self._lane.data

    @property
    def dense(self) -> bool:
        """Whether nothing lies between two slots, so that `fetch_parts` may be used."""
        return self.kind.pitch == self.kind.block_bytes

    def fetch_parts(self, span: SlotRun, blocks: Blocks) -> int | None:
        """As `fetch`, into each block's own memory."""
        try:
            parts = list(itertools.chain.from_iterable(blocks))
            return self._lane.data.read_parts(parts, span.first * self.kind.pitch)
        except OSError:
            return None

    def in_buffer(self, span: SlotRun, buffer: memoryview) -> Blocks:
        """The blocks that `fetch` brings."""
        pitch, size = self.kind.pitch, self.kind.block_bytes
        return [[buffer[at * pitch : at * pitch + size]] for at in range(len(span.names))]

    def check_read(self, span: SlotRun, blocks: Blocks, fetched: int | None) -> int:
        """How many blocks of what was fetched are right, from the first on.

        Wrong ones are forgotten. A block that was overwritten meanwhile is wrong, and none that is dropped.
        """
        pitch, size = self.kind.pitch, self.kind.block_bytes
        came = fetched or 0
        whole = [
            at * pitch + size <= came and checksum_of(name, *blocks[at]) == record.checksum
            for at, (name, record) in enumerate(zip(span.names, span.records, strict=True))
        ]
        return self._count(span, whole, UNREADABLE if fetched is None else DAMAGED)

    def fetch_checked(self, passes: Passes, span: SlotRun, memory: CacheMemory, window: memoryview) -> int:
        """`fetch_parts` and `check_read` in one pass, into the cache's own memory by way of `window`."""
        sums, pitch = [record.checksum for record in span.records], self.kind.pitch
        try:
            whole = self._lane.data.read_by(
                lambda file: passes.read(file, span.first * pitch, pitch, window, memory, span.names, sums)
            )
        except OSError:
            return self._count(span, [False] * len(sums), UNREADABLE)
        return self._count(span, whole, DAMAGED)

    def copy_checked(
        self, passes: Passes, span: SlotRun, memory: CacheMemory, buffer: memoryview, fetched: int
    ) -> int:
        """`check_read` of what `fetch_by` brought; the same pass copies right blocks to the cache's memory."""
        pitch, size = self.kind.pitch, self.kind.block_bytes
        came = min(len(span.names), max(0, fetched + pitch - size) // pitch)
        first = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        some = CacheMemory(memory.parts, memory.blocks[:came])
        sums = [record.checksum for record in span.records[:came]]
        addresses = [first + at * pitch for at in range(came)]
        whole = passes.put(addresses, some, span.names[:came], sums) if came else []
        return self._count(span, [*whole, *(False for _ in range(len(span.names) - came))], DAMAGED)

    def _count(self, span: SlotRun, whole: Sequence[bool], reason: str) -> int:
        """Right ones from the first on; those that are not whole are forgotten."""
        right = whole.index(False) if False in whole else len(whole)
        for at in range(right, len(whole)):
            if not whole[at]:
                self._give_up(span.names[at], span.records[at], reason)
        with self._guard:
            self.bytes_read += right * self.kind.block_bytes
        return right

    def read(self, span: SlotRun, buffer: memoryview) -> int:
        """Both: how many blocks of the span are in `buffer`."""
        return self.check_read(span, self.in_buffer(span, buffer), self.fetch(span, buffer))

    def _give_up(self, name: Name, record: BlockRecord, reason: str) -> None:
        with self._guard:
            if self._ring.forget(name, record):
                self.dropped[reason] += 1

    def check(self) -> None:
        """Integrity; for tests."""
        with self._guard:
            self._ring.check()

    def close(self) -> None:
        """Nothing has to be written: the files always say what is in them."""
        self._lane.close()
