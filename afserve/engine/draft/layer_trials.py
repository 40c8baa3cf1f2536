"""Whether a layer that guesses behind each step runs: its passes take time in any case. Values in, values out.

At each load by itself it runs while its allowance has something in it. Where its tokens bring less than its passes and
their rows take, that is soon spent; then it rests, until the allowance is full again. Each trial in vain halves the
share of the time that goes into it.
"""

import math
from dataclasses import dataclass, field

from afserve.engine.draft.allowance import Allowance, Usual

_SHARE, _LEAST = 0.005, 0.0025  # of the time, at first and after trials in vain
_STEPS, _PASSES = 4.0, 2.0  # what a trial may lose: so many steps of one sequence, and so many passes
_RISKED, _MOST_RISKED = 0.125, 16.0  # and this share of what it has won, at most so many times as much again
_SPREAD = 64.0  # steps over which the passes over prompts are counted


@dataclass(slots=True)
class _Load:
    """`won`: seconds, in this trial."""

    allowance: Allowance = field(default_factory=lambda: Allowance(_SHARE))
    passes: Usual = field(default_factory=Usual)
    awake: bool = True
    won: float = 0.0

    def note(self, seconds: float, most: float, passes: float, won: float) -> None:
        won -= self.passes.note(passes) if passes else 0.0
        self.won += won
        most += _PASSES * self.passes.seconds
        risked = min(max(_RISKED * self.won, 0.0), _MOST_RISKED * most) if self.awake else 0.0
        self.allowance.pass_time(seconds, most + risked, won)
        allowance = self.allowance
        if self.awake and allowance.saved < 0.0:
            self.awake = False
            allowance.share = _SHARE if self.won > 0.0 else max(allowance.share / 2.0, _LEAST)
        elif not self.awake and allowance.full:
            self.awake, self.won = True, 0.0


class LayerTrials:
    """Of a whole node."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load = self._of(1)
        self._owed = 0.0  # seconds of passes over prompts

    @property
    def awake(self) -> bool:
        return self._load.awake

    def note_steps(self, sequences: int, seconds: float, step: float, passes: float, won: float) -> None:
        """One or some of so many sequences took `seconds` without the layer's `passes`, and one takes `step`; its
        tokens saved `won`. Loads are 1 sequence, 2 to 3, 4 to 7 and so on. Of many sequences chance decides less, so
        4 of them may lose as much as two steps take, and 16 as one."""
        self._load = load = self._of(sequences)
        due = self._owed / _SPREAD
        self._owed -= due
        load.note(seconds, _STEPS * step / math.sqrt(max(sequences, 1)), passes, won - due)

    def note_prompts(self, passes: float, won: float) -> None:
        """The same of a step that computed prompts, too."""
        self._owed += passes - won

    def _of(self, sequences: int) -> _Load:
        return self._loads.setdefault(sequences.bit_length(), _Load())
