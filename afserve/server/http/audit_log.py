"""Who asked what of which model, when, how many tokens it took, and what was refused: a file that only grows, each line
with a hash over itself and the line before, so that a line that was changed, removed or put in is found.

Gateways of one host share the file. A thread writes, so that a slow disk costs requests nothing. No text, unless it is
asked for.
"""

import logging
import queue
import threading
from collections.abc import Mapping

from afserve.server.http.audit_file import AuditFile

log = logging.getLogger("afserve.audit")
MOST_WAITING = 10_000  # entries
_CLOSE = 5.0  # seconds for what waits, at the end


class AuditLog:
    """Raises ConfigError where the file cannot be written."""

    def __init__(self, path: str) -> None:
        self.file, self._path = AuditFile(path), path
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
        # in a row; only this thread counts these, and only `note_request` those that found no room
        failed = 0
        while (entry := self._queue.get()) is not None:
            lost = int(str(entry.get("lost", 0))) + failed
            try:
                self.file.append({**entry, "lost": lost} if lost else entry)
                failed = 0
            except Exception as error:  # noqa: BLE001  whatever one entry meets, the next one is tried
                if not failed:
                    log.error(
                        "audit-log: %s: %s; entries are lost until it can be written", self._path, error
                    )
                failed += 1
        self.file.close()
