"""Answers that a node gave before, found by their tokens: each for those of its own tenant and cache salt alone."""

from collections import OrderedDict

from afserve.engine.draft.places import DEPTH, Found, GramPlaces
from afserve.engine.scheduling.request import ANSWER
from afserve.engine.scheduling.sequence import Sequence

CACHED = 1 << 18  # tokens of all tenants, the newest: 25 MiB
_PIECE = 512  # of them that are read with each guess, 0.4 ms
_OWNERS = 10_000
END = -1  # of an answer: no token follows it
_ID_BITS = 32


class EarlierAnswers:
    """One text of all. A token in it has its owner's number in front, so nobody's tokens are like another's.
    A number is given once: what an owner had who was forgotten is found by nobody."""

    def __init__(self, cached: int = CACHED) -> None:
        self._tokens: list[int] = []
        self._places = GramPlaces(self._tokens, cached)
        # by owner; the one seen last at the end
        self._numbers: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._owners = 0

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.purpose is not ANSWER or request.params.pooled or sequence.output_length == 0:
            return
        owner = request.tenant.name, request.cache_salt
        if owner not in self._numbers:
            self._owners += 1
            self._numbers[owner] = self._owners
            if len(self._numbers) > _OWNERS:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(owner)
        tag = self._numbers[owner] << _ID_BITS
        self._tokens += [tag | token for token in sequence.output_ids]
        self._tokens.append(END)
        self._places.trim()

    def find(self, sequence: Sequence) -> tuple[GramPlaces, Found]:
        request = sequence.request
        number = self._numbers.get((request.tenant.name, request.cache_salt))
        self._places.read(_PIECE)
        if number is None:
            return self._places, (0, [])
        tag = number << _ID_BITS
        return self._places, self._places.find([tag | token for token in sequence.tokens[-DEPTH:]])


def token_of(kept: int) -> int:
    """Without its owner."""
    return kept & (1 << _ID_BITS) - 1
