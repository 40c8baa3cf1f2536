"""Drafts from the request itself: what followed the same last tokens before (prompt lookup decoding, A. Saxena 2023).

Of the longest run of last tokens that stood before, the newest place counts: its continuation is the draft.
"""

from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.draft.own_text import OwnTexts
from afserve.engine.scheduling.sequence import Sequence

LONGEST = 4  # tokens of a run that is looked for
_CONFIDENCE = {2: 0.5, 3: 0.7, 4: 0.85}  # by the length of the run; the price calibrates it


class NgramDrafter:
    name = "ngram"

    def __init__(self) -> None:
        self._own = OwnTexts()

    def guess(self, sequence: Sequence, most: int) -> Draft:
        places, (length, found) = self._own.find(sequence, LONGEST)
        if not found:
            return NO_DRAFT
        following = places.behind(found[0], most)
        return Draft(following, [_CONFIDENCE[length]] * len(following))

    def forget(self, sequence: Sequence) -> None:
        self._own.forget(sequence)
