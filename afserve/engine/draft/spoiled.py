"""Drafts that are right as often as a benchmark wants: what another drafter guesses, with a wrong token put in.

Answers stay what they are, as with any draft. It reaches what is asked for where the guesses are right: a benchmark
sends the answers, from a run without drafts, as `prediction`.
"""

from collections.abc import Sequence as Many
from random import Random

from afserve.engine.draft.drafter import Draft, Drafter
from afserve.engine.scheduling.sequence import Sequence


class SpoiledDrafter:
    """`rates`: how often the first, the first two, ... tokens stay as they were guessed."""

    def __init__(self, inner: Drafter, rates: Many[float]) -> None:
        self.name = inner.name
        self._inner, self._rates, self._random = inner, rates, Random(0)

    def guess(self, sequence: Sequence, most: int) -> Draft:
        tokens, confidence = self._inner.guess(sequence, most)
        drawn = self._random.random()
        right = sum(drawn < rate for rate in self._rates)
        if right >= len(tokens):
            return Draft(tokens, confidence)
        other = tokens[right] - 1 if tokens[right] else 1
        return Draft([*tokens[:right], other, *tokens[right + 1 :]], confidence)

    def forget(self, sequence: Sequence) -> None:
        self._inner.forget(sequence)
