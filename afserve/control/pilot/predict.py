"""How many requests will come: what a short window says, where its trend leads, and what the day was like before.

Numbers in, numbers out; it reads no clock. Times are seconds of any clock that goes on; a day has 86,400 of them.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from afserve.control.pilot.jumps import Jumps

DAY = 86_400.0
SLOT = 300.0  # of a day that is remembered as one
_RATIO = 3.0  # that a day remembered may change the rate by, within the horizon
_TREND_SHARE = 0.15  # of the present rate, that a trend may add or take
_NOISE_SHARE = 0.15  # of it, beyond one deviation: a jump is far from any line, and no noise
_NEWEST = 1 / 3  # of the short window, in which a jump is looked for
_NORMAL = 1.4826  # standard deviations in a median error
_JUMP, _CHANCE = 1.25, 3.0  # times the rate before, and standard deviations of such parts: more is a jump
_LASTING = 2 / 3  # of the long window: what lasts longer is the level, of which a trend is to be read
_WAITS = 15.0  # a window of what may wait is as many waits
_PARTS = 3.0  # and the long window, of which its trend is, as many of those at least
_LEAP = 1.5  # times the trend: noise of clumped arrivals is not as much, a rate that doubles is


@dataclass(frozen=True, slots=True)
class Windows:
    """Seconds: what counts as now; from what a trend is read."""

    short: float = 60.0
    long: float = 900.0

    def for_waits(self, seconds: float) -> "Windows":
        """For what may wait so long: that is short beside a window then."""
        return replace(self, short=max(self.short, min(_WAITS * seconds, self.long / _PARTS)))


class Forecast:
    """Of a rate. `note_arrivals` is told how many came in the seconds up to a moment. `jumps`: those of another rate
    that this one follows; without it looks for its own, which chance explains only where what came are single arrivals,
    as of Poisson's, and no tokens."""

    def __init__(self, windows: Windows | None = None, jumps: Jumps | None = None) -> None:
        self._windows, self.jumps, self._finds = windows or Windows(), jumps or Jumps(), jumps is None
        self._noted: deque[tuple[float, float, float]] = deque()  # (end, seconds, came)
        self._line: tuple[float, float, float] | None = None  # the trend, until more is noted
        self._day: dict[int, float] = {}  # rate by slot, of days before
        self._slot: tuple[int, float, float] | None = None  # (slot, seconds, came) of the present one

    def note_arrivals(self, at: float, seconds: float, came: float) -> None:
        self._noted.append((at, seconds, came))
        if not self.jumped:  # else the trend is that of its beginning
            self._line = None
        while self._noted and self._noted[0][0] < at - self._windows.long:
            self._noted.popleft()
        if self._finds:
            self._find_jump(at)
        slot = int(at // SLOT)
        if self._slot is None or self._slot[0] != slot:
            self._close_slot()
            self._slot = slot, 0.0, 0.0
        self._slot = slot, self._slot[1] + seconds, self._slot[2] + came

    def _close_slot(self) -> None:
        """A day counts as much as all days before it."""
        if self._slot is not None and self._slot[1] > SLOT / 2:
            number, rate = self._slot[0] % int(DAY / SLOT), self._slot[2] / self._slot[1]
            known = self._day.get(number)
            self._day[number] = rate if known is None else (known + rate) / 2

    @property
    def noted(self) -> float:
        """How many came in the long window."""
        return sum(came for _, _, came in self._noted)

    @property
    def present_rate(self) -> float:
        """Per second, over the short window; or over its newest part, where the rate has jumped in it."""
        if not self.jumped:
            return self._calm_rate
        rate, seconds = self._mean(self._windows.short, jump=True)
        newest = self._mean(self._part)[0]
        if seconds >= self._windows.short - 1e-9:
            return max(rate, newest)
        return max(newest, self._mean(self._part / 2)[0], self.jumps.usual_height * self.trend()[0])

    @property
    def _calm_rate(self) -> float:
        return self._risen()[0] or self._mean(self._windows.short, jump=False)[0] or self._mean(self._part)[0]

    @property
    def jumped(self) -> bool:
        """Whether much more comes than came before, and than a trend says."""
        return self.jumps.lasts

    def _find_jump(self, at: float) -> None:
        """Begun or ended at most so long ago as it takes to see it."""
        level = self.trend()[0]
        if not self.jumped:
            rate, seconds = self._risen()
            if rate <= _LEAP * level:
                return
            self.jumps.begin(at - seconds)
        elif self._mean(self._part)[0] <= _JUMP * level:
            height = self._mean(at - self.jumps.began, jump=True)[0] / max(level, 1e-9)
            self.jumps.end(at - self._part / 2, height)
        elif at - self.jumps.began > _LASTING * self._windows.long:
            self.jumps.become_level()
        else:
            return
        self._line = None

    @property
    def _part(self) -> float:
        return self._windows.short * _NEWEST

    def _risen(self) -> tuple[float, float]:
        """(the rate since it rose by more than chance, within so many seconds); 0 where it has not. Of a part that
        began before it, only the end counts."""
        for part in (self._part / 2, self._part) if self._finds else ():
            newest, seconds = self._mean(part)
            before = self._mean(self._windows.long, part, jump=False)[0]
            if before and newest > max(_JUMP * before, before + self._chance(before, part, seconds)):
                return max(newest, self._mean(self._part / 2)[0]), part
        return 0.0, 0.0

    def _chance(self, before: float, part: float, seconds: float) -> float:
        """What so new a part may be above those before it without a cause: Poisson's at least, of which few come whole,
        and more where they have varied more."""
        rates = [rate for _, rate in self._parts(part)][1:]
        level = median(rates) if rates else before
        spread = _NORMAL * median(abs(rate - level) for rate in rates) if rates else 0.0
        return max(_CHANCE * spread, _CHANCE * math.sqrt(before / seconds) + 1 / seconds)

    def _kept(self, jump: bool | None) -> list[tuple[float, float, float]]:
        """What was noted in jumps, beside them, or both, since the level is what it is."""
        jumps = self.jumps
        return [
            noted
            for noted in self._noted
            if noted[0] > jumps.level_since and (jump is None or jumps.covers(noted[0]) == jump)
        ]

    def _mean(self, window: float, until: float = 0.0, jump: bool | None = None) -> tuple[float, float]:
        """(rate, seconds) of so long, up to so many seconds before now."""
        last = self._noted[-1][0] if self._noted else 0.0
        parts = [
            (seconds, came)
            for at, seconds, came in self._kept(jump)
            if last - window + 1e-9 < at < last - until + 1e-9
        ]
        seconds = sum(part[0] for part in parts)
        return sum(part[1] for part in parts) / seconds if seconds else 0.0, seconds

    def _parts(self, length: float) -> list[tuple[float, float]]:
        """(seconds before now, rate) of each part of the long window, the newest first, beside jumps."""
        found: dict[int, tuple[float, float]] = {}
        last = self._noted[-1][0] if self._noted else 0.0
        for at, seconds, came in self._kept(jump=False):
            number = int((last - at) // length)
            before = found.get(number, (0.0, 0.0))
            found[number] = before[0] + seconds, before[1] + came
        return [
            ((number + 0.5) * length, came / seconds)
            for number, (seconds, came) in sorted(found.items())
            if seconds >= length / 2
        ]

    def trend(self) -> tuple[float, float, float]:
        """(rate now on a straight line, its slope per second, standard deviation around it). The line is Theil's and
        Sen's, the deviation that of the median error: a burst of some minutes moves neither by much."""
        if self._line is None:
            self._line = self._trend()
        return self._line

    def _trend(self) -> tuple[float, float, float]:
        minutes = self._parts(self._windows.short)
        if len(minutes) < 3:
            rate = self._calm_rate
            return rate, 0.0, math.sqrt(rate / self._windows.short)
        slope = median((a[1] - b[1]) / (b[0] - a[0]) for a, b in combinations(minutes, 2))
        levels = [rate + slope * ago for ago, rate in minutes]
        level = max(median(levels), 0.0)
        return level, slope, _NORMAL * median(abs(each - level) for each in levels)

    def soon(self, seconds: float, deviations: float = 1.0) -> float:
        """The highest rate that is to be expected within so many seconds from now, so many deviations above the line;
        or one and a share of the rate, where that is less.

        Where the day is known from the day before, its ratio counts instead of the trend.
        """
        level, slope, deviation = self.trend()
        now = max(level, self.present_rate)
        ratio = self._ratio(seconds)
        if ratio is None:
            change = max(-_TREND_SHARE * now, min(slope * seconds, _TREND_SHARE * now))
            later = level + change
        else:
            later = level * ratio
        if level and self.jumped:
            deviation *= max(now / level, 1.0)
        return max(now, later) + min(deviations * deviation, deviation + _NOISE_SHARE * now)

    def _ratio(self, seconds: float) -> float | None:
        """How the day before went on from this time of day, at most."""
        if not self._noted:
            return None
        at, slots = self._noted[-1][0], int(DAY / SLOT)
        numbers = range(int(at // SLOT), int((at + seconds) // SLOT) + 1)
        here, *_ = rates = [self._day.get(number % slots, 0.0) for number in numbers]
        return min(max(max(rates) / here, 1 / _RATIO), _RATIO) if all(rates) else None
