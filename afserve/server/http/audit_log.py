"""Who asked what of which model, when, how many tokens it took, and what was refused: a file that only grows, each line
with a hash over itself and the line before, so that a line that was changed, removed or put in is found.

Gateways of one host share the file. A thread writes, so that a slow disk costs requests nothing. No text, unless it is
asked for.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from afserve.errors import ConfigError

log = logging.getLogger("afserve.audit")
MOST_WAITING = 10_000  # entries
MOST_LINE = 1 << 20  # bytes
_START = "0" * 64
_CLOSE = 5.0  # seconds for what waits, at the end


class AuditLog:
    """Raises ConfigError where the file cannot be written."""

    def __init__(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"audit-log: {path}: {error.strerror}", param="audit-log") from error
        self._path = path
        self._queue: queue.Queue[Mapping[str, object] | None] = queue.Queue(MOST_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    def note_request(self, entry: Mapping[str, object]) -> None:
        """What finds no room is counted, and the next line says how many that were."""
        try:
            self._queue.put_nowait({**entry, "lost": self._lost} if self._lost else entry)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def finish_writing(self) -> None:
        """What waits is written first, as far as the disk takes it in time."""
        try:
            self._queue.put(None, timeout=_CLOSE)
        except queue.Full:
            log.error("audit-log: %s: the disk is too slow, %d entries are lost", self._path, MOST_WAITING)
            return
        self._thread.join(_CLOSE)

    def _run(self) -> None:
        failed = 0  # in a row; `note_request` counts those that found no room
        while (entry := self._queue.get()) is not None:
            lost = int(str(entry.get("lost", 0))) + failed
            try:
                self._append({**entry, "lost": lost} if lost else entry)
                failed = 0
            except OSError as error:
                if not failed:
                    log.error("audit-log: %s: %s; entries are lost until it ends", self._path, error)
                failed += 1
        os.close(self._file)

    def _append(self, entry: Mapping[str, object]) -> None:
        """All of a line or nothing of it: raises OSError."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            size, line = os.fstat(self._file).st_size, chained(entry, self._last_hash())
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _last_hash(self) -> str:
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, MOST_LINE, max(0, size - MOST_LINE)).splitlines()
        try:
            return str(json.loads(tail[-1])["hash"]) if tail else _START
        except (ValueError, KeyError, TypeError):
            return _START  # which `check_chain` names as a break


def chained(entry: Mapping[str, object], before: str) -> bytes:
    """The line of an entry behind the one with this hash."""
    body = {**entry, "before": before}
    return _encoded({**body, "hash": hashlib.sha256(_encoded(body)).hexdigest()}) + b"\n"


def _encoded(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


@dataclass(frozen=True, slots=True)
class Checked:
    """`broken`: the number of the first line that does not follow from those before, from 1; None where all do."""

    lines: int
    broken: int | None = None
    why: str = ""


def check_chain(path: Path) -> Checked:
    """Raises OSError. It cannot tell whether lines at the end are missing: keep the last hash elsewhere for that."""
    with path.open("rb") as file:
        return _check(file)


def _check(lines: Iterable[bytes]) -> Checked:
    before, count = _START, 0
    for count, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            told = entry.pop("hash")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return Checked(count, count, "is no entry")
        if entry.get("before") != before:
            return Checked(count, count, "does not follow the line before it")
        if hashlib.sha256(_encoded(entry)).hexdigest() != told:
            return Checked(count, count, "was changed")
        before = told
    return Checked(count)
