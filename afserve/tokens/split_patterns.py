r"""Whether a regular expression of a tokenizer surely takes little time on any short text, told from its form alone.

Tokenizers try their expressions at every character, with backtracking: `(a+)+$` takes minutes for a line. What a branch
may repeat at its end, such as `\p{L}+[\r\n]*`, is never tried again. Before that at most one part may repeat without
bound and few may be left out, and nothing that varies may be repeated. All published expressions are so. Of what is not
understood the answer is no.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST_VARYING = 4  # parts of a branch that may be left out or repeated: each doubles the ways, or more
_LONG = 16  # repeats from which on a bound is none
_MOST_REPEATS = 1000
_MOST_DEPTH = 32
_ATOM = re.compile(r"\\[pPx]\{[^}]*\}|\\[a-zA-Z]|\\[^0-9a-zA-Z]|[^\\\[\]()|*+?{}]|[\]}]", re.DOTALL)
_CALLS = (
    "\\k",
    "\\g",
    "\\K",
    "\\X",
    "\\R",
)  # what was matched before, an expression within itself, several characters
_REPEAT = re.compile(r"(?:([*+?])|\{(\d{0,6})(,?)(\d{0,6})\})[?+]?")
_GROUP = re.compile(r"\((?:\?(?:[imx]*(?:-[imx]+)?:|[:=!>]|<[=!]))?")


@dataclass(frozen=True, slots=True)
class BranchPart:
    """Of a branch: how often it is there, and what varies within."""

    least: int
    most: float
    varies: int = 0  # parts within that may be left out or repeated
    long: int = 0  # of these the ones without a bound
    forks: bool = False  # there are branches within

    @property
    def fixed(self) -> bool:
        return self.least == self.most


def is_quick(expression: str) -> bool:
    try:
        return _Reader(expression).ends_quickly()
    except _UnknownForm:
        return False


class _UnknownForm(Exception):
    pass


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def ends_quickly(self) -> bool:
        branches = self._branches()
        return self._at == len(self._text) and all(_ends_quickly(branch) for branch in branches)

    def _branches(self) -> list[list[BranchPart]]:
        branches: list[list[BranchPart]] = [[]]
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                branches.append([])
            else:
                branches[-1].append(self._part())
        return branches

    def _part(self) -> BranchPart:
        if self._text[self._at] == "(":
            inside = self._group()
        else:
            self._skip_atom()
            inside = BranchPart(1, 1)
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            return inside
        self._at = found.end()
        least, most = _bounds(found)
        if most > 1 and (inside.varies or inside.forks):
            raise _UnknownForm
        return BranchPart(least, most, inside.varies, inside.long, inside.forks)

    def _group(self) -> BranchPart:
        found = _GROUP.match(self._text, self._at)
        self._depth += 1
        if found is None or self._depth > _MOST_DEPTH or self._text.startswith("(*", self._at):
            raise _UnknownForm
        self._at = found.end()
        branches = self._branches()
        if not self._text.startswith(")", self._at):
            raise _UnknownForm
        self._at += 1
        self._depth -= 1
        varies = max(sum(map(_varying, branch)) for branch in branches)
        return BranchPart(
            1, 1, varies, max(sum(map(_long, branch)) for branch in branches), len(branches) > 1
        )

    def _skip_atom(self) -> None:
        if self._text[self._at] == "[":
            self._skip_class()
            return
        found = _ATOM.match(self._text, self._at)
        if found is None or found[0] in _CALLS:
            raise _UnknownForm
        self._at = found.end()

    def _skip_class(self) -> None:
        """Classes may lie in classes."""
        open_, first = 0, False
        for at, sign in self._signs():
            if sign == "[" and not self._text.startswith("[:", at):
                open_, first = open_ + 1, True
            elif sign == "]" and not first and not self._text.startswith(":]", at - 1):
                open_ -= 1
            elif sign != "^":
                first = False
            if not open_:
                self._at = at + 1
                return
        raise _UnknownForm

    def _signs(self) -> Iterator[tuple[int, str]]:
        """From here on, without what is escaped."""
        at = self._at
        while at < len(self._text):
            if self._text[at] == "\\":
                yield at, "\\"
                at += 2
            else:
                yield at, self._text[at]
                at += 1


def _bounds(found: "re.Match[str]") -> tuple[int, float]:
    sign, least, comma, most = found.groups()
    if sign:
        return (1 if sign == "+" else 0), (1.0 if sign == "?" else float("inf"))
    if not least and not most:
        raise _UnknownForm
    low = int(least or 0)
    high = float(most) if most else (float("inf") if comma else float(low))
    if low > _MOST_REPEATS or (_MOST_REPEATS < high < float("inf")):
        raise _UnknownForm
    return low, high


def _varying(part: BranchPart) -> int:
    return part.varies + (not part.fixed)


def _long(part: BranchPart) -> int:
    return part.long + (not part.fixed and part.most > _LONG)


def _ends_quickly(branch: list[BranchPart]) -> bool:
    """What is repeated at the end is there at once or never, so it is not counted, nor what may be left out there."""
    parts = list(branch)
    while parts and parts[-1].least == 0 and not parts[-1].varies:
        parts.pop()
    if parts and parts[-1].least == 1 and not parts[-1].varies:
        parts.pop()
    return sum(map(_varying, parts)) <= MOST_VARYING and sum(map(_long, parts)) <= 1
