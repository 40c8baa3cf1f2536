"""Drafts of answers that are known, each token right as often as is wished: what tests and benchmarks draft with.

Tokens stay those of the model, whatever is wished.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Many

from afserve.engine.draft.drafter import Draft
from afserve.engine.scheduling.sequence import Sequence


class KnownAnswers:
    """`answer_of` says the whole answer of a request, or as much of it as is known. Of the tokens of a draft each is
    right with the probability `right`, where those before it are."""

    name = "known"

    def __init__(self, answer_of: Callable[[Sequence], Many[int]], right: float, seed: int = 0) -> None:
        self._answer_of, self._right = answer_of, right
        self._random = random.Random(seed)

    def guess(self, sequence: Sequence, most: int) -> Draft:
        known = self._answer_of(sequence)[sequence.output_length :][:most]
        tokens = [token if self._random.random() < self._right else abs(token - 1) for token in known]
        return Draft(tokens, [self._right] * len(tokens))

    def forget(self, sequence: Sequence) -> None:
        """It keeps nothing."""
