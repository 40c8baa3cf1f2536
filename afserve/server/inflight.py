"""Who is being answered: the limit on it, and the end of it when the server drains."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afserve.errors import CapacityError, OverloadedError


class DrainingError(CapacityError):
    """The server is going away; another one may answer."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; send the request to another one or try again later")


class Inflight:
    """Requests that generate. `enter` around each; `drain` refuses new ones and waits, then ends the rest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.aborted = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def enter(self) -> Iterator[None]:
        if self.draining:
            raise DrainingError
        if len(self._tasks) >= self._limit:
            raise OverloadedError(f"{self._limit} requests are being answered, the most this gateway takes")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def drain(self, deadline: float) -> int:
        """How many requests had to be ended because the deadline passed."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), deadline)
        except TimeoutError:
            return await self._abort()
        return 0

    async def _abort(self) -> int:
        self.aborted = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)


class Counted:
    """An endpoint, counted from the first byte of its body to the last of its answer."""

    def __init__(self, inflight: Inflight, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        self._inflight = inflight
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._inflight.enter():
            try:
                response = await self._endpoint(Request(scope, receive))
                await response(scope, receive, send)
            except asyncio.CancelledError:
                if not self._inflight.aborted:
                    raise
                raise DrainingError from None
