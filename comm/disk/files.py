"""The two files of a store, written and read in whole spans at given places. They belong to whoever holds the lock.

Calls raise OSError as the system does. It knows neither records nor blocks.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from afserve.comm.disk.record import HEAD_BYTES, Bytes

log = logging.getLogger("afserve.disk")
MOST_LANES = 64
_MOST_VECTORS = 512  # below the system's limit for one call
Found = TypeVar("Found")
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600  # what users said stands in there


class File:
    """One open file. Several threads may read and write at once."""

    def __init__(self, path: Path, *, direct: bool = False, writes: bool = True) -> None:
        """`direct`: reads go past the page cache, where the file system can do that and buffers begin at a page.
        Without `writes` the file has to be there. Raises OSError."""
        self.path = path
        how = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
        self._descriptor = os.open(path, how | os.O_CLOEXEC, _PRIVATE_FILE)
        self._reads_from = self._open_direct() if direct else self._descriptor

    def _open_direct(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            log.info("%s is read through the page cache: %s", self.path, error)
            return self._descriptor

    @property
    def direct(self) -> bool:
        return self._reads_from != self._descriptor

    @property
    def descriptor(self) -> int:
        """For a process that is to have the file too; it stays this one's."""
        return self._descriptor

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Bytes read, fewer than asked only where the file ends."""
        return self.read_by(lambda descriptor: self._read(descriptor, buffer, offset))

    def read_by(self, read: Callable[[int], Found]) -> Found:
        """What `read` gives of the descriptor that it is called with: past the page cache first, where that is asked
        for, and through it where the bytes are not aligned for that."""
        if self.direct:
            try:
                return read(self._reads_from)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.debug("%s: bytes are not aligned for a direct read", self.path)
        return read(self._descriptor)

    def read_parts(self, parts: Sequence[memoryview], offset: int) -> int:
        """As `read_into`, one part behind the other and through the page cache."""
        done = 0
        for at in range(0, len(parts), _MOST_VECTORS):
            views = list(parts[at : at + _MOST_VECTORS])
            while views:
                count = os.preadv(self._descriptor, views, offset + done)
                if not count:
                    return done
                done += count
                views = _behind(views, count)
        return done

    def _read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def read(self, offset: int, size: int) -> bytes:
        buffer = bytearray(max(0, min(size, self.size_bytes - offset)))
        return bytes(memoryview(buffer)[: self.read_into(memoryview(buffer), offset)])

    def write(self, parts: Sequence[Bytes], offset: int) -> None:
        """One part behind the other."""
        for at in range(0, len(parts), _MOST_VECTORS):
            views = [memoryview(part).cast("B") for part in parts[at : at + _MOST_VECTORS]]
            while views:
                count = os.pwritev(self._descriptor, views, offset)
                offset += count
                views = _behind(views, count)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def cut(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    @property
    def is_removed(self) -> bool:
        """It has no name any more: what is written is gone with this process."""
        return os.fstat(self._descriptor).st_nlink == 0

    def free_bytes(self) -> int:
        """What its file system has left for this user."""
        found = os.fstatvfs(self._descriptor)
        return found.f_bavail * found.f_frsize

    def forget(self) -> None:
        """Everything is on the disk and nothing in the page cache, where the system obeys."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self.direct:
            os.close(self._reads_from)
        os.close(self._descriptor)


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left behind the first `count` bytes."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []


def _make_private(folder: Path) -> None:
    """With those above it that are missing; `mkdir` with `parents` would leave these open to others."""
    if not folder.parent.is_dir():
        _make_private(folder.parent)
    folder.mkdir(_PRIVATE_FOLDER, exist_ok=True)


class Lane:
    """A folder that one process has for itself while it lives: the kernel gives the lock back with its end."""

    def __init__(self, folder: Path, lock: int, *, direct: bool) -> None:
        self.folder = folder
        self._lock: int | None = lock
        self.index, self.data = File(folder / "index"), File(folder / "data", direct=direct)

    @classmethod
    def take(cls, folder: Path, first: int, *, direct: bool = False) -> "Lane":
        """The lane of that number below `folder`, or the next one that nobody has; `direct` as of `File`. Raises
        OSError."""
        _make_private(folder)
        for number in range(first, first + MOST_LANES):
            if (lane := cls._taken(folder / str(number), direct=direct)) is not None:
                return lane
        raise OSError(f"{folder}: all of {MOST_LANES} folders from {first} on are in use by other processes")

    @classmethod
    def left(cls, folder: Path, *, direct: bool = False) -> "Lane | None":
        """One below `folder` that a process has left, with blocks in it; None where there is none. Raises OSError."""
        for own in sorted(folder.iterdir()):
            index = own / "index"
            has_blocks = own.name.isdigit() and index.exists() and index.stat().st_size > HEAD_BYTES
            if has_blocks and (lane := cls._taken(own, direct=direct)) is not None:
                return lane
        return None

    @classmethod
    def _taken(cls, own: Path, *, direct: bool) -> "Lane | None":
        own.mkdir(_PRIVATE_FOLDER, exist_ok=True)
        lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(own, lock, direct=direct)
        except BlockingIOError:
            os.close(lock)
            return None
        except OSError:
            os.close(lock)
            raise

    def close(self) -> None:
        """May be said again."""
        if self._lock is not None:
            self.index.close()
            self.data.close()
            os.close(self._lock)
            self._lock = None
