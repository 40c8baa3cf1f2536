"""When much more came for some minutes than before and behind them. Numbers in, numbers out.

What comes in a jump says nothing of the level that a rate comes back to, so trends leave it out; and behind a jump it
is no reason to keep what was needed in it. What lasts for most of the time that a trend is read from is the level.
How far a new one goes is not seen at once: until it is, it is taken to go as far as those before.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

_REMEMBERED = 8  # jumps


@dataclass(slots=True)
class Jumps:
    """Seconds of one clock. `level_since`: what came before is of another level."""

    level_since: float = -math.inf
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=16))
    _heights: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def lasts(self) -> bool:
        return bool(self._spans) and self._spans[-1][1] == math.inf

    @property
    def began(self) -> float:
        """Of the newest."""
        return self._spans[-1][0]

    def covers(self, at: float) -> bool:
        return any(began < at <= ended for began, ended in self._spans)

    def begin(self, at: float) -> None:
        self._spans.append((at, math.inf))

    @property
    def usual_height(self) -> float:
        """Times the level; 0 where none is known."""
        return median(self._heights) if self._heights else 0.0

    def end(self, at: float, height: float) -> None:
        self._spans[-1] = (self.began, max(at, self.began))
        self._heights.append(height)

    def become_level(self) -> None:
        """The newest is no jump: it stays."""
        self.level_since = self.began
        self._spans.clear()
