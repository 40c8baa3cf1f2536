"""What is left to the night: by day each value of a parameter is there, or meets each value of any other."""

from collections import Counter
from itertools import combinations, product
from types import SimpleNamespace
from typing import cast

import pytest

from tests.by_day import covering, leave_the_rest_to_the_night, make_none_of_the_night, seeds
from tests.conftest import has_none_quick


def combined(*sizes: int) -> list[list[str]]:
    return [list(names) for names in product(*(map(str, range(size)) for size in sizes))]


@pytest.mark.parametrize(
    ("sizes", "most"), [((7, 5, 2, 3, 3), 44), ((2, 2, 2), 6), ((4, 1, 1), 4), ((6, 6), 36), ((5,), 5)]
)
def test_each_two_values_meet(sizes: tuple[int, ...], most: int) -> None:
    cases = combined(*sizes)
    kept = covering(cases, 2)
    assert kept == sorted(set(kept)) and kept[0] == 0 and len(kept) <= most
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    assert set().union(*(pairs[number] for number in kept)) == set().union(*pairs)


def test_each_value_is_there_and_those_of_shorter_lists_take_turns() -> None:
    cases = combined(12, 3, 2)
    kept = [cases[number] for number in covering(cases, 1)]
    assert [case[0] for case in kept] == [str(value) for value in range(12)]
    assert sorted(Counter(case[1] for case in kept).values()) == [4, 4, 4]
    assert sorted(Counter(case[2] for case in kept).values()) == [6, 6]


def test_values_that_never_meet_are_not_looked_for() -> None:
    """As where a case was taken out."""
    cases = [["a", "b"], ["c", "d"], ["c", "d"]]
    assert covering(cases, 1) == covering(cases, 2) == [0, 1]


class Case:
    """As pytest's case of a test before there is an item."""

    def __init__(self, values: list[str], *marks: pytest.MarkDecorator) -> None:
        self._idlist, self.marks = values, [mark.mark for mark in marks]

    @property
    def long(self) -> bool:
        return any(mark.name == "long" for mark in self.marks)


class Cases:
    """As pytest's `Metafunc`."""

    def __init__(self, cases: list[Case], *marks: pytest.MarkDecorator) -> None:
        self._calls = cases
        named = {mark.name: mark.mark for mark in marks}
        self.definition = SimpleNamespace(get_closest_marker=named.get, nodeid="test_a")

    def by_day(self) -> list[Case]:
        leave_the_rest_to_the_night(cast(pytest.Metafunc, self))
        make_none_of_the_night(cast(pytest.Metafunc, self))
        return self._calls


def test_no_others_are_made_by_day() -> None:
    cases = [Case(values) for values in combined(3, 3, 2)]
    kept = covering(combined(3, 3, 2), 2)
    assert Cases(cases, pytest.mark.by_day(2)).by_day() == [cases[number] for number in kept]
    assert [number for number, case in enumerate(cases) if not case.long] == kept
    assert 9 <= len(kept) <= 11
    alike = [Case(["a"]), Case(["b"], pytest.mark.long), Case(["c"], pytest.mark.slow)]
    assert Cases(alike).by_day() == [alike[0], alike[2]]
    assert Cases(alike, pytest.mark.long).by_day() == alike[:1]
    assert Cases(alike[1:2]).by_day() == alike[1:2]
    assert Cases([]).by_day() == []
    assert [len([seed for seed in seeds(count) if isinstance(seed, int)]) for count in (200, 20)] == [20, 6]
    assert len(seeds(200)) == 200


def test_of_cases_that_are_alike_each_third_is_run_by_day() -> None:
    cases = [Case([str(number)]) for number in range(7)]
    assert Cases(cases, pytest.mark.by_day(every=3)).by_day() == [cases[0], cases[3], cases[6]]
    with pytest.raises(AssertionError, match="one list of parameters"):
        Cases([Case(values) for values in combined(2, 2)], pytest.mark.by_day(every=2)).by_day()


@pytest.mark.parametrize(
    ("lines", "none"),
    [
        (["pytestmark = [pytest.mark.process, pytest.mark.alone]", "def test_a():"], True),
        (["@pytest.mark.slow", '@pytest.mark.parametrize("a", [', "    1,", "])", "def test_a(a):"], True),
        (["@pytest.mark.slow", "def test_a():", "    pass", "", "async def test_b():"], False),
        (["@pytest.mark.parametrize(", "    pytest.param(1, marks=pytest.mark.slow)", ")", "def test_a(a):"], False),
        (["def made():"], False),
    ],
)  # fmt: skip
def test_a_file_is_left_out_of_quick_where_each_test_says_so(lines: list[str], none: bool) -> None:
    assert has_none_quick("\n".join(lines)) == none
