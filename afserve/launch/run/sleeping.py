"""A model that nobody asks for a while sleeps: its nodes end, and the next request starts them and waits for them.

Values and waits; who ends and starts nodes is in `serving`. What caches held is gone then, but for a disk tier.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from afserve.control.admission import Objectives
from afserve.control.backend import Opened
from afserve.control.frontend import Frontend
from afserve.engine.scheduling.request import TokenEvent
from afserve.errors import AfserveError, OverloadedError, UnavailableError

MOST_HELD = 256  # requests that wait for one model
_WAKE_SECONDS = 600.0


class Sleep:
    """From when nodes are told to end until they serve again. `asked` is set by the first request."""

    def __init__(self, name: str, start_seconds: float, limit: float = _WAKE_SECONDS) -> None:
        """`start_seconds`: what its last start took."""
        self.asked, self.held = asyncio.Event(), 0
        self._name, self._start_seconds, self._limit = name, start_seconds, limit
        self._over: asyncio.Future[Frontend] = asyncio.get_running_loop().create_future()
        self._over.add_done_callback(asyncio.Future.exception)  # where nobody waits, nobody misses it

    def end(self, frontend: Frontend | AfserveError) -> None:
        """It serves again, or cannot."""
        if isinstance(frontend, AfserveError):
            self._over.set_exception(frontend)
        else:
            self._over.set_result(frontend)

    def admit(self, wanted: Objectives) -> None:
        """Raises OverloadedError for what would be too late; the model starts nevertheless."""
        self.asked.set()
        times = [seconds for seconds in (wanted.ttft, wanted.deadline) if seconds is not None]
        if times and min(times) < self._start_seconds:
            raise OverloadedError(
                f"{self._name} was asleep and starts now, which took {self._start_seconds:.1f} s the last time, longer "
                f"than the {min(times):g} s that were asked for; try again then",
                retry_after=self._start_seconds,
            )

    def hold(self, begin: Callable[[Frontend], Opened]) -> "HeldRequest":
        """Raises OverloadedError where as many wait as may."""
        if self.held >= MOST_HELD:
            raise OverloadedError(
                f"{self._name} was asleep and starts now, and {MOST_HELD} requests wait for it; try again",
                retry_after=max(1.0, self._start_seconds),
            )
        self.asked.set()
        return HeldRequest(self, begin)

    async def until_over(self) -> Frontend:
        """Raises why it does not serve, and UnavailableError where that takes too long."""
        self.held += 1
        try:
            async with asyncio.timeout(self._limit):
                return await asyncio.shield(self._over)
        except TimeoutError as error:
            raise UnavailableError(
                f"{self._name} was asleep and did not serve again within {self._limit:g} s"
            ) from error
        finally:
            self.held -= 1


class HeldRequest:
    """`backend.Opened` of a request that waits for its model."""

    def __init__(self, sleep: Sleep, begin: Callable[[Frontend], Opened]) -> None:
        self._sleep, self._begin = sleep, begin
        self._opened: Opened | None = None

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        self._opened = self._begin(await self._sleep.until_over())
        async with aclosing(self._opened.events()) as events:
            async for event in events:
                yield event

    def halt(self) -> None:
        if self._opened is not None:
            self._opened.halt()

    def discard(self) -> None:
        if self._opened is not None:
            self._opened.discard()

    def leave(self) -> None:
        if self._opened is not None:
            self._opened.leave()
