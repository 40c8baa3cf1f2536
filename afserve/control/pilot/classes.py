"""What classes of service ask of pools: which of them come, what times they have, whose turn comes first, who was late.

All requests decode in the same steps, so that the shortest time between tokens counts for all that come. First tokens
wait by turn: a class waits for those ahead of it and for its own.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from afserve.control.pilot.observed import SeenWindow
from afserve.control.pilot.sizes import FirstTokenTarget, TargetTimes

_NEVER = float("inf")
_DUST = 1e-6  # of all requests: what sums of parts of requests are wrong by
_JUDGED = 10  # requests of a class, of fewer of which a late one says little


@dataclass(frozen=True, slots=True)
class ClassAim:
    """Of a class by its name: the lowest `priority` has its turn first; seconds, infinity for none of its own."""

    name: str
    priority: int = 0
    ttft: float = _NEVER
    tpot: float = _NEVER

    def times(self, own: TargetTimes) -> tuple[float, float]:
        """To the first token and between tokens, with the server's `own` where it has none."""
        return own.ttft if self.ttft == _NEVER else self.ttft, own.tpot if self.tpot == _NEVER else self.tpot


def wanted_of(own: TargetTimes, parts: Sequence[tuple[float, ClassAim]]) -> TargetTimes:
    """What pools have to keep where so many requests of each class come, `own` being the server's times."""
    whole = sum(came for came, _ in parts)

    def share(highest: int) -> float:
        return sum(came for came, aim in parts if aim.priority <= highest) / whole

    firsts = {
        FirstTokenTarget(aim.times(own)[0], share(aim.priority - 1), share(aim.priority)) for _, aim in parts
    }
    timed = sorted((one for one in firsts if one.ttft < _NEVER), key=lambda one: (one.upto, one.ttft))
    tpot = min(aim.times(own)[1] for _, aim in parts)
    return replace(own, ttft=_NEVER, tpot=tpot, classes=tuple(timed))


class ClassMix:
    """Shares of all requests within `hold` seconds. A request of no class, or of one without a time, is held to the
    server's."""

    def __init__(self, aims: Sequence[ClassAim], hold: float) -> None:
        self._aims, self._hold = tuple(aims), hold
        self._noted: deque[tuple[float, SeenWindow]] = deque()
        self.in_time: dict[str, float] = {}  # shares by class, of first tokens or answers, whichever is less

    def note_window(self, at: float, window: SeenWindow) -> None:
        """What happened since the last one."""
        self._noted.append((at, window))
        while self._noted[0][0] < at - self._hold:
            self._noted.popleft()

    def wanted(self, own: TargetTimes) -> TargetTimes:
        """What pools have to keep now, `own` being the server's times."""
        if not self._aims:
            return own
        came, of_none = dict.fromkeys((aim.name for aim in self._aims), 0.0), 0.0
        for _, window in self._noted:
            of_none += window.load.came
            for name in came.keys() & window.classes.keys():
                came[name] += window.classes[name].came
                of_none -= window.classes[name].came
        parts = [(came[aim.name], aim) for aim in self._aims if came[aim.name] > 0]
        if parts and of_none > _DUST * sum(came.values()):
            parts.append((of_none, ClassAim("")))
        return wanted_of(own, parts) if parts else own

    def late_shares(self, window: SeenWindow) -> tuple[float, float]:
        """Of first tokens and of answers, each of the class that was late most often."""
        worst = [0.0, 0.0]
        for name, counts in window.classes.items():
            pairs = (counts.first, counts.first_late), (counts.rest, counts.rest_late)
            shares = [late / of if of >= _JUDGED else None for of, late in pairs]
            if known := [share for share in shares if share is not None]:
                self.in_time[name] = 1 - max(known)
            worst = [max(old, share or 0.0) for old, share in zip(worst, shares, strict=True)]
        return worst[0], worst[1]
