"""Requests that end with their connection, while they run: found by the id that their answer has, and ended by it.

Those that were asked for with `resume` are in `resumables`.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice

from afserve.errors import DeadlineError, NotFoundError


class Watched:
    """One request, and how far it is. `created` in Unix seconds; `owner` is an account's."""

    def __init__(self, id: str, owner: str, created: int, model: str, choices: int, *, stream: bool) -> None:
        self.id, self.owner, self.created, self.model, self.stream = id, owner, created, model, stream
        self.tokens = [0] * choices
        self.reasons: list[str | None] = [None] * choices
        self.ended = False
        self._until: asyncio.Timeout | None = None

    def saw(self, index: int, tokens: int, reason: str | None) -> None:
        """So many tokens of one choice are on their way to the client; `reason` says why they are the last."""
        self.tokens[index] += tokens
        self.reasons[index] = reason

    def ends_by(self, until: asyncio.Timeout) -> None:
        """What its answer is written within."""
        self._until = until
        if self.ended:
            self.end()

    def end(self) -> None:
        """Its owner wants no more of it: what is computed stops, and whoever waits for it is told so."""
        self.ended = True
        if self._until is not None and not self._until.expired():
            self._until.reschedule(asyncio.get_running_loop().time())


class Running:
    """Those of one gateway, as many as it answers at once."""

    def __init__(self) -> None:
        self._by_id: dict[str, Watched] = {}

    @contextmanager
    def watching(self, one: Watched) -> Iterator[None]:
        """While it is answered."""
        self._by_id[one.id] = one
        try:
            yield
        finally:
            del self._by_id[one.id]

    def count(self, model: str) -> int:
        """Of this model."""
        return sum(one.model == model for one in self._by_id.values())

    def longest(self, names: Collection[str], most: int) -> list[Watched]:
        """Of the model with these names, those that have run longest, at most so many."""
        return list(islice((one for one in self._by_id.values() if one.model in names), most))

    def find(self, id: str, owner: str) -> Watched | None:
        """None also where it is another owner's: nobody is told which."""
        one = self._by_id.get(id)
        return one if one is not None and one.owner == owner else None


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
            if watched is not None:
                watched.ends_by(until)
            yield
    except TimeoutError as error:
        if watched is not None and watched.ended:
            raise NotFoundError("this request was ended by its client") from None
        raise DeadlineError(f"deadline: the answer was not complete after {seconds:g} s, as asked") from error
