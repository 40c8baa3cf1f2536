"""Drafts of grammars: what they allow nothing else than, such as the names of a schema. They cost no look-up."""

from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.scheduling.sequence import Sequence
from afserve.errors import RequestError

_CONFIDENCE = 0.95  # the text is certain, which tokens spell it is not


class ForcedDrafter:
    name = "forced"

    def guess(self, sequence: Sequence, most: int) -> Draft:
        guide = sequence.guide
        if guide is None:
            return NO_DRAFT
        try:
            tokens = guide.forced(sequence.tokens, sequence.prompt_length)[:most]
        except RequestError:  # the row that is drawn next tells why
            return NO_DRAFT
        return Draft(tokens, [_CONFIDENCE] * len(tokens))

    def forget(self, sequence: Sequence) -> None:
        """It keeps nothing."""
