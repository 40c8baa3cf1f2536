"""The open requests of a gateway: what each asked for, on which node it is, what it has got so far, and who waits.

A request ends with an event that has a finish_reason or with an error; nothing is ever dropped silently. Prompt,
parameters and tokens so far are enough to go on elsewhere. All of it runs in one event loop and knows no addresses.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

from afserve.control.wire.values import first_request
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.errors import AfserveError


class Request:
    """One open request on attention node `node`. `number` is its handle there and on the control plane."""

    def __init__(self, number: int, asked: GenerationRequest, node: int) -> None:
        self.number = number
        self.asked = asked
        self.node = node
        self.generated: list[int] = []
        self.finished = False
        self._queue: asyncio.Queue[TokenEvent | AfserveError] = asyncio.Queue()

    def put(self, item: TokenEvent | AfserveError) -> None:
        """What comes after the end is of nobody's interest."""
        if self.finished:
            return
        if isinstance(item, AfserveError):
            self.finished = True
        else:
            self.generated.extend(item.token_ids)
            self.finished = item.finish_reason is not None
        self._queue.put_nowait(item)

    async def get(self) -> TokenEvent:
        """The next event. Raises the error that ended the request."""
        item = await self._queue.get()
        if isinstance(item, AfserveError):
            raise item
        return item


class Requests:
    """All open requests of gateway `index`, by number. An event for a number that was closed meanwhile is ignored."""

    def __init__(self, index: int = 0) -> None:
        self._open: dict[int, Request] = {}
        self._load: Counter[int] = Counter()
        self._next = first_request(index)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, asked: GenerationRequest, node: int) -> Request:
        request = Request(self._next, asked, node)
        self._next += 1
        self._open[request.number] = request
        self._load[node] += 1
        return request

    def close(self, request: Request) -> None:
        if self._open.pop(request.number, None) is not None:
            self._load[request.node] -= 1

    def on_node(self, node: int) -> int:
        return self._load[node]

    def deliver(self, events: Iterable[TokenEvent]) -> tuple[int, ...]:
        """Returns the numbers that these events end."""
        ended = []
        for event in events:
            if event.finish_reason is not None:
                ended.append(event.handle)
            if (request := self._open.get(event.handle)) is not None:
                request.put(event)
        return tuple(ended)

    def refuse(self, number: int, error: AfserveError) -> None:
        if (request := self._open.get(number)) is not None:
            request.put(error)

    def fail(self, error: AfserveError, node: int | None = None) -> None:
        """End all of them, or all on one node, with this reason."""
        for request in self._open.values():
            if node is None or request.node == node:
                request.put(error)
