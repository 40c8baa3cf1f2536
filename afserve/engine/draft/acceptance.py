"""How likely guessed tokens are right: what drafters say of themselves, corrected by what came. It knows no rows.

A drafter's word is one of eleven (0.0, 0.1 ... 1.0) at the first, second or a later token; for each the share that was
right counts. A sequence that does better or worse than these has its odds multiplied.
"""

from dataclasses import dataclass

from afserve.engine.draft.price import Candidate

_BELIEVED = 4.0  # tokens of experience that a drafter's own word counts as
_MEMORY = 0.995  # what a tried token leaves of the experience before it, over all sequences
_RECENT = 0.98  # the same of one sequence
_DOUBT = 4.0  # tokens of experience of a sequence by which its odds stay near those of others
_CERTAIN = 0.98  # nobody is believed to know better
_UNLIKELY = 0.02  # tokens behind so little hope are not looked at


@dataclass(slots=True)
class _Experience:
    right: float = 0.0
    tried: float = 0.0

    def count_token(self, right: bool) -> None:
        self.right = self.right * _MEMORY + right
        self.tried = self.tried * _MEMORY + 1.0


@dataclass(slots=True)
class _Trend:
    """Of one sequence: tokens that were right and wrong, and how many of each were expected."""

    right: float = 0.0
    wrong: float = 0.0
    expected: float = 0.0
    feared: float = 0.0

    def count_token(self, plain: float, right: bool) -> None:
        """One that was expected to be right with the chance `plain`."""
        self.right = self.right * _RECENT + right
        self.wrong = self.wrong * _RECENT + (not right)
        self.expected = self.expected * _RECENT + plain
        self.feared = self.feared * _RECENT + 1.0 - plain

    @property
    def odds(self) -> float:
        up = (self.right + _DOUBT) / (self.expected + _DOUBT)
        return up * (self.feared + _DOUBT) / (self.wrong + _DOUBT)


class Acceptance:
    def __init__(self) -> None:
        self._words: dict[tuple[str, int, int], _Experience] = {}
        self._trends: dict[int, _Trend] = {}

    def survival(self, candidate: Candidate) -> list[float]:
        """For its tokens, up to the last with hope, how likely it and all before it are right. Raises ValueError for a
        confidence that is no probability."""
        order, drafter, confidence = candidate
        trend = self._trends.get(order)
        odds, chance, found = 1.0 if trend is None else trend.odds, 1.0, []
        for position, said in enumerate(confidence):
            if not 0.0 <= said <= 1.0:  # nor is what is no number
                raise ValueError(f"a draft's confidence is {said!r}, not a probability from 0 to 1")
            plain = self._plain(drafter, position, said)
            chance *= plain * odds / (1.0 - plain + plain * odds)
            if chance < _UNLIKELY:
                break
            found.append(chance)
        return found

    def learn_outcome(self, candidate: Candidate, tried: int, right: int) -> None:
        """As `DraftPrice.confirmed`."""
        trend = self._trends.setdefault(candidate.order, _Trend())
        for position in range(tried):
            said, came = candidate.confidence[position], position < right
            trend.count_token(self._plain(candidate.drafter, position, said), came)
            self._words.setdefault(_word(candidate.drafter, position, said), _Experience()).count_token(came)

    def drop_trend(self, order: int) -> None:
        self._trends.pop(order, None)

    def _plain(self, drafter: str, position: int, said: float) -> float:
        """Of sequences that are like all."""
        word = _CERTAIN if said > _CERTAIN else said if said > 1.0 - _CERTAIN else 1.0 - _CERTAIN
        known = self._words.get((drafter, position if position < 2 else 2, int(said * 10.0)))
        return word if known is None else (known.right + _BELIEVED * word) / (known.tried + _BELIEVED)


def _word(drafter: str, position: int, said: float) -> tuple[str, int, int]:
    return drafter, min(position, 2), int(said * 10.0)
