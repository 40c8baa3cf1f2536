"""Hugging Face's cache folder, as its own tools lay it out: `blobs` by digest, `snapshots` by commit, `refs` by name.

What afserve fetches, `hf` and transformers find, and the other way round.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from afserve.errors import ConfigError
from afserve.launch.hub.listing import HubFile

PART = ".part"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None


def hub_cache() -> Path:
    """Where Hugging Face's own tools keep it; their variables, not ours."""
    home = os.environ.get("HF_HOME")
    hub = os.environ.get("HF_HUB_CACHE")
    if hub:
        return Path(hub)
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


class CachedModel:
    """One model's part of the cache."""

    def __init__(self, model: str, root: Path | None = None) -> None:
        self.folder = (root or hub_cache()) / f"models--{model.replace('/', '--')}"

    def snapshot(self, revision: str | None = None) -> Path | None:
        """The folder of a commit, or of what a name such as `main` stood for when it was fetched. None: not here.

        Without a revision `main`, else the newest.
        """
        snapshots = self.folder / "snapshots"
        for name in [self._commit(revision or "main"), revision]:
            if name and (snapshots / name / "config.json").is_file():
                return snapshots / name
        found = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        return found[-1].parent if found and revision is None else None

    def blob(self, file: HubFile) -> Path:
        return self.folder / "blobs" / file.digest

    def part(self, file: HubFile) -> Path:
        blob = self.blob(file)
        return blob.with_name(blob.name + PART)

    def begun(self, file: HubFile) -> int:
        """Bytes of it that an earlier run has left."""
        part = self.part(file)
        return part.stat().st_size if part.is_file() else 0

    def link(self, commit: str, file: HubFile) -> None:
        """The file under its name in the commit's folder."""
        path = self.folder / "snapshots" / commit / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path("..", "..", "blobs", file.digest)
        if not (path.is_symlink() and path.readlink() == target):
            path.unlink(missing_ok=True)
            path.symlink_to(target)

    def name(self, revision: str, commit: str) -> None:
        """Remembers what a branch or tag stands for."""
        if revision != commit:
            path = self.folder / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit, encoding="ascii")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time fetches into it. Raises ConfigError where another does, or nothing may be written."""
        try:
            (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / ".afserve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self.folder}: cannot be written to: {error.strerror}; set HF_HOME"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise ConfigError(f"{self.folder}: another afserve fetches it; wait for its end") from error
        try:
            yield
        finally:
            os.close(handle)

    def _commit(self, revision: str) -> str:
        try:
            return (self.folder / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""
