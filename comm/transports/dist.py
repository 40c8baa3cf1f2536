"""Between hosts over torch.distributed: payloads go through gloo, or nccl where mailboxes are in GPU memory.

As in `tcp`, each pair of nodes has one connection, which carries headers and shows when a peer is gone. No thread
passes messages on. The address is `dist:HOST:PORT`, where the expert node's store listens. It knows nothing of what
travels.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from afserve import member
from afserve.comm.mailbox.record import RecordMailbox, RecordSegment, record_segment
from afserve.comm.mailbox.segment import SegmentMap
from afserve.comm.mailbox.wire import HEADER_BYTES, check_layout, extent
from afserve.comm.transport import Box, Connecting, Kind, Layout, ListenSpec, Offers, Queue, SharedRegion
from afserve.comm.transports.entrance import Newcomer
from afserve.comm.transports.groups import ATTENTION_RANK, EXPERT_RANK
from afserve.comm.transports.handshake import Seats, ask
from afserve.comm.transports.pair_stream import Carriage, PairStream, follows
from afserve.comm.transports.tcp import TcpTransport, join_all
from afserve.comm.transports.venue import Introduction
from afserve.errors import ProtocolError, RendezvousError

_MEET_SECONDS = 60.0  # for a node that has been greeted: eight contexts of CUDA begin at once


class DistTransport(TcpTransport):
    """One end. `attention` is None on the expert node; payloads lie where the segments put them."""

    def __init__(
        self, segments: Sequence[RecordSegment], layout: Layout, to: Connecting | None, carriage: Carriage
    ) -> None:
        super().__init__(segments, layout, to)
        self.carriage = carriage
        self._queues: dict[int, Queue] = {}

    @property
    def device(self) -> torch.device:
        return self.carriage.device

    def _join(self, address: str, expert: int, to: Connecting) -> tuple[RecordSegment, PairStream]:
        return _join(address, expert, to, self.carriage)

    def _turn(self, seconds: float) -> None:
        """Whoever may park waits first for what is on its way. A stream whose payloads failed has closed its
        connection, of which nothing is heard any more."""
        ended = [(peer, stream.lost) for peer, stream in self._pair_streams() if stream.lost is not None]
        for peer, why in ended:
            self._drop(peer, why)
        if ended:
            return
        late = [(peer, stream) for peer, stream in self._pair_streams() if stream.awaits_payload]
        if not late:
            super()._turn(seconds)
            return
        if seconds > 0:
            late[0][1].finish()
        super()._turn(0.0)
        for peer, stream in late:
            if self._streams.get(peer) is stream:
                self._move(peer, stream)

    @property
    def offers(self) -> Offers:
        return replace(super().offers, queueing=self, regions=self if self.carriage.regions else None)

    def take_in(self, attention: int, queue: Queue) -> None:
        self._queues[attention] = queue

    def region(self, box: Box) -> SharedRegion | None:
        """As `transport.SharingRegions`."""
        stream = self._streams.get(self._peer(box))
        return None if stream is None else cast(PairStream, stream).region(box.micro_batch)

    def _let_in(self) -> None:
        super()._let_in()
        for peer, stream in self._pair_streams():
            stream.open(partial(self._queue, peer))

    def _queue(self, peer: int) -> AbstractContextManager[None]:
        return self._queues.get(peer, nullcontext)()

    def _place(self, peer: int, head: memoryview) -> memoryview:
        """Where a record goes. Raises ProtocolError when it, or what it announces, fits nowhere."""
        box, after = self._box(peer, head), follows(head)
        record = self._memory.get(box)
        if record is None or HEADER_BYTES + after > len(record) or not (after or self._fits(box, head)):
            raise ProtocolError(f"it sent a header of micro-batch {box.micro_batch}, {extent(head)[1]} bytes")
        stream = cast(PairStream, self._streams[peer])
        if stream.is_due(box.micro_batch):
            stream.finish(box.micro_batch)
        return record[: HEADER_BYTES + after]

    def _fits(self, box: Box, head: memoryview) -> bool:
        return extent(head)[1] <= cast(RecordMailbox, self._lanes.incoming(box)).payload_B.numel()

    def _send(self, box: Box) -> None:
        """An answer to somebody whose place another one has taken since is not sent."""
        peer = self._peer(box)
        stream = self._streams.get(peer)
        if stream is None or (self._attention is None and self._taken_from.get(box) is not stream):
            return
        cast(PairStream, stream).send_message(cast(RecordMailbox, self._lanes.outgoing(box)))
        self._sent(peer, stream)

    def _pair_streams(self) -> list[tuple[int, PairStream]]:
        return list(cast(dict[int, PairStream], self._streams).items())


def listen(at: ListenSpec, carriage: Carriage | None = None) -> tuple[DistTransport, str]:
    """An expert node's end and its address. Nothing listens but on its host; `carriage` says where payloads arrive."""
    way, layout = carriage or Carriage(at.device), at.layout
    check_layout(layout)
    way.check()
    there = way.venue.listen(at.host)
    segment = record_segment(SegmentMap(layout, at.expert, at.attention_nodes), way.device)
    end = DistTransport([segment], layout, None, way)

    def greet(newcomer: Newcomer, attention: int, name: str) -> PairStream:
        """In a group of two, whose name nobody else is told."""
        known = Introduction(
            newcomer.plain, there.meeting, name, EXPERT_RANK, _MEET_SECONDS, way.device, layout
        )
        try:
            pair = way.open(known)
        except RuntimeError as error:  # it gave up, or died, between greeting and meeting
            raise RendezvousError(
                f"attention-{attention} did not come to meet this node ({_first_line(error)})"
            ) from error
        boxes = _boxes(segment, attention, Kind.DISPATCH), _boxes(segment, attention, Kind.COMBINE)
        return PairStream(newcomer.plain, pair, *boxes, inline_most=way.inline_most, speaks_first=False)

    end.open_entrance(there.listener, None, Seats(segment.map, at.credentials.token), greet)
    return end, f"{way.kind}:{there.where}"


