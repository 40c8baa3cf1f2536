"""Responses that were asked to be kept: so many of them, of so many bytes, for so long. Knows no HTTP."""

import sqlite3
from dataclasses import dataclass

from afserve.errors import NotFoundError, shown
from afserve.server.state.database import Store, transaction


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` is the response, `items` the JSON array of everything that was said up to and with it, `asked` of it the
    items before its own output."""

    body: bytes
    items: bytes
    asked: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + len(self.asked)


@dataclass(frozen=True, slots=True)
class ResponseStore(Store):
    """Each response is its owner's: to everybody else it is not there."""

    most: int
    most_bytes: int
    seconds: float

    @transaction
    def put_response(
        self, db: sqlite3.Connection, owner: str, response_id: str, stored: StoredResponse
    ) -> None:
        """The oldest make room for it, of whoever has most; what alone is too large is not kept."""
        ends = self.clock.now() + self.seconds
        db.execute(
            "INSERT INTO responses(id, owner, ends, size, body, items, asked) VALUES(?,?,?,?,?,?,?)",
            (response_id, owner, ends, stored.size, stored.body, stored.items, stored.asked),
        )
        self._shrink(db)

    @transaction
    def get_response(self, db: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse:
        """Raises NotFoundError for one that is not here any more, or never was."""
        return self._row(db, owner, response_id)

    @transaction
    def delete_response(self, db: sqlite3.Connection, owner: str, response_id: str) -> None:
        self._row(db, owner, response_id)
        db.execute("DELETE FROM responses WHERE id=?", (response_id,))

    @transaction
    def count_responses(self, db: sqlite3.Connection) -> int:
        self._shrink(db)
        return int(db.execute("SELECT count(*) FROM responses").fetchone()[0])

    def _row(self, db: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse:
        self._shrink(db)
        sound = response_id.encode("utf-8", "replace").decode()
        row = db.execute(
            "SELECT body, items, asked FROM responses WHERE id=? AND owner=?", (sound, owner)
        ).fetchone()
        if row is None:
            raise NotFoundError(
                f"response {shown(response_id)} is not kept here: it never was, it is older than {self.seconds:g} s, "
                "or it made room for others; send the whole input",
                param="previous_response_id",
            )
        return StoredResponse(*row)

    def _shrink(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM responses WHERE ends<?", (self.clock.now(),))
        while True:
            number, size = db.execute("SELECT count(*), coalesce(sum(size), 0) FROM responses").fetchone()
            if number <= self.most and size <= self.most_bytes:
                return
            measure = "count(*)" if number > self.most else "sum(size)"
            (fullest,) = db.execute(
                f"SELECT owner FROM responses GROUP BY owner ORDER BY {measure} DESC, owner LIMIT 1"  # noqa: S608
            ).fetchone()
            oldest = "DELETE FROM responses WHERE seq=(SELECT min(seq) FROM responses WHERE owner=?)"
            db.execute(oldest, (fullest,))
