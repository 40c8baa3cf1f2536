"""How many tokens of a draft are worth their rows in the next step."""

from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol


class Candidate(NamedTuple):
    """A draft that could be verified: whose, and how likely each token is right where those before it are."""

    drafter: str
    confidence: Many[float]


class DraftPrice(Protocol):
    """Decides before each step of a micro-batch and is told afterwards what came of it."""

    def lengths(self, rows: int, candidates: Many[Candidate]) -> list[int]:
        """How much of each is verified. The step has `rows` tokens without them."""

    def confirmed(self, candidate: Candidate, length: int, right: int) -> None:
        """Of `length` tokens that were verified the first `right` were right."""


class FixedPrice:
    """`--draft METHOD:N`: all that was guessed."""

    def lengths(self, rows: int, candidates: Many[Candidate]) -> list[int]:
        return [len(candidate.confidence) for candidate in candidates]

    def confirmed(self, candidate: Candidate, length: int, right: int) -> None:
        """It learns nothing."""
