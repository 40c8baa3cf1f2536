"""Regular expressions of a downloaded file: whether a text begins with one, in time that grows with the text's length.

Python's `re` tries ways one after the other, and (a+)+$ has twice as many for each character more: a config.json could
keep a start busy for years. Here a pattern is a set of texts. What may follow after a character is another set, its
derivative (Brzozowski, "Derivatives of Regular Expressions", 1964; Owens et al. 2009), computed once for each set and
character; there may be so many sets and no more. It answers as `re.match` does, and refuses what is no such set.
"""

import itertools
import re
from functools import lru_cache
from typing import NamedTuple

from afserve.errors import CheckpointError, shown
from afserve.pattern_text import MOST_CHARACTERS, At, Character, Group, Look, Part, Repeat, UnreadError, read

MOST_SETS = 2000  # of one pattern, with those that its parts are made of
MOST_STEPS = 200_000  # of one pattern: parts of sets that were looked at
_ANY = r"[\s\S]"
_MARKS = (
    "at the edge of a word",
    "elsewhere",
)  # stand before each character and at the end, as if they were some


def is_pattern(text: str) -> bool:
    """Whether it is a regular expression at all. One that is too long for `Pattern` is taken for one."""
    if len(text) > MOST_CHARACTERS:
        return True
    try:
        re.compile(text)
    except (RecursionError, OverflowError):
        return True
    except re.error:
        return False
    return True


