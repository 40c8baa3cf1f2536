"""Between hosts without torch.distributed: mailboxes in private memory, one TCP connection per pair of nodes.

`entrance` makes the connections, encrypted where there are certificates. Whoever calls `ready` or `wait` does the rest,
and receives straight from the socket into the mailbox. Every byte is checked. It knows nothing of what travels.
"""

import queue
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from afserve import member
from afserve.comm.mailbox.lanes import Lanes
from afserve.comm.mailbox.segment import Segment, SegmentMap
from afserve.comm.mailbox.wire import HEADER_BYTES, check_layout, extent, sequence_of
from afserve.comm.transport import Box, Connecting, Dialled, Kind, Layout, ListenSpec, Offers, Parcel
from afserve.comm.transports.busy_poll import BusyPoll
from afserve.comm.transports.entrance import Entrance, Newcomer, address_of, dial, listen_on
from afserve.comm.transports.handshake import Seats, ask
from afserve.comm.transports.lane_end import LaneEnd
from afserve.comm.transports.lost import Lost
from afserve.comm.transports.stream import MessageStream
from afserve.errors import ProtocolError
from afserve.tls import Certificates

AnySegment = TypeVar("AnySegment", bound=Segment)
AnyStream = TypeVar("AnyStream", bound=MessageStream)
Greeted = Callable[[Newcomer, int, str], MessageStream]  # of a newcomer, its index and its name


@dataclass(frozen=True, slots=True)
class DialledStream:
    """A connection that was greeted, and the memory for what will come over it."""

    segment: Segment
    stream: MessageStream

    @property
    def expert(self) -> int:
        return self.segment.map.expert

    def close(self) -> None:
        self.stream.end("it was not needed")


