"""What classes of service ask of pools: which of them come, what times they have, whose turn comes first, who was late.

All requests decode in the same steps, so that the shortest time between tokens counts for all that come. First tokens
wait by turn: a class waits for those ahead of it and for its own.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from afserve.control.pilot.observed import SeenWindow
from afserve.control.pilot.sizes import FirstTokenTarget, TargetTimes
from afserve.control.wire.load_values import ClassCounts

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
        self._noted: deque[tuple[float, float, Mapping[str, ClassCounts]]] = deque()
        self._came: defaultdict[str, float] = defaultdict(float)
        self._all = 0.0
        self.in_time: dict[str, float] = {}  # shares by class, of first tokens or answers, whichever is less

    def note_window(self, at: float, window: SeenWindow) -> None:
        """What happened since the last one."""
        if not self._aims:
            return
        self._noted.append((at, window.load.came, window.classes))
        self._add(window.load.came, window.classes, 1)
        while self._noted[0][0] < at - self._hold:
            _, came, classes = self._noted.popleft()
            self._add(-came, classes, -1)

    def _add(self, came: float, classes: Mapping[str, ClassCounts], sign: int) -> None:
        self._all += came
        for name, counts in classes.items():
            self._came[name] += sign * counts.came

    def wanted(self, own: TargetTimes) -> TargetTimes:
        """What pools have to keep now, `own` being the server's times."""
        least = _DUST * self._all
        parts = [(self._came[aim.name], aim) for aim in self._aims if self._came[aim.name] > least]
        if not parts or self._all <= 0:
            return own
        of_none = self._all - sum(came for came, _ in parts)
        if of_none > least:
            parts.append((of_none, ClassAim("")))
        return wanted_of(own, parts)

    def late_share(self, window: SeenWindow) -> float:
        """Of the class that was late most often."""
        for name, counts in window.classes.items():
            judged = [
                late / of
                for of, late in ((counts.first, counts.first_late), (counts.rest, counts.rest_late))
                if of >= _JUDGED
            ]
            if judged:
                self.in_time[name] = 1 - max(judged)
        return max((1 - self.in_time[name] for name in window.classes if name in self.in_time), default=0.0)
