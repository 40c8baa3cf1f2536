"""Digests of large files, remembered by device, inode, size and times in this user's cache folder.

A file that was written to has other times and is read again. The cache only saves time: what cannot be read, was
written by somebody else or is not of its form is as good as absent. It does not know what is digested.
"""

import contextlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from afserve.errors import CheckpointError
from afserve.json_file import read_object

log = logging.getLogger("afserve.digests")
FILE = "digests.json"
MOST_ENTRIES = 4096
MOST_BYTES = 2 << 20
SETTLE_SECONDS = 2.0  # a file changed so lately could change again without another time
_VERSION = 1
Digest = dict[str, str]


def user_folder() -> Path | None:
    """`afserve` below XDG_CACHE_HOME, or below ~/.cache; None where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # others are to be ignored, says the XDG specification
        return Path(given) / "afserve"
    try:
        return Path.home() / ".cache" / "afserve"
    except RuntimeError:
        return None


def key_of(found: os.stat_result, what: str) -> str:
    """`what` says what was digested of the file and how."""
    times = f"{found.st_mtime_ns}:{found.st_ctime_ns}"
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{times}:{what}"


class DigestCache:
    """`get` and `put` work in memory, `save` adds what was put to the file. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None, settle_seconds: float = SETTLE_SECONDS) -> None:
        self._folder = folder
        self._settle = settle_seconds
        self._known: dict[str, Digest] | None = None
        self._new: dict[str, Digest] = {}

    def get(self, found: os.stat_result, what: str) -> Digest | None:
        if self._known is None:
            self._known = self._read()
        return self._known.get(key_of(found, what))

    def put(self, found: os.stat_result, what: str, digest: Digest) -> None:
        changed = max(found.st_mtime, found.st_ctime)
        if time.time() - changed >= self._settle:
            self._new[key_of(found, what)] = digest

    def save(self) -> None:
        """Other processes may save as well: what they saved meanwhile is kept, the oldest entries go."""
        if self._folder is None or not self._new:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _ours(self._folder, stat.S_ISDIR):
                return
            self._folder.chmod(0o700)
            entries = {**self._read(), **self._new}
            self._write(dict(list(entries.items())[-MOST_ENTRIES:]))
        except OSError as error:
            log.debug("digests are not kept: %s", error)

    def _read(self) -> dict[str, Digest]:
        if self._folder is None:
            return {}
        path = self._folder / FILE
        try:
            if not (_ours(self._folder, stat.S_ISDIR) and _ours(path, stat.S_ISREG)):
                return {}
            table = read_object(path, MOST_BYTES)
        except (OSError, CheckpointError) as error:
            log.debug("digests are not read: %s", error)
            return {}
        entries = table.get("entries")
        if table.get("version") != _VERSION or not isinstance(entries, dict):
            return {}
        return {key: entry for key, entry in entries.items() if _is_digest(entry)}

    def _write(self, entries: Mapping[str, Digest]) -> None:
        """In place of the old file at once: nobody ever reads half of it."""
        assert self._folder is not None
        text = json.dumps({"version": _VERSION, "entries": entries})
        if len(text) > MOST_BYTES:
            return
        descriptor, name = tempfile.mkstemp(prefix=f".{FILE}-", dir=self._folder)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self._folder / FILE)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise


def _ours(path: Path, is_kind: object) -> bool:
    """A real folder or file of this user that nobody else can write to."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return bool(is_kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o022  # type: ignore[operator]


def _is_digest(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())
