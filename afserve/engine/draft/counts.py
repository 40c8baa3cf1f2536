"""What came of drafts, counted by drafter and by position, as a node tells it."""

from dataclasses import fields

from afserve.drafts import DRAFT_TOKENS
from afserve.engine.stats.drafts import AcceptedByPosition, DrafterStats, DraftStats, StatsByDrafter

NAMES = tuple(each.name for each in fields(StatsByDrafter))
"""Of drafters that are counted apart."""


class DraftCounts:
    def __init__(self) -> None:
        self._all = [0, 0, 0]  # drafts, their tokens, those that were right
        self._by_drafter = {name: [0, 0, 0] for name in NAMES}
        self._by_position = [0] * int(DRAFT_TOKENS.high)

    def verified(self, drafter: str, length: int, right: int) -> None:
        """Of a draft of `length` tokens the first `right` were right."""
        for counts in (self._all, self._by_drafter.get(drafter, [0, 0, 0])):
            counts[0] += 1
            counts[1] += length
            counts[2] += right
        for position in range(right):
            self._by_position[position] += 1

    def stats(self) -> DraftStats:
        positions = AcceptedByPosition(*self._by_position)
        by_drafter = StatsByDrafter(**{n: DrafterStats(*of) for n, of in self._by_drafter.items()})
        drafts, tokens, accepted = self._all
        return DraftStats(drafts, tokens, accepted, positions, by_drafter)
