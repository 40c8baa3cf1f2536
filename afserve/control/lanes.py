"""The open requests of a gateway: each has a lane into which its node's events are put as they arrive.

A lane ends with an event that has a finish_reason or with an error; nothing is ever dropped silently. Lanes
know numbers and events, no nodes' addresses and no HTTP. All of it runs in one event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

from afserve.engine.request import TokenEvent
from afserve.errors import AfserveError


class Lane:
    """One open request on attention node `node`. `number` is its handle there and on the control plane."""

    def __init__(self, number: int, node: int) -> None:
        self.number = number
        self.node = node
        self.finished = False
        self._queue: asyncio.Queue[TokenEvent | AfserveError] = asyncio.Queue()

    def put(self, item: TokenEvent | AfserveError) -> None:
        self.finished = self.finished or isinstance(item, AfserveError) or item.finish_reason is not None
        self._queue.put_nowait(item)

    async def get(self) -> TokenEvent:
        """The next event. Raises the error that ended the request."""
        item = await self._queue.get()
        if isinstance(item, AfserveError):
            raise item
        return item


class Lanes:
    """All open requests, by number. An event for a number that was closed meanwhile is ignored."""

    def __init__(self) -> None:
        self._open: dict[int, Lane] = {}
        self._load: Counter[int] = Counter()
        self._next = 1
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, node: int) -> Lane:
        lane = Lane(self._next, node)
        self._next += 1
        self._open[lane.number] = lane
        self._load[node] += 1
        self._emptied.clear()
        return lane

    def close(self, lane: Lane) -> None:
        if self._open.pop(lane.number, None) is not None:
            self._load[lane.node] -= 1
        if not self._open:
            self._emptied.set()

    def on_node(self, node: int) -> int:
        return self._load[node]

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            lane = self._open.get(event.handle)
            if lane is not None:
                lane.put(event)

    def refuse(self, number: int, error: AfserveError) -> None:
        lane = self._open.get(number)
        if lane is not None:
            lane.put(error)

    def fail_all(self, error: AfserveError) -> None:
        for lane in self._open.values():
            if not lane.finished:
                lane.put(error)

    async def wait_empty(self) -> None:
        await self._emptied.wait()
