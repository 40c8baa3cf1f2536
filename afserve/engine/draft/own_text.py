"""The text of each running request, found in itself: read in pieces, so that no prompt stalls a step."""

from afserve.engine.draft.places import DEPTH, Found, GramPlaces
from afserve.engine.scheduling.sequence import Sequence

PIECE = 2048  # tokens that are read in one step of a sequence, one or two milliseconds
MOST = 1 << 17  # of one sequence, the last ones: 4 MiB
_LEAST = 1 << 10


class OwnTexts:
    """A sequence's tokens are read where they are; it takes 32 to 64 bytes for each of at most MOST of them."""

    def __init__(self) -> None:
        self._by_order: dict[int, GramPlaces] = {}

    def find(self, sequence: Sequence, depth: int = DEPTH) -> tuple[GramPlaces, Found]:
        places, length = self._by_order.get(sequence.order), len(sequence.tokens)
        if places is None or places.size < min(length, MOST):
            size = min(max(length + _LEAST // 2, _LEAST), MOST)
            places = self._by_order[sequence.order] = GramPlaces(sequence.tokens, size, max(0, length - MOST))
        places.read(PIECE)
        return places, places.find(sequence.tokens[-depth:])

    def forget(self, sequence: Sequence) -> None:
        self._by_order.pop(sequence.order, None)
