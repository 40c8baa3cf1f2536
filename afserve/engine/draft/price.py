"""How many tokens of a draft are worth their rows in the next step."""

from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from afserve.engine.draft.drafter import expected_right


class Candidate(NamedTuple):
    """A draft that could be verified: of which sequence, whose, and how likely each token is right where those before
    it are."""

    order: int
    drafter: str
    confidence: Many[float]


class Verified(NamedTuple):
    """Of one draft: so many rows, and how many of these tokens were right. `instead`: so many would have been right of
    what somebody else guessed, who costs nothing."""

    drafter: str
    rows: int
    right: int
    instead: int = 0


class RanStep(NamedTuple):
    """A step as it was measured: its rows, `drafted` of them drafts', and from its plan to its tokens the seconds.

    `pool`: rows of others that were in the experts' calls beside its own, in the mean over layers. `touched`: distinct
    experts of one layer that its rows chose; None where nobody counted. `mixed`: some rows were prompts'. `passes`:
    seconds of a layer that guessed behind it, which are not in `seconds`. `asking`: of whoever looked at it, searches
    apart. `rested_seconds`: of the steps before it that nobody looked at."""

    rows: int
    drafted: int
    seconds: float
    pool: float = 0.0
    touched: int | None = None
    mixed: bool = False
    passes: float = 0.0
    asking: float = 0.0
    verified: Many[Verified] = ()
    rested_seconds: float = 0.0


class DraftPrice(Protocol):
    """Decides before each step of a micro-batch and is told afterwards what came of it."""

    @property
    def rest(self) -> int:
        """Steps that nobody is asked before, where nothing paid."""

    def whom_to_search(self, orders: Many[int]) -> set[int]:
        """Of the sequences of the next step those whose texts are worth a search."""

    def search_took(self, order: int, seconds: float) -> None:
        """One of them was searched."""

    def expected(self, candidate: Candidate) -> float:
        """How many of its tokens are right, to compare candidates of one sequence by."""

    def lengths(self, rows: int, room: int, candidates: Many[Candidate]) -> list[int]:
        """How much of each is verified. The step has `rows` tokens without them, and `room` for so many in all."""

    def confirmed(self, candidate: Candidate, tried: int, right: int) -> None:
        """Of its first `tried` tokens, verified or not, the first `right` came; at most one that did not is known."""

    def step_measured(self, step: RanStep) -> None:
        """A step is over."""

    def sequence_ended(self, order: int) -> None:
        """A sequence has ended; one that was never a candidate's is no error."""


class FixedPrice:
    """`--draft METHOD:N`: all that was guessed. It learns nothing."""

    rest = 0

    def expected(self, candidate: Candidate) -> float:
        return expected_right(candidate.confidence)

    def whom_to_search(self, orders: Many[int]) -> set[int]:
        return {*orders}

    def search_took(self, order: int, seconds: float) -> None:
        """Nothing to learn."""

    def lengths(self, rows: int, room: int, candidates: Many[Candidate]) -> list[int]:
        return [len(candidate.confidence) for candidate in candidates]

    def confirmed(self, candidate: Candidate, tried: int, right: int) -> None:
        """Nothing to learn."""

    def step_measured(self, step: RanStep) -> None:
        """Nothing to learn."""

    def sequence_ended(self, order: int) -> None:
        """Nothing is kept."""
