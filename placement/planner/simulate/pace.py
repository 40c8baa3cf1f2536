"""How much work gets done while something stands still or is slow: a speed that changes at some moments.

Seconds in, seconds out. What makes it change is `losses.py`'s to say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SpeedProfile:
    """speed[i] (seconds of work per second, 0 to 1) holds from since[i] on; since[0] is 0, and the last speed, which
    is above 0, holds for ever. done[i]: work done until since[i]."""

    since: Array
    speed: Array
    done: Array

    @classmethod
    def from_steps(cls, since: Sequence[float], speed: Sequence[float]) -> "SpeedProfile":
        assert since[0] == 0 and speed[-1] > 0, "it begins at 0 and goes on for ever"
        times, speeds = np.array(since, dtype=np.float64), np.array(speed, dtype=np.float64)
        done = np.concatenate([[0.0], np.cumsum(np.diff(times) * speeds[:-1])])
        return cls(times, speeds, done)

    def end(self, begun: float, work: float) -> float:
        """When `work` seconds of work that begin at `begun` are done."""
        if begun >= self.since[-1]:
            return begun + work / float(self.speed[-1])
        at = int(np.searchsorted(self.since, begun, side="right")) - 1
        total = float(self.done[at] + self.speed[at] * (begun - self.since[at])) + work
        last = max(int(np.searchsorted(self.done, total, side="left")) - 1, at)
        begins = max(begun, float(self.since[last]))
        before = float(self.done[last] + self.speed[last] * (begins - self.since[last]))
        if total <= before:
            return begins
        return begins + (total - before) / float(self.speed[last])


ALWAYS = SpeedProfile.from_steps([0.0], [1.0])
