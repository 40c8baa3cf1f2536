"""How many requests will come: what a short window says, where its trend leads, and what the day was like before.

Numbers in, numbers out; it reads no clock. Times are seconds of any clock that goes on; a day has 86,400 of them.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import combinations
from statistics import median

DAY = 86_400.0
SLOT = 300.0  # of a day that is remembered as one
_RATIO = 3.0  # that a day remembered may change the rate by, within the horizon
_TREND_SHARE = 0.15  # of the present rate, that a trend may add or take
_NOISE_SHARE = 0.15  # of it, beyond one deviation: a jump is far from any line, and no noise
_NEWEST = 1 / 3  # of the short window, in which a jump is looked for
_NORMAL = 1.4826  # standard deviations in a median error
_JUMP, _CHANCE = 1.25, 3.0  # times the rate before, and standard deviations of such parts: more is a jump
_LEAP = 1.5  # times the trend: noise of clumped arrivals is not as much, a rate that doubles is


@dataclass(frozen=True, slots=True)
class Windows:
    """Seconds: what counts as now; from what a trend is read."""

    short: float = 60.0
    long: float = 900.0


class Forecast:
    """Of a rate. `note_arrivals` is told how many came in the seconds up to a moment. `jumps`: whether it looks for
    jumps, which chance explains only where what came are single arrivals, as of Poisson's, and no tokens."""

    def __init__(self, windows: Windows | None = None, *, jumps: bool = True) -> None:
        self._windows, self._jumps = windows or Windows(), jumps
        self._noted: deque[tuple[float, float, float]] = deque()  # (end, seconds, came)
        self._line: tuple[float, float, float] | None = None  # the trend, until more is noted
        self._day: dict[int, float] = {}  # rate by slot, of days before
        self._slot: tuple[int, float, float] | None = None  # (slot, seconds, came) of the present one

    def note_arrivals(self, at: float, seconds: float, came: float) -> None:
        self._noted.append((at, seconds, came))
        self._line = None
        while self._noted and self._noted[0][0] < at - self._windows.long:
            self._noted.popleft()
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
    def present_rate(self) -> float:
        """Per second, over the short window; or over its newest part, where the rate has jumped in it."""
        return self._jumped_to() or self._mean(self._windows.short)[0]

    @property
    def jumped(self) -> bool:
        """Whether much more comes in the newest part of the short window than came before, and than a trend says."""
        return self._jumped_to() > _LEAP * self.trend()[0]

    def _jumped_to(self) -> float:
        """The rate since then; 0 where it has not jumped. Of a part that began before it, only the end counts."""
        if not self._jumps:
            return 0.0
        part = self._windows.short * _NEWEST
        newest, seconds = self._mean(part)
        before, _ = self._mean(self._windows.long, part)
        chance = _CHANCE * math.sqrt(before / seconds) if seconds else 0.0
        if not before or newest <= max(_JUMP * before, before + chance):
            return 0.0
        return max(newest, self._mean(part / 2)[0])

    def _mean(self, window: float, until: float = 0.0) -> tuple[float, float]:
        """(rate, seconds) of so long, up to so many seconds before now."""
        last = self._noted[-1][0] if self._noted else 0.0
        parts = [
            (seconds, came)
            for at, seconds, came in self._noted
            if last - window + 1e-9 < at < last - until + 1e-9
        ]
        seconds = sum(part[0] for part in parts)
        return sum(part[1] for part in parts) / seconds if seconds else 0.0, seconds

    def _minutes(self) -> list[tuple[float, float]]:
        """(seconds before now, rate) of each short window of the long one, the newest first."""
        found: dict[int, tuple[float, float]] = {}
        last = self._noted[-1][0] if self._noted else 0.0
        for at, seconds, came in self._noted:
            number = int((last - at) // self._windows.short)
            before = found.get(number, (0.0, 0.0))
            found[number] = before[0] + seconds, before[1] + came
        return [
            ((number + 0.5) * self._windows.short, came / seconds)
            for number, (seconds, came) in sorted(found.items())
            if seconds >= self._windows.short / 2
        ]

    def trend(self) -> tuple[float, float, float]:
        """(rate now on a straight line, its slope per second, standard deviation around it). The line is Theil's and
        Sen's, the deviation that of the median error: a burst of some minutes moves neither by much."""
        if self._line is None:
            self._line = self._trend()
        return self._line

    def _trend(self) -> tuple[float, float, float]:
        minutes = self._minutes()
        if len(minutes) < 3:
            rate = self.present_rate
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
        most = deviation + _NOISE_SHARE * now
        if self.jumped:  # how far it will go is not known yet
            return max(now, later) + most
        return max(now, later) + min(deviations * deviation, most)

    def _ratio(self, seconds: float) -> float | None:
        """How the day before went on from this time of day, at most."""
        if not self._noted:
            return None
        at, slots = self._noted[-1][0], int(DAY / SLOT)
        here = self._day.get(int(at // SLOT) % slots)
        coming = [
            self._day.get(number % slots)
            for number in range(int(at // SLOT), int((at + seconds) // SLOT) + 1)
        ]
        known = [rate for rate in coming if rate is not None]
        if not here or len(known) < len(coming):
            return None
        return min(max(max(known) / here, 1 / _RATIO), _RATIO)
