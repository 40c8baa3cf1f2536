"""Both ends in one thread: mailboxes in ordinary memory. Nothing ever blocks, so a run is stepped and can be repeated.

It has the mailboxes, flags and checks of `shm`; only the memory and the way of waiting differ. Rows may lie on a
device.
"""

import itertools
import weakref
from collections.abc import Sequence

import torch

from afserve import member
from afserve.comm.mailbox.lanes import Lanes
from afserve.comm.mailbox.record import RecordSegment, record_segment
from afserve.comm.mailbox.rendezvous import compare, terms
from afserve.comm.mailbox.segment import LEFT, DialledSegment, Segment, SegmentMap
from afserve.comm.mailbox.wire import check_layout
from afserve.comm.transport import HOST, Box, Connecting, Dialled, Layout, ListenSpec, Offers
from afserve.comm.transports.lane_end import MemoryEnd
from afserve.comm.transports.lost import Lost
from afserve.errors import PeerLost, RendezvousError


class _Left(Lost):
    """Looks whenever it is asked: nobody else would see who has closed an end."""

    def __init__(self, end: "LocalTransport") -> None:
        super().__init__(attention_side=False)
        self._end = end

    def __bool__(self) -> bool:
        return True

    def raise_for(self, boxes: Sequence[Box]) -> None:
        for box in boxes:
            self._end.check_open(box)


class LocalTransport(MemoryEnd):
    """One end. `wait` only looks: whoever steps both ends in one thread must never block in one of them."""

    def __init__(self, segments: Sequence[Segment], attention: int | None) -> None:
        super().__init__(Lanes(segments, attention), segments[0].map.layout, attention, _Left(self))
        self._segments = list(segments)
        self._device = segments[0].device if isinstance(segments[0], RecordSegment) else HOST
        for segment in segments:
            segment.claim(attention, 0)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def offers(self) -> Offers:
        return Offers(sender=self, limiting=self)

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        found = self._lanes.ready(boxes)
        if not found:
            self._lost.raise_for(boxes)
        return found

    def check_open(self, box: Box) -> None:
        """Raises PeerLost where its peer has closed."""
        peer = box.attention if self._attention is None else None
        for segment in self._segments:
            if segment.map.expert == box.expert and segment.state(peer) == LEFT:
                raise PeerLost(
                    box.expert_node if peer is None else box.attention_node, "it has closed its transport"
                )

    def close(self) -> None:
        for segment in self._segments:
            segment.leave(self._attention)

    def dial(self, expert: int, address: str, timeout: float) -> DialledSegment:
        assert self._attention is not None, "an expert node attaches nobody"
        return DialledSegment(_find(address, expert, self._attention, self.layout))

    def attach(self, dialled: Dialled) -> None:
        assert isinstance(dialled, DialledSegment), "dialled on another transport"
        dialled.segment.claim(self._attention, 0)
        self._replace(dialled.expert, [dialled.segment])

    def detach(self, expert: int) -> None:
        for segment in self._segments:
            if segment.map.expert == expert:
                segment.leave(self._attention)
        self._replace(expert, [])

    def _replace(self, expert: int, by: list[Segment]) -> None:
        kept = [segment for segment in self._segments if segment.map.expert != expert]
        self._segments = sorted(kept + by, key=lambda segment: segment.map.expert)
        self._lanes.rebuild(self._segments)


# The address book of expert nodes in this process; an entry goes with its listener.
_BOOK: "weakref.WeakValueDictionary[str, Segment]" = weakref.WeakValueDictionary()
_NUMBER = itertools.count()


def listen(at: ListenSpec) -> tuple[LocalTransport, str]:
    """An expert node's end and its address; rows lie on its device, headers and flags in host memory."""
    check_layout(at.layout)
    where = SegmentMap(at.layout, at.expert, at.attention_nodes)
    segment = Segment.private(where) if at.device.type == "cpu" else record_segment(where, at.device)
    address = f"local:{next(_NUMBER)}"
    _BOOK[address] = segment
    return LocalTransport([segment], None), address


def connect(to: Connecting) -> LocalTransport:
    """An attention node's end, over the memory of every expert node in order."""
    found = [_find(address, expert, to.attention, to.layout) for expert, address in to.addresses.items()]
    return LocalTransport(found, to.attention)


def _find(address: str, expert: int, attention: int, layout: Layout) -> Segment:
    segment = _BOOK.get(address)
    if segment is None:
        raise RendezvousError(f"{member.expert_node(expert)}: nothing listens at {address} in this process")
    where = segment.map
    theirs = terms(where.layout, expert=where.expert, attention_nodes=where.attention_nodes)
    mine = terms(layout, expert=expert, attention_nodes=max(where.attention_nodes, attention + 1))
    compare(mine, theirs, me=str(member.attention_node(attention)), peer=str(member.expert_node(expert)))
    return segment
