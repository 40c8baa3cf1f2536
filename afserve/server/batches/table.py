"""Batches as the gateways of a host share them: who has which, how far it is, and what was answered. Knows no HTTP.

A gateway holds a batch for a while and says so again while it works. What nobody holds, another gateway, or the next
life of this one, goes on with: an answer that is there already is not asked for again.
"""

import json
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from afserve.errors import CapacityError, NotFoundError, shown
from afserve.server.access.fair_room import has_room, most_held
from afserve.server.batches.files import FileStore
from afserve.server.state.database import Store, transaction

MAX_BATCHES = 256
HELD_SECONDS = 30.0
RUNS, CANCELLING = "in_progress", "cancelling"
_COLUMNS = "id, owner, endpoint, file, status, total, about, times"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """`about` and `times` are what a client is told beside the counts."""

    id: str
    owner: str
    endpoint: str
    file: str
    status: str
    total: int
    about: Mapping[str, object]
    times: Mapping[str, int]
    completed: int
    failed: int

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None,
            "status": self.status,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "input_file_id": self.file,
            **self.about,
            **self.times,
        }


@dataclass(frozen=True, slots=True)
class BatchTable(Store):
    """`holder` names this gateway's process."""

    files: FileStore
    holder: str

    @transaction
    def create(
        self,
        db: sqlite3.Connection,
        owner: str,
        endpoint: str,
        file: str,
        total: int,
        about: Mapping[str, object],
    ) -> BatchRow:
        """A batch that this gateway holds. Raises CapacityError where all that are kept run."""
        self._make_room(db, owner)
        now, batch_id = self.clock.now(), f"batch_{uuid.uuid4().hex}"
        times = json.dumps({"created_at": int(now), "in_progress_at": int(now)})
        db.execute(
            "INSERT INTO batches(id, owner, endpoint, file, status, total, about, times, holder, held_until) "
            "VALUES(?,?,?,?,?,?,?,?,?,?)",
            (batch_id, owner, endpoint, file, RUNS, total, json.dumps(about), times, *self._held(now)),
        )
        return _row(db, owner, batch_id)

    @transaction
    def get_batch(self, db: sqlite3.Connection, owner: str, batch_id: str) -> BatchRow:
        """Raises NotFoundError."""
        return _row(db, owner, batch_id)

    @transaction
    def list_batches(self, db: sqlite3.Connection, owner: str) -> list[BatchRow]:
        """The newest first."""
        rows = db.execute("SELECT id FROM batches WHERE owner=? ORDER BY seq DESC", (owner,)).fetchall()
        return [_row(db, owner, batch_id) for (batch_id,) in rows]

    @transaction
    def ask_to_cancel(self, db: sqlite3.Connection, owner: str, batch_id: str) -> BatchRow:
        """Whoever holds it ends it; what is answered by then is kept."""
        _row(db, owner, batch_id)
        db.execute("UPDATE batches SET status=? WHERE id=? AND status=?", (CANCELLING, batch_id, RUNS))
        return _row(db, owner, batch_id)

    # ---- for who works on it

    @transaction
    def claim_unheld(self, db: sqlite3.Connection) -> list[BatchRow]:
        """Those that nobody holds are held by this gateway from now on."""
        now = self.clock.now()
        rows = db.execute(
            "SELECT id, owner FROM batches WHERE status IN (?,?) AND held_until<?", (RUNS, CANCELLING, now)
        ).fetchall()
        for batch_id, _ in rows:
            db.execute("UPDATE batches SET holder=?, held_until=? WHERE id=?", (*self._held(now), batch_id))
        return [_row(db, owner, batch_id) for batch_id, owner in rows]

    @transaction
    def hold(self, db: sqlite3.Connection, batch_id: str) -> bool:
        """Go on holding it; false where it is to be ended, or another gateway's by now."""
        held = db.execute(
            "UPDATE batches SET held_until=? WHERE id=? AND holder=? AND status=?",
            (self.clock.now() + HELD_SECONDS, batch_id, self.holder, RUNS),
        )
        return held.rowcount == 1

    @transaction
    def release_batch(self, db: sqlite3.Connection, batch_id: str) -> None:
        """Another gateway, or the next life of this one, may go on with it at once."""
        db.execute("UPDATE batches SET held_until=0 WHERE id=? AND holder=?", (batch_id, self.holder))

    @transaction
    def input(self, db: sqlite3.Connection, batch: BatchRow) -> tuple[bytes, frozenset[int], int]:
        """Its file, the numbers of lines that have an answer, and the bytes of these. Raises NotFoundError where the
        file has gone."""
        done = db.execute("SELECT line, length(said) FROM answers WHERE batch=?", (batch.id,)).fetchall()
        data = self.files.content_within(db, batch.owner, batch.file)
        return data, frozenset(line for line, _ in done), sum(size for _, size in done)

    @transaction
    def keep_answer(
        self, db: sqlite3.Connection, batch_id: str, line: int, said: bytes, *, fine: bool
    ) -> None:
        """The first answer of a line counts: a gateway that was stopped for a while may come with another."""
        db.execute("INSERT OR IGNORE INTO answers VALUES(?,?,?,?)", (batch_id, line, fine, said))

    @transaction
    def end_batch(self, db: sqlite3.Connection, batch_id: str, status: str, why: str = "") -> str:
        """Its answers become files; `why` is what a client is told of an early end.

        What had no room in the store is told, else nothing: it makes the batch a failed one.
        """
        found = db.execute(
            "SELECT owner, about, times FROM batches WHERE id=? AND holder=? AND status IN (?,?)",
            (batch_id, self.holder, RUNS, CANCELLING),
        ).fetchone()
        if found is None:
            return ""
        owner, about, times = found[0], json.loads(found[1]), json.loads(found[2])
        lost = self._files(db, batch_id, owner, about)
        ended = "failed" if lost else status
        if said := [("batch_ended", why)] * bool(why) + [("no_room", each) for each in lost]:
            about["errors"] = _errors(said)
        times[f"{ended}_at"] = int(self.clock.now())
        db.execute(
            "UPDATE batches SET status=?, about=?, times=? WHERE id=?",
            (ended, json.dumps(about), json.dumps(times), batch_id),
        )
        return "; ".join(lost)

    def _files(
        self, db: sqlite3.Connection, batch_id: str, owner: str, about: dict[str, object]
    ) -> list[str]:
        """Why each that is missing is. Answers in a file are blanked, their counts stay; those that found no room stay
        until another batch's do."""
        lost = []
        for fine, key in ((1, "output_file_id"), (0, "error_file_id")):
            rows = db.execute(
                "SELECT said FROM answers WHERE batch=? AND fine=? ORDER BY line", (batch_id, fine)
            ).fetchall()
            if not rows:
                continue
            name = f"{batch_id}_{key.partition('_')[0]}.jsonl"
            data = b"".join(said + b"\n" for (said,) in rows)
            try:
                about[key] = self.files.put_within(db, owner, name, "batch_output", data).id
            except CapacityError as error:
                self._blank_what_was_lost(db)
                lost.append(f"{name}: {error.message}")
            else:
                db.execute("UPDATE answers SET said=x'' WHERE batch=? AND fine=?", (batch_id, fine))
        return lost

    def _blank_what_was_lost(self, db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE answers SET said=x'' WHERE said!=x'' AND batch IN "
            "(SELECT id FROM batches WHERE status NOT IN (?,?))",
            (RUNS, CANCELLING),
        )

    def _held(self, now: float) -> tuple[str, float]:
        return self.holder, now + HELD_SECONDS

    def _make_room(self, db: sqlite3.Connection, owner: str) -> None:
        """Of those who have most, the oldest that has ended goes. No key runs so many that none are left to others."""
        rows = db.execute("SELECT id, owner, status FROM batches ORDER BY seq").fetchall()
        running = [of for _, of, status in rows if status in (RUNS, CANCELLING)]
        own = running.count(owner)
        if self.files.fair and not has_room(owner, own, len(running), 1, MAX_BATCHES):
            raise CapacityError(
                f"{own} batches of this key are running, and {MAX_BATCHES - len(running)} more would be taken of all "
                "keys: a key may have as many as it leaves for others; try again later"
            )
        if len(rows) < MAX_BATCHES:
            return
        ended = [(batch_id, of) for batch_id, of, status in rows if status not in (RUNS, CANCELLING)]
        if not ended:
            raise CapacityError(
                f"{MAX_BATCHES} batches are running, the most that are taken; try again later"
            )
        fullest = most_held((of, 1) for _, of in ended)
        gone = next(batch_id for batch_id, of in ended if of == fullest)
        db.execute("DELETE FROM batches WHERE id=?", (gone,))
        db.execute("DELETE FROM answers WHERE batch=?", (gone,))


def _errors(said: list[tuple[str, str]]) -> dict[str, object]:
    data = [{"code": code, "message": message, "param": None, "line": None} for code, message in said]
    return {"object": "list", "data": data}


def _row(db: sqlite3.Connection, owner: str, batch_id: str) -> BatchRow:
    sound = batch_id.encode("utf-8", "replace").decode()
    found = f"SELECT {_COLUMNS} FROM batches WHERE id=? AND owner=?"  # noqa: S608  columns are this file's own
    row = db.execute(found, (sound, owner)).fetchone()
    if row is None:
        raise NotFoundError(f"batch {shown(batch_id)} is not kept here", param="batch_id")
    counts = dict(
        db.execute("SELECT fine, count(*) FROM answers WHERE batch=? GROUP BY fine", (sound,)).fetchall()
    )
    *plain, about, times = row
    return BatchRow(*plain, json.loads(about), json.loads(times), counts.get(1, 0), counts.get(0, 0))  # type: ignore[call-arg]
