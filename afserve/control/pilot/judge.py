"""Says how sure a pilot may be, from how often it was right: intervals that hold as often as they promise.

After each comparison the interval of a quantity grows where it missed and shrinks where it held, so that in the long
run it holds as often as it says, whatever is compared (adaptive conformal inference: Gibbs and Candes, 2021).
"""

import math
from dataclasses import dataclass, field

HOLDS = 0.8  # as often as an interval is to hold
_FIRST = math.log(1.5)  # width of the first interval: a factor to either side
_STEP = 0.25  # by which one miss widens it, as a share of itself
_NEWEST = 0.05  # weight of a measurement in a correction
_FURTHEST = math.log(
    2.0
)  # that a correction may be from 1: a model that is wrong by more is not mended by a factor
_NARROWEST, _WIDEST = math.log(1.02), math.log(50.0)


@dataclass(slots=True)
class Interval:
    """Around a prediction, as a factor to either side."""

    width: float = _FIRST
    compared: int = 0
    held: int = 0

    def around(self, value: float) -> tuple[float, float]:
        return value * math.exp(-self.width), value * math.exp(self.width)

    def compare(self, predicted: float, measured: float) -> bool:
        """Whether what was measured lies in the interval of what was predicted."""
        error = abs(math.log(max(measured, 1e-9) / max(predicted, 1e-9)))
        within = error <= self.width
        self.compared += 1
        self.held += within
        step = _STEP * ((1 - HOLDS) if within else -HOLDS)
        self.width = min(max(self.width * math.exp(-step), _NARROWEST), _WIDEST)
        return within


@dataclass(slots=True)
class Correction:
    """What is measured over what a model says, as a factor that follows the newest measurements slowly."""

    log: float = 0.0

    def note_error(self, expected: float, measured: float) -> None:
        if expected > 0 and measured > 0 and math.isfinite(expected):
            error = max(-_FURTHEST, min(math.log(measured / expected), _FURTHEST))
            self.log += _NEWEST * (error - self.log)

    @property
    def factor(self) -> float:
        return math.exp(self.log)


@dataclass(slots=True)
class Judge:
    """The intervals of both times, and how a model has to be corrected."""

    ttft: Interval = field(default_factory=Interval)
    tpot: Interval = field(default_factory=Interval)
    first: Correction = field(default_factory=Correction)
    rest: Correction = field(default_factory=Correction)
    reading: Correction = field(default_factory=Correction)
