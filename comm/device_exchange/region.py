"""One direction of a box in memory that both ends map: where its flag, its two halves and the parts of a message lie.

region   flag (int32) | pad to 256 | half of even numbers | half of odd numbers
half     rows, layer, epoch (int32) | pad to 64 | the parts of a message at the offsets of its largest form
"""

from dataclasses import dataclass

from afserve.comm.mailbox.wire import Frame, aligned
from afserve.comm.transport import Kind, Layout

REGION_HEAD = 256
_HALF_ALIGN = 256


@dataclass(frozen=True, slots=True)
class Region:
    """Sizes and offsets of one direction of a box, in bytes."""

    half: int
    weight: int
    slot: int
    scale: int
    x: int

    @classmethod
    def of(cls, kind: Kind, layout: Layout) -> "Region":
        span = Frame(kind, layout).span(layout.max_rows)
        return cls(aligned(span.end, _HALF_ALIGN), span.weight, span.slot, span.scale, span.x)

    @property
    def size(self) -> int:
        return REGION_HEAD + 2 * self.half


def region_bytes(layout: Layout) -> int:
    """Of either direction."""
    return max(Region.of(kind, layout).size for kind in (Kind.DISPATCH, Kind.COMBINE))
