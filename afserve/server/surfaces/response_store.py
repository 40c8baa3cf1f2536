"""Responses that were asked to be kept: so many of them, of so many bytes, for so long. Values and a clock, no HTTP."""

from collections import OrderedDict
from dataclasses import dataclass

from afserve.clock import Clock
from afserve.errors import NotFoundError, shown


@dataclass(frozen=True, slots=True)
class Stored:
    """`body` is the response, `items` the JSON array of everything that was said up to and with it, `asked` of it the
    items before its own output."""

    body: bytes
    items: bytes
    asked: bytes
    at: float

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + len(self.asked)


class ResponseStore:
    def __init__(self, clock: Clock, most: int, most_bytes: int, seconds: float) -> None:
        self._clock = clock
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._kept: OrderedDict[str, Stored] = OrderedDict()  # the oldest first
        self._bytes = 0

    def put(self, response_id: str, body: bytes, items: bytes, asked: bytes) -> None:
        stored = Stored(body, items, asked, self._clock.now())
        self._kept[response_id] = stored
        self._bytes += stored.size
        self._shrink()

    def get(self, response_id: str) -> Stored:
        """Raises NotFoundError for one that is not here any more, or never was."""
        self._shrink()
        stored = self._kept.get(response_id)
        if stored is None:
            raise NotFoundError(
                f"response {shown(response_id)} is not kept here: it never was, it is older than {self._seconds:g} s, "
                "or it made room for others; send the whole input",
                param="previous_response_id",
            )
        return stored

    def delete(self, response_id: str) -> None:
        self.get(response_id)
        self._bytes -= self._kept.pop(response_id).size

    def __len__(self) -> int:
        return len(self._kept)

    def _shrink(self) -> None:
        oldest = self._clock.now() - self._seconds
        while self._kept:
            first = next(iter(self._kept.values()))
            if len(self._kept) <= self._most and self._bytes <= self._most_bytes and first.at >= oldest:
                return
            self._bytes -= self._kept.popitem(last=False)[1].size
