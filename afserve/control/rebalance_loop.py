"""Thinks about where experts stand, beside the event loop: on the controller's clock, and when expert nodes change.

What comes of it is an event like any other; `place` carries it into the membership. A fault here costs balance only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.control.membership.balancing import Balancing
from afserve.control.membership.events import Place, Replan
from afserve.errors import ConfigError

log = logging.getLogger("afserve.control")
_AGAIN = 0.25  # seconds between two tries to find places, at least


class RebalanceLoop:
    """`ended` says that nothing is to be found any more; `pause` waits so many seconds until the next try."""

    def __init__(
        self,
        balancing: Balancing,
        clock: Clock,
        place: Callable[[Place], None],
        ended: Callable[[], bool],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._balancing, self._clock, self._place, self._ended = balancing, clock, place, ended
        self._pause = pause
        # What only advises: an exception there must not end serving.
        self._balance_advice = Adviser("balancing experts")
        self._placing_advice = Adviser("finding places for experts")

    def imbalance(self) -> tuple[float, ...]:
        """As `Balancing` says it; nothing while that cannot be said."""
        return self._balance_advice.ask(self._clock.now(), self._balancing.imbalance, ())

    async def rebalance(self, now: float) -> None:
        """Tokens of all requests pass this event loop: the thinking is done beside it."""
        place = None
        if not self._balance_advice.rests(now):
            with self._balance_advice.guarded(now):
                stats = self._balancing.age(now)
                if stats is not None:
                    thought = await asyncio.to_thread(self._balancing.think, stats, now)
                    place = self._balancing.decided(thought)
        if place is not None:
            self._try_place(place, logging.INFO)

    async def replan_places(self, asked: Replan) -> None:
        """Where there is no way there now, the next change of who is there asks again."""
        while not self._ended():
            now = self._clock.now()
            with self._placing_advice.guarded(now):
                place = await self._think_out(asked, now)
                break
            await self._pause(max(_AGAIN, self._placing_advice.rest_left(now)))
        else:
            return
        if place is not None:
            self._try_place(place, logging.WARNING)

    async def _think_out(self, asked: Replan, now: float) -> Place | None:
        balancing = self._balancing
        try:
            if asked.lost:
                lost, nodes, barred = asked.lost, asked.nodes, asked.barred
                return await asyncio.to_thread(balancing.plan_without, lost, nodes, now, barred)
            return await asyncio.to_thread(balancing.plan_over, asked.nodes, now)
        except ConfigError as error:
            log.warning("the experts stay where they are: %s", error.message)
            return None

    def _try_place(self, place: Place, level: int) -> None:
        """While it was thought out, a node that it needs may have gone; the next look at the load thinks anew."""
        try:
            self._place(place)
        except ConfigError as error:
            log.log(level, "the experts stay where they are: %s", error.message)
