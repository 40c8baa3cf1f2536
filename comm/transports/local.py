"""Both ends in one thread: mailboxes in ordinary memory. Nothing ever blocks, so a run is stepped and can be repeated.

It has the mailboxes, flags and checks of `shm`; only the memory and the way of waiting differ. Rows may lie on a
device.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from afserve import member
from afserve.comm.mailbox.lanes import Lanes
from afserve.comm.mailbox.record import RecordSegment, record_segment
from afserve.comm.mailbox.rendezvous import compare, terms
from afserve.comm.mailbox.segment import LEFT, DialledSegment, Segment, SegmentMap
from afserve.comm.mailbox.wire import check_layout
from afserve.comm.transport import HOST, Box, Dialled, Header, Layout, MessageFiller, Offers, Parcel
from afserve.errors import PeerLost, RendezvousError


class LocalTransport:
    """One end. `wait` only looks: whoever steps both ends in one thread must never block in one of them."""

    def __init__(self, segments: Sequence[Segment], attention: int | None) -> None:
        self._lanes = Lanes(segments, attention)
        self._segments = list(segments)
        self._layout = segments[0].map.layout
        self._device = segments[0].device if isinstance(segments[0], RecordSegment) else HOST
        self._attention = attention
        for segment in segments:
            segment.claim(attention, 0)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def offers(self) -> Offers:
        return Offers(sender=self, limiting=self)

    def boxes(self) -> list[Box]:
        return self._lanes.boxes()

    def next_sequence(self, box: Box) -> int:
        return self._lanes.next_sequence(box)

    def limit(self, attention: int, rows: int) -> None:
        self._lanes.limit(attention, rows)

    def stage(self, box: Box, header: Header) -> Parcel:
        return self._lanes.stage(box, header)

    def post(self, box: Box) -> None:
        self._check(box)
        self._lanes.post(box)

    def send(
        self,
        box: Box,
        header: Header,
        x_RH: Tensor,
        slot_RK: Tensor | None = None,
        weight_RK: Tensor | None = None,
    ) -> None:
        self._check(box)
        self._lanes.send(box, header, x_RH, slot_RK, weight_RK)

    def send_part(self, box: Box, header: Header, filler: MessageFiller) -> None:
        self._check(box)
        self._lanes.send_part(box, header, filler)

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

    def _check(self, box: Box) -> None:
        peer = box.attention if self._attention is None else None
        for segment in self._segments:
            if segment.map.expert == box.expert and segment.state(peer) == LEFT:
                raise PeerLost(
                    box.expert_node if peer is None else box.attention_node,
                    "it has closed its transport",
                )


# The address book of expert nodes in this process; an entry goes with its listener.
_BOOK: "weakref.WeakValueDictionary[str, Segment]" = weakref.WeakValueDictionary()
_NUMBER = itertools.count()


def listen(
    expert: int, attention_nodes: int, layout: Layout, device: torch.device = HOST
) -> tuple[LocalTransport, str]:
    """An expert node's end and its address; rows lie on `device`, headers and flags in host memory."""
    check_layout(layout)
    where = SegmentMap(layout, expert, attention_nodes)
    segment = Segment.private(where) if device.type == "cpu" else record_segment(where, device)
    address = f"local:{next(_NUMBER)}"
    _BOOK[address] = segment
    return LocalTransport([segment], None), address


def connect(addresses: Mapping[int, str], attention: int, layout: Layout) -> LocalTransport:
    """An attention node's end, over the memory of every expert node in order."""
    segments = [_find(address, expert, attention, layout) for expert, address in addresses.items()]
    return LocalTransport(segments, attention)


def _find(address: str, expert: int, attention: int, layout: Layout) -> Segment:
    segment = _BOOK.get(address)
    if segment is None:
        raise RendezvousError(f"{member.expert_node(expert)}: nothing listens at {address} in this process")
    where = segment.map
    theirs = terms(where.layout, expert=where.expert, attention_nodes=where.attention_nodes)
    mine = terms(layout, expert=expert, attention_nodes=max(where.attention_nodes, attention + 1))
    compare(mine, theirs, me=str(member.attention_node(attention)), peer=str(member.expert_node(expert)))
    return segment