class TcpTransport(LaneEnd):
    """One end; `to` is what an attention node was opened with, None on the expert node."""

    def __init__(self, segments: Sequence[Segment], layout: Layout, to: Connecting | None) -> None:
        attention = None if to is None else to.attention
        lost = Lost(attention_side=to is not None)
        super().__init__(Lanes(segments, attention, spins=False, owns=True), layout, attention, lost)
        self._to = to
        self._entrance: Entrance | None = None
        self._incoming = Kind.DISPATCH if attention is None else Kind.COMBINE
        self._segments = {segment.map.expert: segment for segment in segments}
        self._streams: dict[int, MessageStream] = {}
        self._peer_of: dict[int, int] = {}  # by the number of its connection
        self._crowded: set[int] = set()  # by the same: those that have bytes to send and no room
        self._taken_from: dict[Box, MessageStream | None] = {}
        self._memory = {box: self._lanes.incoming(box).memory_B.numpy().data for box in self._lanes.boxes()}
        self._poll = select.epoll()
        self._busy_poll = BusyPoll()
        self._newcomers: queue.SimpleQueue[tuple[int, MessageStream]] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._poll.register(self._bell, select.EPOLLIN)

    @property
    def offers(self) -> Offers:
        return Offers(limiting=self)

    def post(self, box: Box) -> None:
        if self._lost:
            self._lost.raise_for([box])
        if self._lanes.post(box):
            self._send(box)

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        self._turn(0.0)
        return self._lanes.ready(boxes)

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        deadline = time.monotonic() + timeout
        self._busy_poll.begin(timeout)
        try:
            while True:
                found = self._lanes.ready(boxes)
                if found:
                    return found
                if self._lost:
                    self._lost.raise_for(boxes)
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._turn(left)
        finally:
            self._busy_poll.end()

    @property
    def files(self) -> select.epoll:
        """Where something is ready when `ready` has something to do. Others may be put there too."""
        return self._poll

    @property
    def arriving(self) -> bool:
        """Whether a part of a message is here whose rest is on its way."""
        return any(stream.arriving for stream in self._streams.values())

    def raise_lost(self, boxes: Sequence[Box]) -> None:
        """As `wait`."""
        if self._lost:
            self._lost.raise_for(boxes)

    def take(self, box: Box) -> Parcel:
        self._taken_from[box] = self._streams.get(self._peer(box))
        return self._lanes.take(box)

    def refuse(self, box: Box, reason: str) -> None:
        self._lanes.refuse(box, reason)
        self._send(box)

    def close(self) -> None:
        if self._entrance is not None:
            self._entrance.close()
        for peer, stream in list(self._streams.items()):
            stream.flush()
            self._drop(peer, "this end was closed")
        while not self._newcomers.empty():
            self._newcomers.get()[1].end("this end was closed")
        self._ringer.close()
        self._bell.close()
        self._poll.close()

    def open_entrance(
        self, listener: socket.socket, certificates: Certificates | None, places: Seats, greet: Greeted
    ) -> None:
        """On an expert node: whoever proves itself at `listener` and gets a place comes in by the stream that `greet`
        makes."""

        def admit(newcomer: Newcomer) -> None:
            places.admit(newcomer, partial(greet, newcomer), self.welcome)

        self._entrance = Entrance(listener, certificates)
        self._entrance.start(admit)

    def dial(self, expert: int, address: str, timeout: float) -> DialledStream:
        assert self._to is not None, "an expert node attaches nobody"
        return DialledStream(*self._join(address, expert, replace(self._to, timeout=timeout)))

    def _join(self, address: str, expert: int, to: Connecting) -> tuple[Segment, MessageStream]:
        return join(address, expert, to)

    def is_attached(self, expert: int) -> bool:
        """On an attention node: whether it is attached to this expert node."""
        return expert in self._segments

    def attach(self, dialled: Dialled) -> None:
        assert isinstance(dialled, DialledStream), "dialled on another transport"
        self.detach(dialled.expert)
        self._segments[dialled.expert] = dialled.segment
        self._rebuild()
        self.welcome(dialled.expert, dialled.stream)
        self._turn(0.0)

    def detach(self, expert: int) -> None:
        if expert in self._streams:
            self._drop(expert, "this end has left it")
        self._lost.forget_loss(expert)
        self._segments.pop(expert, None)
        self._rebuild()

    def _rebuild(self) -> None:
        self._segments = dict(sorted(self._segments.items()))
        self._lanes.rebuild(list(self._segments.values()))
        self._memory = {box: self._lanes.incoming(box).memory_B.numpy().data for box in self._lanes.boxes()}

    def welcome_all(self, peers: Iterable[int], streams: Sequence[MessageStream]) -> None:
        """Those that this end begins with."""
        for peer, stream in zip(peers, streams, strict=True):
            self.welcome(peer, stream)
        self.ready([])

    def welcome(self, peer: int, stream: MessageStream) -> None:
        """From any thread: `stream` is the way to `peer` from now on."""
        self._newcomers.put((peer, stream))
        self._ringer.send(b"!")

    def _peer(self, box: Box) -> int:
        return box.attention if self._attention is None else box.expert

    def _turn(self, seconds: float) -> None:
        """Move bytes; wait at most so long for the first."""
        for fd, _ in self._await(seconds) if seconds > 0 else self._look():
            if fd == self._bell.fileno():
                self._let_in()
            elif (peer := self._peer_of.get(fd)) is not None:
                self._move(peer, self._streams[peer])

    def _await(self, seconds: float) -> Sequence[tuple[int, int]]:
        began = time.monotonic()
        events = self._busy_poll.look(self._look)
        left = began + seconds - time.monotonic()
        return events if events or left <= 0 else self._poll.poll(left)

    def _look(self) -> list[tuple[int, int]]:
        return self._poll.poll(0)

    def _let_in(self) -> None:
        for _ in self._bell.recv(1024):
            peer, stream = self._newcomers.get()
            if peer in self._streams:
                self._drop(peer, "another one has taken its place")
            self._streams[peer], self._peer_of[stream.fileno()] = stream, peer
            self._lost.forget_loss(peer)
            self._poll.register(stream, select.EPOLLIN)

    def _move(self, peer: int, stream: MessageStream) -> None:
        try:
            complete = stream.receive(lambda head: self._place(peer, head))
        except ProtocolError as error:
            self._drop(peer, error.message)
            return
        for message in complete:
            box = self._box(peer, message)
            self._segments[box.expert].set_word(box, self._incoming, sequence_of(message))
        stream.flush()
        if stream.lost is not None:
            self._drop(peer, stream.lost)
        else:
            self._want_room(stream)

    def _box(self, peer: int, head: memoryview) -> Box:
        micro_batch = extent(head)[0]
        own = next(iter(self._segments)) if self._attention is None else self._attention
        return Box(peer, own, micro_batch) if self._attention is None else Box(own, peer, micro_batch)

    def _place(self, peer: int, head: memoryview) -> memoryview:
        """Where a message goes. Raises ProtocolError when it fits nowhere; its other fields are checked on `take`."""
        memory = self._memory.get(self._box(peer, head))
        length = HEADER_BYTES + extent(head)[1]
        if memory is None or length > len(memory):
            raise ProtocolError(f"it sent a header of micro-batch {extent(head)[0]}, {extent(head)[1]} bytes")
        return memory[:length]

    def _send(self, box: Box) -> None:
        """An answer to somebody whose place another one has taken since is not sent."""
        peer = self._peer(box)
        stream = self._streams.get(peer)
        if stream is None or (self._attention is None and self._taken_from.get(box) is not stream):
            return
        stream.send(self._lanes.outgoing(box).message().numpy().data)
        self._sent(peer, stream)

    def _sent(self, peer: int, stream: MessageStream) -> None:
        if stream.lost is None:
            self._want_room(stream)
        else:
            self._drop(peer, stream.lost)

    def _want_room(self, stream: MessageStream) -> None:
        """Of the kernel, while bytes wait for it."""
        if stream.sending is not (stream.fileno() in self._crowded):
            self._crowded ^= {stream.fileno()}
            self._poll.modify(stream, select.EPOLLIN | (select.EPOLLOUT if stream.sending else 0))

    def _drop(self, peer: int, why: str) -> None:
        stream = self._streams.pop(peer)
        if self._peer_of.get(stream.fileno()) == peer:  # else its number is already another one's
            del self._peer_of[stream.fileno()]
        self._crowded.discard(stream.fileno())
        if stream.lost is None:  # the kernel forgets one that is closed
            self._poll.unregister(stream)
        stream.end(why)
        self._lost.mark(peer, stream.lost or why)


