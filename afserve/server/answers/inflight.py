"""Who is being answered: the limit on it, and the end of it when the server drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from afserve.errors import CapacityError, OverloadedError

# For the words of an end to be written; who does not read them is not waited for.
ENDING_SECONDS = 0.5


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
        self._insisted = asyncio.Event()
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
        except asyncio.CancelledError:
            if not self.aborted:
                raise
            raise DrainingError from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def drain(self, deadline: float) -> int:
        """How many requests had to be ended because the deadline passed."""
        self.draining = True
        waits = {asyncio.create_task(event.wait()) for event in (self._idle, self._insisted)}
        await asyncio.wait(waits, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return 0 if self._idle.is_set() else await self._abort()

    def insist(self) -> None:
        """A drain, now or later, waits for nobody: those being answered are ended, each with its reason."""
        self._insisted.set()

    async def _abort(self) -> int:
        self.aborted = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=ENDING_SECONDS)
        return len(tasks)
