"""Drafts from what the client expects as the answer (OpenAI's `prediction`): an old file of which little changes.

The answer is followed through the expected text. Where both part, it goes on behind the next place at which the last
tokens of the answer stand, and before that behind the nearest one.
"""

from bisect import bisect_left

from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.scheduling.sequence import Sequence

PREDICTION = "prediction"
_RUN = 3  # tokens that must agree where both go on together
_PIECE = 4096  # expected tokens that are looked into before a step, a millisecond
_SURE, _UNSURE = 0.95, 0.6  # behind many tokens that were right, and behind the first of a run
_LONG = 16


class PredictionDrafter:
    name = PREDICTION

    def __init__(self) -> None:
        self._by_order: dict[int, _Follower] = {}

    def guess(self, sequence: Sequence, most: int) -> Draft:
        if not sequence.request.prediction:
            return NO_DRAFT
        follower = self._by_order.get(sequence.order)
        if follower is None:
            follower = self._by_order[sequence.order] = _Follower(sequence.request.prediction)
        return follower.follow(sequence.tokens, sequence.prompt_length, most)

    def forget(self, sequence: Sequence) -> None:
        self._by_order.pop(sequence.order, None)


class _Follower:
    """Of one sequence. It takes some 100 bytes for a token that is expected, once the answer has left it."""

    def __init__(self, expected: tuple[int, ...]) -> None:
        self._expected = expected
        self._at: int | None = 0  # of the token that is expected next
        self._left = 0  # where both parted
        self._agreed = 0  # tokens since they went on together
        self._read = 0  # tokens of the answer
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._indexed = _RUN  # tokens that are expected, as far as places are known

    def follow(self, tokens: list[int], start: int, most: int) -> Draft:
        """`tokens` from `start` on are the answer."""
        for index in range(start + self._read, len(tokens)):
            self._pass(tokens[index])
        self._read = len(tokens) - start
        if self._at is None:
            self._find(tuple(tokens[max(start, len(tokens) - _RUN) :]))
        if self._at is None:
            return NO_DRAFT
        following = self._expected[self._at : self._at + most]
        sure = _UNSURE + (_SURE - _UNSURE) * min(self._agreed, _LONG) / _LONG
        return Draft(following, [sure] * len(following))

    def _pass(self, token: int) -> None:
        at = self._at
        if at is None:
            return
        if at < len(self._expected) and self._expected[at] == token:
            self._at, self._agreed = at + 1, self._agreed + 1
        else:
            self._at, self._left, self._agreed = None, at, 0

    def _find(self, last: tuple[int, ...]) -> None:
        """A place behind which the answer may go on."""
        stop = min(self._indexed + _PIECE, len(self._expected))
        for end in range(self._indexed, stop):
            self._places.setdefault(self._expected[end - _RUN : end], []).append(end)
        self._indexed = max(self._indexed, stop)
        if ends := self._places.get(last):
            index = bisect_left(ends, self._left)
            self._at = ends[index] if index < len(ends) else ends[-1]
