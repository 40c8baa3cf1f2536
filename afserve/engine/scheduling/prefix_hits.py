"""Counts of prompts whose beginning was found, and in which tier. It knows no blocks but their number."""

from collections import Counter
from collections.abc import Mapping

from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.stats import PEER


class PrefixHits:
    """All in tokens: of `queries` those of `hits` were found, in the cache where they are not of a tier."""

    def __init__(self) -> None:
        self.queries = self.hits = 0
        self.by_tier: Counter[str] = Counter()

    def count(self, sequence: Sequence, restored: Mapping[str, int]) -> None:
        """One that enters for the first time, with the tokens that a tier restored. A prompt that is computed for
        another node counts there, and one that nobody waits for nowhere."""
        if sequence.request.wants_row or sequence.request.ahead:
            return
        self.queries += len(sequence.tokens)
        self.hits += sequence.cached_tokens
        self.by_tier[PEER] += min(sequence.request.from_peer, sequence.cached_tokens)
        self.by_tier.update(restored)
