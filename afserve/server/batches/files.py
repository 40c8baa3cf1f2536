"""Files that clients have sent or that batches have made: so many bytes, for so long. Values and a clock, no HTTP."""

import uuid
from collections import OrderedDict
from dataclasses import dataclass

from afserve.clock import Clock
from afserve.errors import CapacityError, NotFoundError, shown

PURPOSES = ("batch", "batch_output", "user_data", "assistants", "fine-tune", "evals")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`created` in Unix seconds, `at` on the store's clock."""

    id: str
    name: str
    purpose: str
    data: bytes
    created: int
    at: float

    def body(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    def __init__(self, clock: Clock, most_bytes: int, seconds: float) -> None:
        self._clock = clock
        self._most_bytes, self._seconds = most_bytes, seconds
        self._files: OrderedDict[str, StoredFile] = OrderedDict()  # the oldest first

    def put(self, name: str, purpose: str, data: bytes, created: int) -> StoredFile:
        """Raises CapacityError where there is no room: a file is never lost before its time."""
        self._forget_old()
        held = sum(len(file.data) for file in self._files.values())
        if held + len(data) > self._most_bytes:
            raise CapacityError(
                f"files hold {held} bytes, at most {self._most_bytes} are kept; delete some with DELETE /v1/files/ID"
            )
        file = StoredFile(f"file-{uuid.uuid4().hex}", name, purpose, data, created, self._clock.now())
        self._files[file.id] = file
        return file

    def get(self, file_id: str) -> StoredFile:
        self._forget_old()
        file = self._files.get(file_id)
        if file is None:
            raise NotFoundError(
                f"file {shown(file_id)} is not kept here; files are kept for {self._seconds:g} s",
                param="file_id",
            )
        return file

    def delete(self, file_id: str) -> None:
        self.get(file_id)
        del self._files[file_id]

    def all(self) -> list[StoredFile]:
        """The newest first."""
        self._forget_old()
        return list(reversed(self._files.values()))

    def _forget_old(self) -> None:
        oldest = self._clock.now() - self._seconds
        while self._files and next(iter(self._files.values())).at < oldest:
            self._files.popitem(last=False)
