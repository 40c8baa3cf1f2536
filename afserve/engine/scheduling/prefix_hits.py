"""Counts of prompts whose beginning was found, and in which tier. It knows no blocks but their number."""

from collections.abc import Mapping

from afserve.engine.kv.tiers import DISK, HOST
from afserve.engine.scheduling.found_below import NONE_BELOW, FoundBelow
from afserve.engine.scheduling.sequence import Sequence


class PrefixHits:
    """All in tokens: of `queries` those of `hits` were found, in the cache where they were not `below` it."""

    def __init__(self) -> None:
        self.queries = self.hits = 0
        self.below = NONE_BELOW

    def count(self, sequence: Sequence, restored: Mapping[str, int]) -> None:
        """One that enters for the first time, with the tokens that a tier restored: it has where it was found from then
        on. A prompt that is computed for another node counts there, and one that nobody waits for nowhere."""
        asked, found = sequence.request, sequence.cached_tokens
        below = FoundBelow(min(asked.from_peer, found), restored.get(HOST, 0), restored.get(DISK, 0))
        sequence.found_below = below
        if asked.wants_row or asked.ahead:
            return
        self.queries += len(sequence.tokens)
        self.hits += found
        self.below = self.below.plus(below)
