"""Says how sure a pilot may be, from how often it was right: intervals that hold as often as they promise.

An interval is as wide as most of the newest errors were (split conformal prediction); which share of them follows
from how often it held, so that in the long run it holds as often as it says, whatever is compared (adaptive conformal
inference: Gibbs and Candes, 2021). Of fewer errors than that needs it is Student's, around a mean error of 0. All of it
are numbers that may outlive the process (`learnt.py`).
"""

import math
from collections import deque
from dataclasses import dataclass, field

from afserve.control.pilot.advice import Compared

HOLDS = 0.8  # as often as an interval is to hold
_USUAL = math.log(1.5) / 1.2816  # standard deviation of an error, counted as one error before any is known
_STUDENT = 3.078, 1.886, 1.638, 1.533, 1.476  # his t of 0.9, by how many errors are known: 80 % lie within
NEWEST_ERRORS = 60
_FEW, _MANY = 5, 20  # errors
_STEP = 0.02  # by which a miss raises the share of them
_NEWEST = 0.05  # weight of a measurement in a correction
_FURTHEST = math.log(2.0)  # that a correction may be from 1: no factor mends a model that is wrong by more
_LATE = 0.002  # of all requests, that may be late in the long run in each of both ways
_RAISE = 0.15  # of a headroom, for a minute in which all are late
LEAST_ROOM, MOST_ROOM = 1.0, 1.2  # headrooms
_REMEMBERED = 1440  # times whose requests are usual: a day of minutes
_NARROWEST, _WIDEST = math.log(1.02), math.log(50.0)


@dataclass(slots=True)
class Interval:
    """Around a prediction, as a factor to either side."""

    compared: int = 0
    held: int = 0
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST_ERRORS))
    standing: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST_ERRORS))
    share: float = HOLDS

    @property
    def width(self) -> float:
        """Of the logarithm. While few changes were compared, no prediction of one is taken to be surer than those of
        sizes that stayed have been."""
        known = sorted(self.errors)
        place = math.ceil(self.share * (len(known) + 1))
        if len(known) < _FEW:
            squares = _USUAL**2 + sum(error * error for error in known)
            found = _STUDENT[len(known)] * math.sqrt(squares / (len(known) + 1))
        else:  # all of them, where it held too seldom
            found = known[min(max(place, 1), len(known)) - 1]
        if len(known) < _MANY and len(self.standing) >= _FEW:
            stood = sorted(self.standing)
            found = max(found, stood[math.ceil(HOLDS * len(stood)) - 1])
        return min(max(found, _NARROWEST), _WIDEST)

    def note_standing(self, predicted: float, measured: float | None) -> None:
        """What was predicted of the sizes that there are, and measured there."""
        if measured is not None:
            self.standing.append(_error(predicted, measured))

    def around(self, value: float) -> tuple[float, float]:
        return value * math.exp(-self.width), value * math.exp(self.width)

    def compare(self, predicted: float, found: Compared | None) -> None:
        """None where nothing was measured."""
        if found is not None:
            self.compared += 1
            self.held += found.held
            self.share += _STEP * (-(1 - HOLDS) if found.held else HOLDS)
            self.errors.append(_error(predicted, found.measured))


def _error(predicted: float, measured: float) -> float:
    return abs(math.log(max(measured, 1e-9) / max(predicted, 1e-9)))


@dataclass(slots=True)
class Correction:
    """What is measured over what a model says, as a factor that follows the newest measurements slowly."""

    log: float = 0.0

    def note_error(self, expected: float, measured: float | None) -> None:
        if measured is not None and min(expected, measured) > 0 and math.isfinite(expected):
            error = max(-_FURTHEST, min(math.log(measured / expected), _FURTHEST))
            self.log += _NEWEST * (error - self.log)

    @property
    def factor(self) -> float:
        return math.exp(self.log)


@dataclass(slots=True)
class Headroom:
    """How many times a demand pools are sized for: more while requests are late, less while hardly any are, so that in
    the long run as many are late as may be. It is what brings bursts, which nobody foresees, into a size. Requests are
    counted, not minutes: one with twice as many as usual says twice as much."""

    factor: float = 1.1
    noted: float = 0.0
    usual: float = 0.0  # requests in such a time

    def note_late(self, share: float, of: float, minutes: float) -> None:
        """So many `of` the requests of so long were late."""
        self.noted = min(self.noted + 1, _REMEMBERED)
        self.usual += (of - self.usual) / self.noted
        self.factor += _RAISE * (share - _LATE) * of / self.usual * minutes
        self.factor = min(max(self.factor, LEAST_ROOM), MOST_ROOM)


@dataclass(slots=True)
class Judge:
    """The intervals of both times, how a model has to be corrected, and by how much pools are too large on purpose."""

    ttft: Interval = field(default_factory=Interval)
    tpot: Interval = field(default_factory=Interval)
    first: Correction = field(default_factory=Correction)
    rest: Correction = field(default_factory=Correction)
    reading: Correction = field(default_factory=Correction)
    read_room: Headroom = field(default_factory=Headroom)
    made_room: Headroom = field(default_factory=Headroom)

    @property
    def intervals(self) -> tuple[int, int]:
        """(how many of both times were compared, how many of these held)."""
        return self.ttft.compared + self.tpot.compared, self.ttft.held + self.tpot.held
