"""The file of an audit log, which gateways of one host share, whatever is done to it meanwhile: where it was moved away
or deleted, a new one goes on with the chain of the one before."""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Mapping

from afserve.errors import ConfigError
from afserve.server.http.audit_chain import MOST_LINE, START, chained, hash_of

log = logging.getLogger("afserve.audit")
_TAIL = 1 << 12  # bytes of the end that are read first
_MOVES = 8  # of the file while one line is written


class AuditFile:
    """Raises ConfigError where it cannot be written, or is no regular file."""

    def __init__(self, path: str) -> None:
        try:
            self._file = _opened(path)
        except OSError as error:
            raise ConfigError(f"audit-log: {path}: {error.strerror}", param="audit-log") from error
        self._path = path
        self.last, self._size = START, 0  # the hash of the last line that is known here, and the file's size
        self.last = self._last_hash()

    def append(self, entry: Mapping[str, object]) -> None:
        """All of a line or nothing of it: raises OSError."""
        self._lock()
        try:
            size, last = os.fstat(self._file).st_size, self._last_hash()
            line = chained(entry, last)
            if not self._ends_whole(size):
                line = b"\n" + line  # what a crash has cut stays a line of its own
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.last, self._size = hash_of(line) or START, size + len(line)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        """The file that is there. Whoever finds it moved holds the lock of the old one, so that nobody adds to that."""
        for _ in range(_MOVES):
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                if self._is_in_place():
                    return
                self.last, self._size = self._last_hash(), 0
                new = _opened(self._path)
            except OSError:
                fcntl.flock(self._file, fcntl.LOCK_UN)
                raise
            os.close(self._file)
            self._file = new
            log.warning("audit-log: %s was moved or deleted; a new file goes on with its chain", self._path)
        raise OSError(errno.EAGAIN, "the file is moved away again and again")

    def _is_in_place(self) -> bool:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._file))

    def _last_hash(self) -> str:
        """Of a file that was emptied that of the last line which this process wrote, so that the chain shows it."""
        size = os.fstat(self._file).st_size
        if size in (0, self._size):
            return self.last
        length = _TAIL
        while True:
            tail = os.pread(self._file, length, max(0, size - length))
            whole = tail.rstrip(b"\n").rfind(b"\n") + 1
            if whole or length >= min(size, MOST_LINE):
                return hash_of(tail[whole:]) or START  # which a check names as a break
            length = min(length * 16, MOST_LINE)

    def _ends_whole(self, size: int) -> bool:
        return size in (0, self._size) or os.pread(self._file, 1, size - 1) == b"\n"


def _opened(path: str) -> int:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no regular file, so that no line can follow another")
    return file
