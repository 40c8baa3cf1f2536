"""Whose text is searched before a step: a search costs time, and of most texts nothing comes. Integers and seconds in.

Those of whom a guess was right lately are searched in each step, as long as that pays. The others, new ones first, take
turns within an allowance, which has the time of reading their texts, too; so a text that begins to repeat is noticed
some steps late, and one that never does costs nearly nothing. A part of what was won allows more turns. Before steps
that nothing is affordable for nobody is asked: asking takes time, too.
"""

from collections.abc import Sequence as Many

from afserve.engine.draft.allowance import Allowance
from afserve.engine.stats import smoothed

_TURNS, _PAYING = 0.005, 0.0025  # of the time
_KEPT = 4.0  # steps
_PATIENCE = 6  # searches of a sequence in a row of which nothing was right
_TURN = 8  # sequences that are searched in one turn, or all: choosing them takes time too
_LATELY = 0.1  # weight of the newest searches
_FOR_TURNS = 0.25  # of what was won; the rest is for those that it was won of
_REST, _LONGEST = 6, 64  # steps; even, so that each of two micro-batches has its turn


class SearchTurns:
    def __init__(self) -> None:
        self._turns, self._paying = Allowance(_TURNS), Allowance(_PAYING)
        self._hope: dict[int, int] = {}  # by order: searches that it has in any case
        self._last: dict[int, int] = {}  # by order: its last turn
        self._turn = 0
        self._rests = True  # the next steps may go without: it paid of nobody, and turns have to be saved for
        self._pays = False  # whether it did of somebody when it was chosen last
        self._each = 0.0  # seconds of one in a turn, lately
        self._step = 0.0  # seconds of a step

    def choose(self, orders: Many[int]) -> set[int]:
        paying = {order for order in orders if self._hope.get(order, 0) > 0}
        rest = [order for order in orders if order not in paying]
        chosen = paying if self._paying.saved >= 0.0 else set()
        self._pays = bool(chosen)
        self._rests = not chosen and self._turns.saved < self._turns.most / 2.0
        for order in chosen:
            self._hope[order] -= 1
        for order in rest:
            self._hope.pop(order, None)
        if count := self._affordable(len(rest)):
            self._turn += 1
            rest.sort(key=lambda order: self._last.get(order, 0))
            for order in rest[:count]:
                self._last[order] = self._turn
            chosen.update(rest[:count])
        return chosen

    def _affordable(self, count: int) -> int:
        """Of so many that want a turn."""
        if not self._each:  # the first one says what they take
            return min(count, 1)
        paid = int(self._turns.saved / self._each)
        if self._turns.full:
            return min(count, max(paid, 1))
        return min(count, paid) if paid >= min(count, _TURN) else 0

    def took(self, order: int, seconds: float) -> None:
        """Its search. Whoever else had the processor meanwhile is not counted beyond what is kept at most."""
        allowance = self._paying if order in self._hope else self._turns
        allowance.spend(min(seconds, allowance.most))
        if allowance is self._turns and seconds > 0.0:
            self._each = smoothed(self._each, seconds, _LATELY)

    def asking_took(self, seconds: float) -> None:
        """All that is done before and behind a step that is looked at, searches apart."""
        allowance = self._paying if self._pays else self._turns
        allowance.spend(min(seconds, allowance.most))

    def pass_time(self, seconds: float, step: float, won: float) -> None:
        """A step takes `step` of them; what was searched for won so many, below 0 where it lost."""
        shared = _FOR_TURNS * max(won, 0.0)
        self._step = step
        self._turns.pass_time(seconds, _KEPT * step, shared)
        self._paying.pass_time(seconds, _KEPT * step, won - shared)

    @property
    def rest(self) -> int:
        """Steps that may go by until turns are worth asking for."""
        if not self._rests:
            return 0
        missing = self._turns.most / 2.0 - self._turns.saved
        steps = missing / (_TURNS * self._step) if self._step else 0.0
        return int(min(max(steps, _REST), _LONGEST)) // 2 * 2

    def paid(self, order: int) -> None:
        """What was found was right."""
        self._hope[order] = _PATIENCE

    def drop_order(self, order: int) -> None:
        self._hope.pop(order, None)
        self._last.pop(order, None)
