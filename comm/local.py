"""Both ends in one thread: mailboxes in ordinary memory, nothing ever parks, so a run is stepped and repeatable.

The same mailboxes, flags and checks as `shm`; only the memory and the way of waiting differ.
"""

from collections.abc import Sequence

from afserve.comm.lanes import Lanes
from afserve.comm.rendezvous import compare, terms
from afserve.comm.segment import LEFT, Segment, SegmentMap
from afserve.comm.transport import Box, Header, Layout, Parcel
from afserve.comm.wire import check_layout
from afserve.errors import PeerLost


class LocalTransport:
    """One end. `wait` only looks: whoever steps both ends in one thread must never block in one of them."""

    def __init__(self, segments: Sequence[Segment], attention: int | None) -> None:
        self._lanes = Lanes(segments, attention)
        self._segments = list(segments)
        self._attention = attention
        for segment in segments:
            segment.claim(attention, 0)

    @property
    def layout(self) -> Layout:
        return self._segments[0].map.layout

    def boxes(self) -> list[Box]:
        return self._lanes.boxes()

    def next_sequence(self, box: Box) -> int:
        return self._lanes.next_sequence(box)

    def stage(self, box: Box, header: Header) -> Parcel:
        return self._lanes.stage(box, header)

    def post(self, box: Box) -> None:
        self._check(box)
        self._lanes.post(box)

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        return self._lanes.ready(boxes)

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        found = self._lanes.ready(boxes)
        if not found:
            for box in boxes:
                self._check(box)
        return found

    def take(self, box: Box) -> Parcel:
        return self._lanes.take(box)

    def refuse(self, box: Box, reason: str) -> None:
        self._lanes.refuse(box, reason)

    def close(self) -> None:
        for segment in self._segments:
            segment.leave(self._attention)

    def _check(self, box: Box) -> None:
        peer = box.attention if self._attention is None else None
        for segment in self._segments:
            if segment.map.expert == box.expert and segment.state(peer) == LEFT:
                raise PeerLost(
                    f"expert-{box.expert}" if peer is None else f"attention-{peer}",
                    "it has closed its transport",
                )


def listen(expert: int, attention_nodes: int, layout: Layout) -> tuple[LocalTransport, Segment]:
    """An expert node's end and the memory that `connect` takes."""
    check_layout(layout)
    segment = Segment.private(SegmentMap(layout, expert, attention_nodes))
    return LocalTransport([segment], None), segment


def connect(segments: Sequence[Segment], attention: int, layout: Layout) -> LocalTransport:
    """An attention node's end, over the memory of every expert node in order."""
    for expert, segment in enumerate(segments):
        where = segment.map
        theirs = terms(where.layout, expert=where.expert, attention_nodes=where.attention_nodes)
        mine = terms(layout, expert=expert, attention_nodes=max(where.attention_nodes, attention + 1))
        compare(mine, theirs, me=f"attention-{attention}", peer=f"expert-{expert}")
    return LocalTransport(segments, attention)
