"""Connections that the node's own thread reads while blocks move over them, without a hand-over.

To wake one thread by another takes as long as a copy. Inside a host pieces lie in memory that both ends have, so that
what is read is short, and it is read between two steps too. Between hosts their bytes are read as well, which only who
has nothing else to do may do: it holds the connection meanwhile. While nothing moves, the thread of the wires watches:
it brings a connection when something has come that it may not read, and gets it back when nothing more does.
"""

from collections import deque
from collections.abc import Callable

from afserve.comm.kv.stream import PeerStream
from afserve.comm.kv.wires import Event, Said


class NearStreams:
    """`give_back` makes the wires' thread watch a connection again, `end` has it end one that has an `error`. `moving`
    is whether bytes came at the last look."""

    def __init__(self, give_back: Callable[[PeerStream], None], end: Callable[[PeerStream], None]) -> None:
        self._give_back, self._end = give_back, end
        self._brought: deque[PeerStream] = deque()
        self._kept: dict[int, PeerStream] = {}  # by peer
        self.moving = False

    def bring(self, stream: PeerStream) -> None:
        """By the wires' thread, which does not watch it any more. Then it wakes the node."""
        self._brought.append(stream)

    def expect(self, stream: PeerStream) -> None:
        """Something was said there, so that an answer may come: it is looked for, while the wires' thread watches."""
        self._kept[stream.peer] = stream

    @property
    def kept(self) -> bool:
        return bool(self._kept or self._brought)

    def take(self, keep: bool) -> None:
        """Before `read`: from here on nobody else reads what this thread may. What the wires' thread has read was said
        before that."""
        while self._brought:
            stream = self._brought.popleft()
            self._kept[stream.peer] = stream
        for stream in [stream for stream in self._kept.values() if not stream.near]:
            stream.hold(keep)
            if not keep:
                self._leave(stream)

    def read(self, keep: bool) -> list[Event]:
        """What has come; who brought nothing is given back, unless it is to `keep`."""
        self.moving = False
        events: list[Event] = []
        for peer, stream in list(self._kept.items()):
            before = stream.arrived
            messages = stream.read()
            self.moving |= stream.arrived != before
            events += [Said(peer, message) for message in messages if not stream.fetched(message)]
            if stream.error is not None:
                self._end(stream)
            if stream.error is not None or not (messages or keep):
                self._leave(stream)
        return events

    def _leave(self, stream: PeerStream) -> None:
        del self._kept[stream.peer]
        if not stream.watched:
            self._give_back(stream)
