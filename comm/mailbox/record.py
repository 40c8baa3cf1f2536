"""A mailbox in two parts: a record in host memory (the header, or the text of a refusal) and a payload on any device.

For transports that send payloads by another way than headers, such as `dist` over nccl. It knows neither way. Where the
payload is in host memory too, it follows the record, as in any other mailbox.
"""

import torch
from torch import Tensor

from afserve.comm.mailbox.mailbox import Mailbox
from afserve.comm.mailbox.segment import Segment, SegmentMap, unused_bytes
from afserve.comm.mailbox.wire import HEADER_BYTES, LONGEST_REASON, Frame
from afserve.comm.transport import Box, Kind

TAIL_BYTES = 8


class RecordMailbox(Mailbox):
    """`memory_B` holds the record; weights, slots and rows lie in `payload_B`, from where the header would end."""

    def __init__(self, box: Box, frame: Frame, device: torch.device) -> None:
        self.in_host = device.type == "cpu"
        size, own = frame.capacity - HEADER_BYTES, HEADER_BYTES + LONGEST_REASON
        self._size = size
        memory_B = unused_bytes(max(own, frame.capacity) if self.in_host else own)
        super().__init__(box, frame, memory_B)
        self.record = memory_B.numpy().data
        if self.in_host:
            self.payload_B = memory_B[HEADER_BYTES : HEADER_BYTES + size]
        else:
            self.payload_B = torch.zeros(size, dtype=torch.uint8, device=device)
            self._native = None

    def bind(self, payload_B: Tensor) -> None:
        """Payloads lie in this memory from now on, which no header follows."""
        self.in_host, self._native = False, None
        self.payload_B = payload_B
        self._parts.clear()

    def is_small(self, limit: int) -> bool:
        """Whether no payload in host memory here is longer than `limit` bytes."""
        return self.in_host and self._size <= limit

    @property
    def staged_bytes(self) -> int:
        """Of the payload, or of the refusal's text, that was staged last."""
        return self._length - HEADER_BYTES

    def tail(self, size: int) -> memoryview:
        """The last bytes of a payload of `size` bytes; in host memory only."""
        return self.record[HEADER_BYTES + size - TAIL_BYTES : HEADER_BYTES + size]

    def _part(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.payload_B[start - HEADER_BYTES : end - HEADER_BYTES].view(dtype)


class RecordSegment(Segment):
    """A private segment of which only the flags are used: mailboxes lie elsewhere and are made when asked for."""

    def __init__(self, where: SegmentMap, memory_B: Tensor) -> None:
        super().__init__(where, memory_B)
        self.device = torch.device("cpu")
        self._made: dict[tuple[Box, Kind], RecordMailbox] = {}

    @property
    def gives_back(self) -> bool:
        """Not what lies on a GPU."""
        return self.device.type == "cpu"

    def _address(self, box: Box, kind: Kind) -> int:
        return self.mailbox(box, kind).memory_B.data_ptr()

    def mailbox(self, box: Box, kind: Kind) -> RecordMailbox:
        made = self._made.get((box, kind))
        if made is None:
            made = self._made[box, kind] = RecordMailbox(box, Frame(kind, self.map.layout), self.device)
        return made


def record_segment(
    where: SegmentMap, device: torch.device, attention: int | None = None, turn: int = 0
) -> RecordSegment:
    """As `Segment.private`, with payloads on `device`."""
    segment = RecordSegment.private(where, attention, turn)
    assert isinstance(segment, RecordSegment)
    segment.device = device
    return segment
