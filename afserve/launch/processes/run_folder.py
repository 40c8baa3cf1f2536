"""The run's own folder, readable by this user only: the token's file, logs of nodes, the config of a bare shape.

A lock on it tells cleaners (systemd-tmpfiles) and later runs that it is in use. What else removes it does no harm: it
is looked for every second, and made again with the same contents. It knows no process.
"""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from afserve.errors import ConfigError

log = logging.getLogger("afserve.launch")
PREFIX = "afserve-run-"
_LOG = ".log"
_LOOK_SECONDS = 1.0
_YOUNG_SECONDS = 60.0  # a run that has just begun may not have its lock yet


class RunFolder:
    """`path` is a new folder below the one for temporary files. Raises ConfigError where none can be made."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path, self._lock = _made()
        self._files: dict[Path, bytes] = {}  # relative paths
        self._links: dict[Path, Path] = {}  # to files of any size, a GGUF file's among them
        self._looked = time.monotonic()
        self._hindrance = ""

    def log_of(self, name: str) -> Path:
        return self.path / f"{name}{_LOG}"

    def remember(self) -> None:
        """What is there now, but for logs, is what `look` puts back."""
        found = {path.relative_to(self.path): path for path in self.path.rglob("*") if path.suffix != _LOG}
        self._links = {name: path.readlink() for name, path in found.items() if path.is_symlink()}
        own = {name: path for name, path in found.items() if name not in self._links and path.is_file()}
        self._files = {name: path.read_bytes() for name, path in own.items()}

    def look(self) -> None:
        """Once a second: mend what was removed, and say so."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        try:
            self._mend()
            self._hindrance = ""
        except OSError as error:
            why = str(error)
            if why != self._hindrance:
                log.error(
                    "%s was removed and cannot be made again: %s; nodes go on without it", self.path, why
                )
            self._hindrance = why

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _mend(self) -> None:
        whole = self._is_ours()
        if not whole:
            was, lock = self.path, self._lock
            self.path, self._lock = _made(self.path)
            os.close(lock)
            log.warning("%s was removed; %s is made again with the same token", was, self.path)
        missing = [name for name in self._files if not (self.path / name).is_file()]
        missing += [name for name in self._links if not (self.path / name).is_symlink()]
        for name in missing:
            (self.path / name).parent.mkdir(0o700, parents=True, exist_ok=True)
            if name in self._links:
                (self.path / name).symlink_to(self._links[name])
            else:
                _write(self.path / name, self._files[name])
        if whole and missing:
            log.warning("%s: %s removed; written again", self.path, ", ".join(map(str, missing)))

    def _is_ours(self) -> bool:
        try:
            there, ours = os.lstat(self.path), os.fstat(self._lock)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _made(path: Path | None = None) -> tuple[Path, int]:
    """A folder and the lock on it: at this path, or at another one where somebody has something else there."""
    try:
        if path is not None:
            os.mkdir(path, 0o700)
        else:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
    except FileExistsError:
        return _made()
    except OSError as error:
        if path is not None:
            raise
        raise ConfigError(f"no folder for temporary files can be made: {error}; set TMPDIR") from error
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return path, lock


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)


def _sweep(base: Path) -> None:
    """Folders of runs that ended with nobody left to remove them, as nobody has a lock on them."""
    for path in _left(base):
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another run that begins now was faster
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # it is in use
        finally:
            os.close(folder)


def _left(base: Path) -> Iterator[Path]:
    """This user's folders of runs, but for new ones."""
    before = time.time() - _YOUNG_SECONDS
    for path in base.glob(f"{PREFIX}*"):
        try:
            about = path.lstat()
        except OSError:
            continue  # it went meanwhile
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and about.st_ctime < before:
            yield path
