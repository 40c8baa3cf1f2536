"""The pilot of a running deployment: looks every few seconds, says what it advises, and acts where it may.

Whatever goes wrong here costs its advice only: it rests, and serving goes on with the pools that there are.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.control.pilot.acting import PoolChanges
from afserve.control.pilot.advice import Advice
from afserve.control.pilot.observed import Observed
from afserve.control.pilot.policy import Policy
from afserve.control.pilot.settings import ACT, pool_names
from afserve.control.wire.view_values import PilotView
from afserve.errors import AfserveError

log = logging.getLogger("afserve.pilot")
LOOK_SECONDS = 5.0
_SHOWN = 5  # outcomes, and advices beside those that they are of


class PilotLoop:
    """`observe` says what there is, `changes` asks for others as people do, `may_act`: now. `keep` is called behind
    each look, for what was learnt to outlive this process."""

    def __init__(
        self,
        mode: str,
        policy: Policy,
        observe: Callable[[], Observed],
        changes: PoolChanges,
        clock: Clock,
        look_seconds: float = LOOK_SECONDS,
        may_act: Callable[[], bool] = lambda: True,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = policy
        self._mode, self._observe, self._changes, self._clock = mode, observe, changes, clock
        self._may_act, self._keep = may_act, keep
        self._seconds = look_seconds
        self._advice = Adviser("the pilot, which sizes pools")
        self._counts: Counter[str] = Counter()
        self._judged = 0
        self._last: Advice | None = None
        self._said_refusal = ""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            self.look()

    def look(self) -> None:
        now = self._clock.now()
        if not self._advice.rests(now):
            with self._advice.guarded(now):
                advice = self.policy.look(self._observe())
                self._say_outcomes()
                self._keep()
                if advice is not None:
                    self._follow(advice)

    def _follow(self, advice: Advice) -> None:
        self._last = advice
        self._counts["advised"] += 1
        acts = self._mode == ACT and self._may_act()
        log.warning("%s %s", "acts on" if acts else "gives", advice)
        if acts:
            self._act(advice)

    def _act(self, advice: Advice) -> None:
        try:
            self._changes.follow(advice.old, advice.new)
        except AfserveError as error:  # such as no room for more: an answer, and no fault of the pilot
            self._counts["refused"] += 1
            self._counts["acted"] += bool(self._changes.changed)
            if error.message != self._said_refusal:
                self._said_refusal = error.message
                done = self._changes.changed
                what = f"{done} of its changes made, no more" if done else "the pools stay as they are"
                log.warning("%s: %s", what, error.message)
            return
        self._counts["acted"] += 1

    def _say_outcomes(self) -> None:
        fresh = self.policy.judged - self._judged
        for outcome in list(self.policy.outcomes)[-fresh:] if fresh else ():
            log.info("%s", outcome)
            for found in outcome.compared.values():
                self._counts["compared"] += 1
                self._counts["held"] += found.held
        self._judged = self.policy.judged

    def view(self) -> PilotView:
        policy, now = self.policy, self._clock.now()
        advised = None if self._last is None else self._last.new
        outcomes = list(policy.outcomes)[-_SHOWN:]
        told = {*list(policy.advices)[-_SHOWN:], *(one.advice for one in outcomes)}
        return PilotView(
            self._mode,
            tuple(f"{now - one.at:.0f} s ago: {one}" for one in policy.advices if one in told),
            tuple(f"{now - one.at:.0f} s ago: {one}" for one in outcomes),
            {} if advised is None else pool_names(advised),
            {what: self._counts[what] for what in ("advised", "acted", "refused", "compared", "held")},
            policy.figures(),
        )
