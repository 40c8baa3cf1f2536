"""Whom to ask for a guess: to ask costs time too, and of most texts nothing comes. Integers and seconds in, orders out.

A sequence of whose last guesses none was verified rests. Those that rest are asked in turn, as often as it takes a
hundredth of the time; so a text that begins to repeat is noticed some steps late, and one that never does costs nearly
nothing.
"""

from collections.abc import Sequence as Many

from afserve.engine.stats import smoothed

_PATIENCE = 6  # guesses in a row that were not verified
_SHARE = 0.01  # of the time
_SAVED = 8.0  # steps' shares that are kept for later
_LATELY = 0.1  # weight of the newest guesses
_UNUSUAL = 4.0  # times as long as the others: something else was in it


class GuessBudget:
    def __init__(self) -> None:
        self._vain: dict[int, int] = {}  # by order: guesses in a row that were not verified
        self._last: dict[int, int] = {}  # by order: when it was asked
        self._number = 0
        self._seconds = 0.0  # of asking for one guess
        self._saved = 0.0  # seconds

    def choose(self, orders: Many[int], step_seconds: float) -> set[int]:
        """Before a step that takes about so long."""
        self._number += 1
        rest = [order for order in orders if self._vain.get(order, 0) >= _PATIENCE]
        share = _SHARE * step_seconds
        self._saved = min(self._saved + share, max(_SAVED * share, self._seconds))
        count = len(rest)
        if rest and self._seconds > 0.0:
            count = min(count, int(self._saved / self._seconds))
            rest.sort(key=lambda order: self._last.get(order, 0))
            self._saved -= count * self._seconds
        chosen = {*orders} - {*rest[count:]}
        for order in chosen:
            self._last[order], self._vain[order] = self._number, self._vain.get(order, 0) + 1
        return chosen

    def guesses_took(self, count: int, seconds: float) -> None:
        each = seconds / count if count else 0.0
        if each > 0.0:
            most = _UNUSUAL * self._seconds if self._seconds else each
            self._seconds = smoothed(self._seconds, min(each, most), _LATELY)

    def paid(self, order: int) -> None:
        """Its guess is verified because it pays."""
        self._vain[order] = 0

    def drop_order(self, order: int) -> None:
        self._vain.pop(order, None)
        self._last.pop(order, None)
