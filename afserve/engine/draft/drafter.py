"""The contract of those who guess what follows a sequence. A guess costs rows of the next step and changes no token."""

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import NamedTuple, Protocol

from afserve.drafts import BESIDE
from afserve.engine.scheduling.sequence import Sequence


class Draft(NamedTuple):
    """`tokens` that may follow, and for each how likely it is right where all before it are, from 0 to 1, as its
    drafter has it: the price calibrates that by what was accepted."""

    tokens: Many[int]
    confidence: Many[float]


NO_DRAFT = Draft((), ())
SEARCHERS = frozenset({"ngram", "suffix"})
"""Who reads a sequence's text to guess."""
LAYERS = frozenset({"mtp", *(method.value for method in BESIDE)})
"""Who guesses behind each step."""


def expected_right(confidence: Many[float]) -> float:
    """How many tokens of a draft are right: 0.9 and 0.5 make 0.9 + 0.45."""
    alive = accumulate(confidence, lambda before, one: before * one)
    return float(sum(alive))


class Drafter(Protocol):
    """Asked between two steps, on the thread that steps its node. Integers only."""

    name: str

    def guess(self, sequence: Sequence, most: int) -> Draft:
        """What may follow `sequence.tokens`, at most `most` tokens; NO_DRAFT where there is no idea."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or left the node's running sequences; one that was never asked about is no error."""
