"""Who is being answered: the limit on it, each by the id of its answer, and the end of all when the server drains.

Requests that were asked for with `resume` outlive their connection: they are in `resumables`.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from itertools import islice

from starlette.types import Scope

from afserve.errors import CapacityError, DeadlineError, NotFoundError, OverloadedError

# For the words of an end to be written; who does not read them is not waited for.
ENDING_SECONDS = 0.5


class DrainingError(CapacityError):
    """The server is going away; another one may answer."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; send the request to another one or try again later")


WATCHED = "watched"  # of a request's state


class Watched:
    """One request, and how far it is. `created` in Unix seconds; `owner` is an account's."""

    def __init__(
        self,
        id: str,
        owner: str,
        created: int,
        model: str,
        choices: int,
        *,
        stream: bool,
        prompt_tokens: int = 0,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.id, self.owner, self.created, self.model, self.stream = id, owner, created, model, stream
        self.tokens = [0] * choices
        self.reasons: list[str | None] = [None] * choices
        self.cancelled = False
        self._until: asyncio.Timeout | None = None

    def saw(self, index: int, tokens: int, reason: str | None) -> None:
        """So many tokens of one choice are on their way to the client; `reason` says why they are the last."""
        self.tokens[index] += tokens
        self.reasons[index] = reason

    @contextmanager
    def ends_by(self, until: asyncio.Timeout) -> Iterator[None]:
        """While it is computed within this."""
        self._until = until
        if self.cancelled:
            self.cancel_request()
        try:
            yield
        finally:
            self._until = None

    def cancel_request(self) -> None:
        """Its owner wants no more of it: what is computed stops, and whoever waits for it is told so."""
        self.cancelled = True
        if self._until is not None and not self._until.expired():
            self._until.reschedule(asyncio.get_running_loop().time())


class Answering:
    """Those of one gateway. `enter` around each; `drain` refuses new ones and waits, then ends the rest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: dict[asyncio.Task[object], Watched | None] = {}
        self._by_id: dict[str, Watched] = {}
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
        task = _current()
        self._tasks[task] = None
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self.aborted:
                raise
            raise DrainingError from None
        finally:
            if (watched := self._tasks.pop(task)) is not None:
                del self._by_id[watched.id]
            if not self._tasks:
                self._idle.set()

    # ---- each by its id

    def watch_request(self, one: Watched, scope: Scope) -> None:
        """The request that this task has entered with is found by its id from now on, until it is answered. `scope` is
        its own."""
        scope.setdefault("state", {})[WATCHED] = one
        self._tasks[_current()] = self._by_id[one.id] = one

    def count_of_model(self, model: str) -> int:
        return sum(one.model == model for one in self._by_id.values())

    def longest(self, names: Collection[str], most: int) -> list[Watched]:
        """Of the model with these names, those that have run longest, at most so many."""
        return list(islice((one for one in self._by_id.values() if one.model in names), most))

    def find_watched(self, id: str, owner: str) -> Watched | None:
        """None also where it is another owner's: nobody is told which."""
        one = self._by_id.get(id)
        return one if one is not None and one.owner == owner else None

    # ---- the end of all

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


def _current() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


@asynccontextmanager
async def within(
    seconds: float | None, left: float | None = None, watched: Watched | None = None
) -> AsyncIterator[None]:
    """Raises DeadlineError where a request's own deadline passes; what runs for it ends. None is without one.

    `left` is what of these seconds there still is, where some have passed. Raises NotFoundError where the owner of
    `watched` ends it.
    """
    try:
        async with asyncio.timeout(seconds if left is None else left) as until:
            with nullcontext() if watched is None else watched.ends_by(until):
                yield
    except TimeoutError as error:
        if watched is not None and watched.cancelled:
            raise NotFoundError("this request was ended by its client") from None
        raise DeadlineError(f"deadline: the answer was not complete after {seconds:g} s, as asked") from error
