"""One connection and one process group to the same peer: headers go over the connection, payloads through the group.

The sender writes a record to the connection for every payload that it hands to the group. So the receiver blocks on the
connection alone, in its own thread, and asks the group only for a payload that is known to be on its way. Payloads up
to 16 MiB follow their header over the connection. It reads a message's header just far enough to find its payload.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afserve.comm.mailbox.record import TAIL_BYTES, RecordMailbox
from afserve.comm.mailbox.wire import HEADER_BYTES, extent
from afserve.comm.transport import Kind, Queue, SharedRegion
from afserve.comm.transports.encrypted import Connection
from afserve.comm.transports.group_pair import check_device, open_pair
from afserve.comm.transports.stream import MessageStream, Place
from afserve.comm.transports.venue import BY_STORE, Introduction, Venue

# Faster over the connection at every size tried, up to 8 MiB; more is taken in by gloo's thread while a node computes.
INLINE_BYTES = 16 << 20
_KIND_AT = 6  # of the header's fields
_TAIL = slice(40, 40 + TAIL_BYTES)  # in spare bytes of the header: how the payload ends
_INLINE = 48  # in another spare byte: 1 where the payload follows its header over the connection
_REST_SECONDS = 30.0  # for the rest of an announced payload: a stopped peer is noticed sooner


Boxes = Mapping[int, RecordMailbox]  # by micro-batch


class Payloads(Protocol):
    """How payloads travel between two nodes; `tag` is their micro-batch. What fails raises RuntimeError."""

    def bind(self, inboxes: Boxes, outboxes: Boxes) -> None:
        """These mailboxes are used with it from now on, by this thread."""

    def expect(self, inbox_B: Tensor, tag: int) -> None: ...

    def send(self, payload_B: Tensor, tag: int) -> None: ...

    def receive(self, payload_B: Tensor, tag: int, limit: float) -> None: ...

    def shared_region(self, tag: int) -> SharedRegion | None:
        """Memory of both ends for kernels that exchange messages by themselves, where there is such memory."""

    def close(self) -> None: ...


# Blocks until the other end does the same; raises RuntimeError when it does not in time.
OpenPayloads = Callable[[Introduction], Payloads]


@dataclass(frozen=True, slots=True)
class Carriage:
    """Where payloads lie at this end, up to how many bytes they follow their headers, what carries the others, and
    where nodes meet."""

    device: torch.device
    inline_most: int = INLINE_BYTES
    kind: str = "dist"
    open: OpenPayloads = open_pair
    venue: Venue = BY_STORE
    regions: bool = False  # whether it has any

    def check(self) -> None:
        """Raises ConfigError where payloads on this device have no way to travel."""
        if self.open is open_pair:
            check_device(self.device)


class PairStream(MessageStream):
    """Owns both.

    Small payloads in host memory follow their header over the connection. A receive is posted with gloo right before a
    message is sent, since what comes next in a box answers it: gloo's two notices then reach the other end together.
    """

    def __init__(
        self,
        connection: Connection,
        pair: Payloads,
        inboxes: Boxes,
        outboxes: Boxes,
        *,
        inline_most: int,
        speaks_first: bool,
    ) -> None:
        super().__init__(connection)
        self._inline_most, self._speaks_first = inline_most, speaks_first
        self._pair = pair
        self._inboxes, self._outboxes = inboxes, outboxes
        self._is_open = False
        self._queue: Queue = nullcontext
        self._due: dict[int, memoryview] = {}
        self._complete: list[memoryview] = []

    def open(self, queue: Queue = nullcontext) -> None:
        """In the thread that uses the mailboxes, before it does, and once nobody else uses them. A device waits for
        payloads inside `queue`."""
        self._queue = queue
        if not self._is_open:
            self._is_open = True
            self._pair.bind(self._inboxes, self._outboxes)
            for tag in () if self._speaks_first else self._inboxes:
                self._expect_large(tag)

    @property
    def awaits_payload(self) -> bool:
        """Whether a payload is on its way whose record is here."""
        return bool(self._due)

    def send_message(self, outbox: RecordMailbox) -> None:
        """A payload that goes through the group goes first, so that its record finds it on its way."""
        record, size, tag = outbox.record, outbox.staged_bytes, outbox.box.micro_batch
        self._expect_large(tag)
        inline = outbox.in_host and size <= self._inline_most
        record[_INLINE] = inline
        if inline or not size or record[_KIND_AT] == Kind.REFUSAL:
            self.send(record[: HEADER_BYTES + size])
            return
        if outbox.in_host and size >= TAIL_BYTES:
            record[_TAIL] = outbox.tail(size)
        try:
            self._pair.send(outbox.payload_B[:size], tag)
        except RuntimeError:
            self.end("its connection has ended")
        else:
            self.send(record[:HEADER_BYTES])

    def receive(self, place: Place) -> list[memoryview]:
        """The records whose payloads are here too."""
        arrived = super().receive(place)
        if self._due or self._complete or any(not follows(record) for record in arrived):
            self._sort(arrived)
            arrived, self._complete = self._complete, []
        return arrived

    def _sort(self, arrived: list[memoryview]) -> None:
        for record in arrived:
            tag, payload = extent(record)
            if payload and not follows(record):
                self._due[tag] = record
                self._expect(tag)
            else:
                self._complete.append(record)
        for tag in [tag for tag, record in self._due.items() if self._is_here(tag, record)]:
            self.finish(tag)

    def region(self, tag: int) -> SharedRegion | None:
        return self._pair.shared_region(tag) if self.lost is None else None

    def finish(self, tag: int | None = None) -> None:
        """Wait for a payload that is due, the oldest unless `tag` says which; `receive` returns its record."""
        tag = next(iter(self._due)) if tag is None else tag
        record, inbox = self._due.pop(tag), self._inboxes[tag]
        try:
            with self._queue():
                self._pair.receive(inbox.payload_B[: extent(record)[1]], tag, _REST_SECONDS)
        except RuntimeError:
            self.end("its connection has ended")
        else:
            self._complete.append(record)

    def is_due(self, tag: int) -> bool:
        return tag in self._due

    def end(self, why: str) -> None:
        super().end(why)
        self._due.clear()
        self._pair.close()

    def _expect_large(self, tag: int) -> None:
        """Nothing, where the other end, if it is as this one, sends no payload through the group."""
        if not self._inboxes[tag].is_small(self._inline_most):
            self._expect(tag)

    def _expect(self, tag: int) -> None:
        if self.lost is not None:
            return
        try:
            self._pair.expect(self._inboxes[tag].payload_B, tag)
        except RuntimeError:
            self.end("its connection has ended")

    def _is_here(self, tag: int, record: memoryview) -> bool:
        """Most likely: its last bytes are as announced. To be wrong costs a short wait; a GPU orders what follows."""
        inbox, size = self._inboxes[tag], extent(record)[1]
        return not inbox.in_host or size < TAIL_BYTES or inbox.tail(size) == record[_TAIL]


def follows(record: memoryview) -> int:
    """How many bytes come after the header over the connection: a small payload or a refusal's text."""
    return extent(record)[1] if record[_INLINE] or record[_KIND_AT] == Kind.REFUSAL else 0
