"""So much per minute, as a bucket that fills steadily: numbers in, numbers out, no clock and no store."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """Holds what may be used now: at most `most`, which is also what comes in per minute. `at` in seconds.

    It may go below zero: tokens are known once they have been used. Nobody gets more until it is above again.
    """

    most: int
    level: float
    at: float

    @classmethod
    def full(cls, most: int, now: float) -> "Bucket":
        return cls(most, float(most), now)

    def filled(self, now: float) -> "Bucket":
        """A clock that was set back adds nothing."""
        more = max(0.0, now - self.at) * self.most / 60.0
        return Bucket(self.most, min(float(self.most), self.level + more), now)

    def less(self, amount: float) -> "Bucket":
        return Bucket(self.most, self.level - amount, self.at)

    def seconds_until(self, wanted: float) -> float:
        """Until it holds so much, if nobody takes from it."""
        return max(0.0, (wanted - self.level) * 60.0 / self.most)

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level + 1e-9))