class Pattern:
    """Raises CheckpointError, which names `where` it stands, for one that is not matched here, and for one that turns
    out to need too many sets; re.error for what is no pattern."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        try:
            group = read(text)
            self._sets = _Sets()
            self._first = self._sets.of(group, _ALL, start=True)
        except (UnreadError, RecursionError, OverflowError) as error:
            raise self._refused(error) from None
        self._marked = any(place in text for place in (r"\b", r"\B"))

    def match(self, name: str) -> bool:
        at, sets = self._first, self._sets
        try:
            for character in _marked(name) if self._marked else name:
                at = sets.after(at, character)
                if at in (_NOTHING, _ALL):
                    return at == _ALL
        except (UnreadError, RecursionError) as error:
            raise self._refused(error) from None
        return sets.may_end(at)

    def _refused(self, error: Exception) -> CheckpointError:
        why = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return CheckpointError(
            f"{self._where}: the pattern {shown(self._text)} {why}, which is not matched here because it could take "
            "without end; write it more simply, or list the names of the modules"
        )


def _marked(name: str) -> list[str]:
    words = [False, *(_is(r"\w", character) for character in name), False]
    marks = [_MARKS[before == behind] for before, behind in itertools.pairwise(words)]
    return [one for pair in zip(marks, [*name, ""], strict=True) for one in pair][:-1]


@lru_cache(maxsize=4096)
def _compiled(one: str) -> re.Pattern[str]:
    return re.compile(one)


def _is(one: str, character: str) -> bool:
    return _compiled(one).fullmatch(character) is not None


class _Set(NamedTuple):
    """`kind` is what it is made of: one character of `text`, `parts` one behind the other, one of them, all of them,
    none of it, or it any number of times. `mark`: any text that begins with this mark."""

    kind: str
    parts: tuple[int, ...] = ()
    text: str = ""


_NOTHING, _EMPTY, _ONE, _ALL = range(4)


class _Sets:
    """Each has a number, and equal ones mostly the same."""

    def __init__(self) -> None:
        self._numbers: dict[_Set, int] = {}
        self._sets: list[_Set] = []
        self._ends: list[bool] = []  # whether the empty text is in it
        self._after: dict[tuple[int, str], int] = {}
        self._steps = 0
        for one in (_Set("nothing"), _Set("empty"), _Set("one", (), _ANY), _Set("often", (_ONE,))):
            self._number(one)

    def may_end(self, number: int) -> bool:
        return self._ends[number]

    def after(self, number: int, character: str) -> int:
        """What may follow behind this character."""
        found = self._after.get((number, character))
        if found is None:
            one = self._sets[number]
            self._steps += 1 + len(one.parts)
            if self._steps > MOST_STEPS:
                raise UnreadError(f"needs more than {MOST_STEPS:,} steps")
            found = self._after[number, character] = self._derived(one, number, character)
        return found

    def _derived(self, one: _Set, number: int, character: str) -> int:
        parts = one.parts
        match one.kind:
            case "mark":
                return _ALL if character == one.text else _NOTHING
            case "any_of":
                return self._any_of({self.after(part, character) for part in parts})
            case "all_of":
                return self._all_of({self.after(part, character) for part in parts})
            case "none_of":
                return self._none_of(self.after(parts[0], character))
            case "behind":
                first = self._behind(self.after(parts[0], character), parts[1])
                if not self._ends[parts[0]]:
                    return first
                return self._any_of({first, self.after(parts[1], character)})
        if character in _MARKS:
            return number
        if one.kind == "often":
            return self._behind(self.after(parts[0], character), number)
        return _EMPTY if one.kind == "one" and _is(one.text, character) else _NOTHING

    # -- of a pattern's parts ----------------------------------------------------------------------------

    def of(self, group: Group, rest: int, start: bool = False) -> int:
        """Texts that begin with it and go on with `rest`. `start`: it stands where the text begins."""
        return self._any_of({self._parts(parts, rest, start) for parts in group.any_of})

    def _parts(self, parts: tuple[Part, ...], rest: int, start: bool) -> int:
        first = [start]
        for part in parts[:-1]:
            first.append(first[-1] and isinstance(part, At | Look))
        for part, begins in zip(reversed(parts), reversed(first[: len(parts)]), strict=True):
            rest = self._part(part, rest, begins)
        return rest

    def _part(self, part: Part, rest: int, start: bool) -> int:
        match part:
            case Character(text):
                return self._behind(self._number(_Set("one", (), text)), rest)
            case Group():
                return self.of(part, rest, start)
            case Look(group, holds):
                found = self.of(group, _ALL, start)
                return self._all_of({found if holds else self._none_of(found), rest})
            case Repeat(inner, least, most):
                return self._repeated(inner, least, most, rest)
            case At(place):
                return self._at(place, rest, start)

    def _at(self, place: str, rest: int, start: bool) -> int:
        if place == "start":
            if not start:
                raise UnreadError("has ^ behind something else")
            return rest
        if place in ("word", "within"):
            return self._all_of({self._number(_Set("mark", (), _MARKS[place == "within"])), rest})
        line = self._any_of({_EMPTY, self._number(_Set("one", (), r"\n"))})
        return self._all_of({line if place == "end" else _EMPTY, rest})

    def _repeated(self, part: Part, least: int, most: int | None, rest: int) -> int:
        if _looks(part):
            raise UnreadError("repeats what has no characters of its own")
        if max(least, most or 0) * _size(part) > MOST_SETS:
            raise UnreadError("repeats too much")
        once = self._part(part, _EMPTY, False)
        if most is None:
            rest = self._behind(self._often(once), rest)
        for _ in range((most or least) - least):
            rest = self._any_of({rest, self._behind(once, rest)})
        for _ in range(least):
            rest = self._behind(once, rest)
        return rest

    # -- of sets -----------------------------------------------------------------------------------------

    def _behind(self, first: int, second: int) -> int:
        if _NOTHING in (first, second):
            return _NOTHING
        if first == _EMPTY:
            return second
        if second == _EMPTY:
            return first
        if first == second == _ALL:
            return _ALL
        one = self._sets[first]
        if one.kind == "behind":  # to the right, so that equal ones are the same
            return self._behind(one.parts[0], self._behind(one.parts[1], second))
        return self._number(_Set("behind", (first, second)))

    def _any_of(self, found: set[int]) -> int:
        found = self._flat(found, "any_of") - {_NOTHING}
        if _ALL in found:
            return _ALL
        return self._joined("any_of", found, _NOTHING)

    def _all_of(self, found: set[int]) -> int:
        found = self._flat(found, "all_of") - {_ALL}
        if _NOTHING in found:
            return _NOTHING
        return self._joined("all_of", found, _ALL)

    def _none_of(self, number: int) -> int:
        opposite = {_NOTHING: _ALL, _ALL: _NOTHING}
        one = self._sets[number]
        if one.kind == "none_of":
            return one.parts[0]
        return opposite[number] if number in opposite else self._number(_Set("none_of", (number,)))

    def _often(self, number: int) -> int:
        if number in (_NOTHING, _EMPTY):
            return _EMPTY
        return number if self._sets[number].kind == "often" else self._number(_Set("often", (number,)))

    def _flat(self, found: set[int], kind: str) -> set[int]:
        parts = (self._sets[one].parts if self._sets[one].kind == kind else (one,) for one in found)
        return {number for part in parts for number in part}

    def _joined(self, kind: str, found: set[int], none: int) -> int:
        if len(found) < 2:
            return next(iter(found), none)
        return self._number(_Set(kind, tuple(sorted(found))))

    def _number(self, one: _Set) -> int:
        found = self._numbers.get(one)
        if found is None:
            if len(self._sets) >= MOST_SETS:
                raise UnreadError(f"needs more than {MOST_SETS:,} sets of texts")
            found = self._numbers[one] = len(self._sets)
            self._sets.append(one)
            self._ends.append(self._has_empty(one))
        return found

    def _has_empty(self, one: _Set) -> bool:
        ends = [self._ends[part] for part in one.parts]
        match one.kind:
            case "any_of":
                return any(ends)
            case "behind" | "all_of":
                return all(ends)
            case "none_of":
                return not ends[0]
        return one.kind in ("empty", "often")


def _size(part: Part) -> int:
    match part:
        case Group(any_of):
            return 1 + sum(_size(one) for parts in any_of for one in parts)
        case Repeat(inner, least, most):
            return max(1, least, most or 0) * _size(inner)
    return 1


def _looks(part: Part) -> bool:
    """Whether anything in it has no characters of its own."""
    match part:
        case Group(any_of):
            return any(_looks(one) for parts in any_of for one in parts)
        case Repeat(inner):
            return _looks(inner)
    return isinstance(part, At | Look)
