"""Connections inside a host while blocks move over them: the node's own thread reads them, without a hand-over.

Pieces lie in memory that both ends have, so that what is read is short, and to wake one thread by another would take
longer. While nothing moves, the thread of the wires watches: it brings a connection when something has come, and gets
it back when nothing more does.
"""

from collections import deque
from collections.abc import Callable

from afserve.comm.kv.stream import PeerStream
from afserve.comm.kv.wires import Event, Said


class NearStreams:
    """`give_back` makes the wires' thread watch a connection again, `end` has it end one that has an `error`."""

    def __init__(self, give_back: Callable[[PeerStream], None], end: Callable[[PeerStream], None]) -> None:
        self._give_back, self._end = give_back, end
        self._brought: deque[PeerStream] = deque()
        self._kept: dict[int, PeerStream] = {}  # by peer

    def bring(self, stream: PeerStream) -> None:
        """By the wires' thread, which does not watch it any more. Then it wakes the node."""
        self._brought.append(stream)

    def expect(self, stream: PeerStream) -> None:
        """Something was said there, so that an answer may come: it is looked for, while the wires' thread watches."""
        self._kept[stream.peer] = stream

    @property
    def kept(self) -> bool:
        return bool(self._kept or self._brought)

    def receive(self, keep: bool) -> list[Event]:
        """What has come; who brought nothing is given back, unless it is to `keep`."""
        if not self.kept:
            return []
        while self._brought:
            stream = self._brought.popleft()
            self._kept[stream.peer] = stream
        events: list[Event] = []
        for peer, stream in list(self._kept.items()):
            messages = stream.read()
            events += [Said(peer, message) for message in messages if not stream.fetched(message)]
            if stream.error is not None:
                self._end(stream)
            if stream.error is not None or not (messages or keep):
                del self._kept[peer]
                if not stream.watched:
                    self._give_back(stream)
        return events
