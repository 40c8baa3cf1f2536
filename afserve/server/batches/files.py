"""Files that clients have sent or that batches have made: so many bytes, for so long. Knows no HTTP."""

import sqlite3
import uuid
from dataclasses import dataclass
from typing import Any

from afserve.errors import CapacityError, NotFoundError, shown
from afserve.server.access.fair_room import has_room
from afserve.server.state.database import Store, transaction

PURPOSES = ("batch", "batch_output", "user_data", "assistants", "fine-tune", "evals")
FILE_BYTES = 1024  # what a file counts beside its bytes: empty ones are bounded too
_ABOUT = "id, name, purpose, size, created"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file beside its bytes; `created` in Unix seconds."""

    id: str
    name: str
    purpose: str
    size: int
    created: int

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True)
class FileStore(Store):
    """Each file is its owner's: to everybody else it is not there. `fair`: no key can keep the others out."""

    most_bytes: int
    seconds: float
    fair: bool = False

    def put_within(
        self, db: sqlite3.Connection, owner: str, name: str, purpose: str, data: bytes
    ) -> StoredFile:
        """Raises CapacityError where there is no room: a file is never lost before its time."""
        now = self.clock.now()
        self._forget_old(db)
        self._check_room(db, owner, len(data) + FILE_BYTES)
        file = StoredFile(f"file-{uuid.uuid4().hex}", name, purpose, len(data), int(now))
        db.execute(
            "INSERT INTO files(id, owner, name, purpose, created, ends, size, data) VALUES(?,?,?,?,?,?,?,?)",
            (file.id, owner, _sound(name), purpose, file.created, now + self.seconds, file.size, data),
        )
        return file

    put_file = transaction(put_within)

    def _check_room(self, db: sqlite3.Connection, owner: str, size: int) -> None:
        (held,) = db.execute("SELECT coalesce(sum(size + ?), 0) FROM files", (FILE_BYTES,)).fetchone()
        if held + size > self.most_bytes:
            raise CapacityError(
                f"files hold {held} bytes ({FILE_BYTES} each beside its own), at most {self.most_bytes} are kept; "
                "delete some with DELETE /v1/files/ID"
            )
        mine = "SELECT coalesce(sum(size + ?), 0) FROM files WHERE owner=?"
        (own,) = db.execute(mine, (FILE_BYTES, owner)).fetchone()
        if self.fair and not has_room(owner, own, held, size, self.most_bytes):
            raise CapacityError(
                f"files of this key hold {own} bytes ({FILE_BYTES} each beside its own), and {self.most_bytes - held} "
                "are free: a key may have as much as it leaves free for others; delete some with DELETE /v1/files/ID"
            )

    @transaction
    def get_file(self, db: sqlite3.Connection, owner: str, file_id: str) -> StoredFile:
        return StoredFile(*self._row(db, owner, file_id, _ABOUT))

    def content_within(self, db: sqlite3.Connection, owner: str, file_id: str) -> bytes:
        (data,) = self._row(db, owner, file_id, "data")
        assert isinstance(data, bytes)
        return data

    content = transaction(content_within)

    @transaction
    def delete_file(self, db: sqlite3.Connection, owner: str, file_id: str) -> None:
        self._row(db, owner, file_id, "id")
        db.execute("DELETE FROM files WHERE id=?", (file_id,))

    @transaction
    def list_files(self, db: sqlite3.Connection, owner: str) -> list[StoredFile]:
        """The newest first."""
        self._forget_old(db)
        rows = db.execute(f"SELECT {_ABOUT} FROM files WHERE owner=? ORDER BY seq DESC", (owner,))  # noqa: S608
        return [StoredFile(*row) for row in rows]

    def _row(self, db: sqlite3.Connection, owner: str, file_id: str, columns: str) -> tuple[Any, ...]:
        """Raises NotFoundError."""
        self._forget_old(db)
        found = f"SELECT {columns} FROM files WHERE id=? AND owner=?"  # noqa: S608  columns are this file's own
        row: tuple[Any, ...] | None = db.execute(found, (_sound(file_id), owner)).fetchone()
        if row is None:
            raise NotFoundError(
                f"file {shown(file_id)} is not kept here; files are kept for {self.seconds:g} s",
                param="file_id",
            )
        return row

    def _forget_old(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM files WHERE ends<?", (self.clock.now(),))


def _sound(text: str) -> str:
    """SQLite takes no lone surrogates, which JSON may carry."""
    return text.encode("utf-8", "replace").decode()