def connect(to: Connecting, carriage: Carriage | None = None) -> DistTransport:
    """An attention node's end, with one connection and one group per expert node."""
    way = carriage or Carriage(to.device)
    check_layout(to.layout)
    way.check()
    segments, streams = join_all(to, lambda address, expert, to: _join(address, expert, to, way))
    end = DistTransport(segments, to.layout, to, way)
    end.welcome_all(to.addresses, streams)
    return end


def _join(address: str, expert: int, to: Connecting, carriage: Carriage) -> tuple[RecordSegment, PairStream]:
    peer = str(member.expert_node(expert))
    kind, _, where = address.partition(":")
    found = carriage.venue.find(where, peer, to.timeout) if kind == carriage.kind else None
    if found is None:
        raise RendezvousError(
            f"{peer}: {address!r} is not an address of the form {carriage.kind}:{carriage.venue.form}"
        )
    attention, timeout = to.attention, to.timeout
    joined = ask(found.dial, expert, to)
    with ExitStack() as opened:
        opened.callback(joined.connection.close)
        known = Introduction(
            joined.connection, found.meeting, joined.name, ATTENTION_RANK, timeout, carriage.device, to.layout
        )
        try:
            pair = carriage.open(known)
        except RuntimeError as error:
            raise RendezvousError(
                f"{peer} did not meet attention-{attention} within {timeout:g} s ({_first_line(error)})"
            ) from error
        own = SegmentMap(to.layout, expert, 1, attention)
        segment = record_segment(own, carriage.device, attention, joined.turn)
        opened.pop_all()
        boxes = _boxes(segment, attention, Kind.COMBINE), _boxes(segment, attention, Kind.DISPATCH)
        return segment, PairStream(
            joined.connection, pair, *boxes, inline_most=carriage.inline_most, speaks_first=True
        )


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _boxes(segment: RecordSegment, attention: int, kind: Kind) -> dict[int, RecordMailbox]:
    return {box.micro_batch: segment.mailbox(box, kind) for box in segment.map.boxes(attention)}
