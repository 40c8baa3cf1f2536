"""Which cases of a test with several parameters are run by day, where it is marked `by_day(1)` or `by_day(2)`.

`by_day(2)`: each value of one parameter meets each value of any other. What takes two values to break is broken by one
of these cases. `by_day(1)`: each value is there, and values of the longest lists meet those of others in turn.
All combinations are run by night: the rest is `long`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

_Value = tuple[int, str]  # which list of parameters, and the name of a value in it


def leave_the_rest_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Of tests that are marked so, the cases that `covering` does not name become `long`."""
    tests: dict[tuple[object, str], list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("by_day") and hasattr(item, "callspec"):
            tests[item.parent, getattr(item, "originalname", "")].append(item)
    for cases in tests.values():
        (together,) = cases[0].get_closest_marker("by_day").args
        kept = set(covering([case.callspec._idlist for case in cases], together))
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.long)


def covering(cases: Sequence[Sequence[str]], together: int) -> list[int]:
    """Numbers of the cases to run: of each so many values that meet in some case, one where they do; the first always.

    A case is a name of a value of each list of parameters. Each next case is the one that has the most to show that is
    new, and of several the one whose values were shown least.
    """
    values = [list(enumerate(case)) for case in cases]
    shown = [set(combinations(case, min(together, len(case)))) for case in values]
    left: set[tuple[_Value, ...]] = set().union(*shown)
    uses: Counter[_Value] = Counter()
    kept: list[int] = []
    best = 0
    while left:
        kept.append(best)
        left -= shown[best]
        uses.update(values[best])
        best = max(
            range(len(cases)),
            key=lambda number: (
                len(shown[number] & left),
                -sum(uses[value] for value in values[number]),
                -number,
            ),
        )
    return sorted(kept)
