"""What is left to the night: by day each value of a parameter is there, or meets each value of any other."""

from collections import Counter
from itertools import combinations, product
from types import SimpleNamespace
from typing import cast

import pytest

from tests.by_day import covering, leave_the_rest_to_the_night


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
    """As pytest's items."""

    def __init__(self, name: str, marks: dict[str, pytest.Mark], values: list[str]) -> None:
        self.parent, self.originalname, self.marks = "file", name, marks
        self.callspec = SimpleNamespace(_idlist=values)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


def test_the_others_are_long() -> None:
    many = [Case("many", {"by_day": pytest.mark.by_day(2).mark}, values) for values in combined(3, 3, 2)]
    others = [Case("all", {}, values) for values in combined(3, 3, 2)]
    leave_the_rest_to_the_night(cast(list[pytest.Item], [*many, *others]))
    assert not any("long" in case.marks for case in others)
    kept = covering(combined(3, 3, 2), 2)
    assert [number for number, case in enumerate(many) if "long" not in case.marks] == kept
    assert 9 <= len(kept) <= 11