def listen(at: ListenSpec) -> tuple[TcpTransport, str]:
    """An expert node's end and its address. Nothing listens but on its host."""
    check_layout(at.layout)
    listener, where = listen_on(at.host), SegmentMap(at.layout, at.expert, at.attention_nodes)
    end, certificates = TcpTransport([Segment.private(where)], at.layout, None), at.credentials.certificates
    places = Seats(where, at.credentials.token)
    end.open_entrance(listener, certificates, places, lambda new, *_: MessageStream(new.connection))
    return end, address_of(listener, certificates)


def connect(to: Connecting) -> TcpTransport:
    """An attention node's end, with one connection per expert node."""
    check_layout(to.layout)
    segments, streams = join_all(to, join)
    end = TcpTransport(segments, to.layout, to)
    end.welcome_all(to.addresses, streams)
    return end


def join_all(
    to: Connecting, join: Callable[[str, int, Connecting], tuple[AnySegment, AnyStream]]
) -> tuple[list[AnySegment], list[AnyStream]]:
    """What `join(address, expert, to)` makes of each expert node. Where it raises, those joined before are left."""
    segments, streams = [], []
    with ExitStack() as opened:
        for expert, address in to.addresses.items():
            segment, stream = join(address, expert, to)
            opened.callback(stream.end, "another expert node could not be joined")
            segments.append(segment)
            streams.append(stream)
        opened.pop_all()  # they all answered: the transport closes them
    return segments, streams


def join(address: str, expert: int, to: Connecting) -> tuple[Segment, MessageStream]:
    """One of an attention node's connections."""
    peer, certificates = str(member.expert_node(expert)), to.credentials.certificates
    joined = ask(lambda seconds: dial(address, peer, seconds, certificates), expert, to)
    own = SegmentMap(to.layout, expert, 1, to.attention)  # the other attention nodes' mailboxes are not here
    return Segment.private(own, to.attention, joined.turn), MessageStream(joined.connection)
