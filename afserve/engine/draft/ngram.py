"""Drafts from the request itself: what followed the same last tokens before (prompt lookup decoding, A. Saxena 2023).

Of the longest run of last tokens that stood before, the newest place counts: its continuation is the draft.
"""

from afserve.drafts import NgramOptions
from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.draft.own_text import OwnTexts
from afserve.engine.scheduling.sequence import Sequence

_LENGTHS = NgramOptions()
# By the length of the run, the last of all longer ones; the price calibrates it.
_CONFIDENCE = (0.3, 0.5, 0.7, 0.85)


class NgramDrafter:
    name = "ngram"

    def __init__(self, lengths: NgramOptions = _LENGTHS) -> None:
        self._lengths = lengths
        self._own = OwnTexts()

    def guess(self, sequence: Sequence, most: int) -> Draft:
        places, (length, found) = self._own.find(sequence, self._lengths.longest)
        if not found or length < self._lengths.shortest:
            return NO_DRAFT
        following = places.behind(found[0], most)
        return Draft(following, [_CONFIDENCE[min(length, len(_CONFIDENCE)) - 1]] * len(following))

    def forget(self, sequence: Sequence) -> None:
        self._own.forget(sequence)
