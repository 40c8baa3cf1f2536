"""Whether a drafter whose passes cost time in any case is worth them: windows of steps with it and without, compared.

What it costs beside the rows that are verified nobody can price from steps that all have it. Values in, values out.
"""

from dataclasses import dataclass, field

_WINDOW = 24  # steps
_SKIPPED = 2  # of them: the first step behind a rest has no draft to verify
_NEWEST = 0.3  # the weight of a window in a rate
_FIRST, _LONGEST = 4, 64  # windows until what was slower is tried again


@dataclass(slots=True)
class _Load:
    """Of so many sequences: tokens per second resting and awake, and when the slower one is due again."""

    rates: dict[bool, float] = field(default_factory=dict)
    wait: int = _FIRST  # windows between two tries, doubled while they say the same
    left: int = _FIRST

    def learn(self, awake: bool, rate: float) -> None:
        before = self.rates.get(awake, rate)
        faster = self.faster
        self.rates[awake] = before + _NEWEST * (rate - before)
        if faster is not None and self.faster is not faster:
            self.wait = self.left = _FIRST

    @property
    def faster(self) -> bool | None:
        """Which of both; None until both were measured."""
        return None if len(self.rates) < 2 else self.rates[True] > self.rates[False]

    def choose(self) -> bool:
        """For the next window."""
        faster = self.faster
        if faster is None:
            return True not in self.rates
        self.left -= 1
        if self.left > 0:
            return faster
        self.wait = self.left = min(2 * self.wait, _LONGEST)
        return not faster


class Resting:
    """Of a whole node; told of each step that only decoded. It is awake first."""

    def __init__(self) -> None:
        self.awake = True
        self._loads: dict[int, _Load] = {}
        self._size = self._steps = self._tokens = 0
        self._seconds, self._load = 0.0, _Load()

    def note_step(self, sequences: int, tokens: int, seconds: float) -> None:
        """`sequences` got so many tokens. Steps of one load are compared: of 1, of 2 to 3, of 4 to 7 sequences ..."""
        size = sequences.bit_length()
        if size != self._size:
            self._begin(size)
            faster = self._load.faster
            self.awake = True if faster is None else faster
        self._steps += 1
        if self._steps <= _SKIPPED:
            return
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if self._steps >= _WINDOW and self._seconds > 0:
            self._load.learn(self.awake, self._tokens / self._seconds)
            self.awake = self._load.choose()
            self._begin(size)

    def _begin(self, size: int) -> None:
        self._size, self._load = size, self._loads.setdefault(size, _Load())
        self._steps = self._tokens = 0
        self._seconds = 0.0
