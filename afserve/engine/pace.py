"""How many micro-batches to keep in flight: the `auto` of --micro-batches, from measured token rates.

The closed form (m >= 2 (1 + T_c / T_f), MegaScale-Infer 4.1) says when more micro-batches hide nothing further; it
does not see that splitting a batch re-reads weights, nor who else uses the cores. So `Pace` measures: at each load
it tries the neighbouring counts for a short while, keeps the fastest, and looks again now and then. No I/O.
"""

from dataclasses import dataclass, field

WINDOW_SECONDS = 0.15  # long enough for tens of steps, short against anybody's patience
WINDOW_STEPS = 12
BETTER = 1.03  # a count must win by 3 % to replace another: noise moves nothing
LOOK_AGAIN_SECONDS = 15.0


@dataclass(slots=True)
class _Level:
    """What is known at one load: tokens per second by count, and when each was last measured."""

    best: int
    rate: dict[int, float] = field(default_factory=dict)
    measured: dict[int, float] = field(default_factory=dict)


class Pace:
    """Told of every step; `active` is the count to use next. Loads are told apart by powers of two of sequences."""

    def __init__(self, most: int, start: int | None = None) -> None:
        self._most = most
        self._levels: dict[int, _Level] = {}
        self._start = min(most, 2) if start is None else start
        self.active = self._start
        self._running = 0
        self._began = 0.0
        self._tokens = 0
        self._steps = 0

    def observe(self, now: float, tokens: int, running: int, *, decode_only: bool) -> None:
        """A step ended at `now` seconds with `tokens` new tokens and `running` sequences."""
        if not decode_only or running.bit_length() != self._running.bit_length():
            self._running = running
            self._restart(now)
            self.active = self._level().best if running else self._start
            return
        self._tokens += tokens
        self._steps += 1
        if now - self._began >= WINDOW_SECONDS and self._steps >= WINDOW_STEPS:
            self._conclude(now, self._tokens / (now - self._began))

    def _conclude(self, now: float, rate: float) -> None:
        level = self._level()
        level.rate[self.active] = rate
        level.measured[self.active] = now
        known = max(level.rate, key=lambda m: level.rate[m])
        if level.rate[known] > BETTER * level.rate.get(level.best, 0.0):
            level.best = known
        self.active = self._candidate(level, now)
        self._restart(now)

    def _candidate(self, level: _Level, now: float) -> int:
        """A neighbour of the best that was not measured lately, else the best."""
        for count in (level.best + 1, level.best - 1):
            useful = 1 <= count <= min(self._most, self._running)
            if useful and now - level.measured.get(count, -LOOK_AGAIN_SECONDS) >= LOOK_AGAIN_SECONDS:
                return count
        return level.best

    def _level(self) -> _Level:
        return self._levels.setdefault(
            self._running.bit_length(), _Level(min(self._start, max(1, self._running)))
        )

    def _restart(self, now: float) -> None:
        self._began, self._tokens, self._steps = now, 0, 0
