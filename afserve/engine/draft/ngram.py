"""Drafts from the request itself: what followed the same last tokens before (prompt lookup decoding, A. Saxena 2023).

Of the longest run of last tokens that stood before, the newest place counts: its continuation is the draft.
"""

from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.scheduling.sequence import Sequence

LONGEST = 4  # tokens of a run that is looked for
SHORTEST = 2
_CONFIDENCE = {2: 0.5, 3: 0.7, 4: 0.85}  # by the length of the run; the price calibrates it


class _Index:
    """For each run of `SHORTEST` to `LONGEST` tokens where it last ended, and before that."""

    def __init__(self) -> None:
        self.known = 0
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def read(self, tokens: list[int]) -> None:
        ends = self._ends
        for end in range(self.known + 1, len(tokens) + 1):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                run = tuple(tokens[end - length : end])
                ends[run] = end, ends.get(run, (0, 0))[0]
        self.known = len(tokens)

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """Where the longest of the last runs ended before, and its length; 0 and 0 where none did."""
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            newest, before = self._ends[tuple(tokens[-length:])]
            end = before if newest == len(tokens) else newest
            if end:
                return end, length
        return 0, 0


class NgramDrafter:
    name = "ngram"

    def __init__(self) -> None:
        self._by_order: dict[int, _Index] = {}

    def guess(self, sequence: Sequence, most: int) -> Draft:
        tokens = sequence.tokens
        index = self._by_order.get(sequence.order)
        if index is None:
            index = self._by_order[sequence.order] = _Index()
        index.read(tokens)
        end, length = index.find(tokens)
        if not end:
            return NO_DRAFT
        following = tokens[end : end + most]
        return Draft(following, [_CONFIDENCE[length]] * len(following))

    def forget(self, sequence: Sequence) -> None:
        self._by_order.pop(sequence.order, None)
