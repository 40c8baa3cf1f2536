"""Which cases of a test with several parameters are run by day, where it is marked `by_day(1)` or `by_day(every=3)`.

`by_day(2)`: each value of one parameter meets each value of any other. What takes two values to break is broken by one
of these cases. `by_day(1)`: each value is there, and values of the longest lists meet those of others in turn.
`by_day(every=3)`: each third case, where cases are alike: seeds, families whose tokens other tests compare, texts.
All are run by night: the rest is `long`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import combinations

import pytest

_Value = tuple[int, str]  # which list of parameters, and the name of a value in it


def leave_the_rest_to_the_night(test: pytest.Metafunc) -> None:
    """Of a test that is marked so, the cases that `covering` does not name become `long`."""
    marked = test.definition.get_closest_marker("by_day")
    if marked is None:
        return
    kept = set(_kept(test, *marked.args, **marked.kwargs))
    for number, case in enumerate(test._calls):
        if number not in kept:
            case.marks.append(pytest.mark.long.mark)


def _kept(test: pytest.Metafunc, together: int | None = None, every: int | None = None) -> Sequence[int]:
    cases = [case._idlist for case in test._calls]
    if every is None:
        assert together is not None, "by_day(1), by_day(2) or by_day(every=2)"
        return covering(cases, together)
    assert together is None and all(len(case) == 1 for case in cases), (
        f"{test.definition.nodeid}: by_day(every) is for one list of parameters: a value of another might be left out"
    )
    return range(0, len(cases), every)


def make_none_of_the_night(test: pytest.Metafunc) -> None:
    """By day no item is made of a case that is `long`: of two cases in five. A test that has no other case keeps one,
    which is left out as all that is marked so."""
    own = test.definition.get_closest_marker("long")
    by_day = [case for case in test._calls if all(mark.name != "long" for mark in case.marks)]
    test._calls = (by_day if own is None else []) or test._calls[:1]


def seeds(count: int) -> list[object]:
    """For a test of seeded cases: a tenth of them by day, and six at least, as of drawn examples; all by night."""
    few = max(6, count // 10)
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(few, count))]


def halves(values: Iterable[str]) -> list[object]:
    """Each second value by day, all by night: for one list of several, as of families that other tests compare."""
    long = pytest.mark.long
    return [pytest.param(value, marks=long) if number % 2 else value for number, value in enumerate(values)]


def covering(cases: Sequence[Sequence[str]], together: int) -> list[int]:
    """Numbers of the cases to run: of each so many values that meet in some case, one where they do; the first always.

    A case is a name of a value of each list of parameters. Each next case is the one that has the most to show that is
    new, and of several the one whose values were shown least.
    """
    values = [list(enumerate(case)) for case in cases]
    shown = [set(combinations(case, min(together, len(case)))) for case in values]
    left: set[tuple[_Value, ...]] = set().union(*shown)
    uses: Counter[_Value] = Counter()

    def rank(number: int) -> tuple[int, int, int]:
        """Least is best; it never becomes less."""
        return -len(shown[number] & left), sum(uses[value] for value in values[number]), number

    ranks = [rank(number) for number in range(len(cases))]
    heapify(ranks)
    kept: list[int] = []
    best = 0
    while left:
        kept.append(best)
        left -= shown[best]
        uses.update(values[best])
        while (now := rank(ranks[0][2])) > ranks[0]:
            heapreplace(ranks, now)
        best = ranks[0][2]
    return sorted(kept)
