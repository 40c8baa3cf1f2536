"""Reads a regular expression as Python's `re` writes it, into its parts: those that one look at each character decides.

What needs to try several ways (a group's text again, what stands before, flags) is refused. It matches nothing.
"""

import re
from dataclasses import dataclass
from typing import Literal

MOST_CHARACTERS = 1000
MOST_NESTED = 20
_ATOM = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|[0-3][0-7]{2}|[^0-9])"
    r"|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^\\\[]",
    re.DOTALL,
)
_TIMES = re.compile(r"[*+?]|\{[0-9]*,[0-9]*\}|\{[0-9]+\}")
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_LOOK = re.compile(r"\(\?([=!])")
_BOUNDED: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_PLACES: dict[str, "Place"] = {
    "^": "start",
    r"\A": "start",
    "$": "end",
    r"\Z": "last",
    r"\b": "word",
    r"\B": "within",
}

Place = Literal["start", "end", "last", "word", "within"]
"""`end` is also before a line break that ends the text; `word` is where a word begins or ends."""


class UnreadError(ValueError):
    """The message says what a pattern has that is not read."""


@dataclass(frozen=True, slots=True)
class Character:
    """`text` is a pattern for one."""

    text: str


@dataclass(frozen=True, slots=True)
class At:
    place: Place


@dataclass(frozen=True, slots=True)
class Group:
    """One of its alternatives."""

    any_of: tuple[tuple["Part", ...], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """The text goes on with one of its alternatives, or with none of them."""

    group: Group
    holds: bool


@dataclass(frozen=True, slots=True)
class Repeat:
    part: "Part"
    least: int
    most: int | None


Part = Character | At | Group | Look | Repeat


def read(text: str) -> Group:
    """Raises re.error where it is no regular expression, UnreadError where it is one that is not read."""
    if len(text) > MOST_CHARACTERS:
        raise UnreadError(f"has {len(text)} characters, more than {MOST_CHARACTERS}")
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth > MOST_NESTED:
            raise UnreadError(f"has more than {MOST_NESTED} brackets in one another")
    if re.compile(text).flags != re.UNICODE:
        raise UnreadError("sets flags")
    return _Reader(text).group()


class _Reader:
    """What it reads is a regular expression: `re` has said so."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def group(self) -> Group:
        """To the end, or to the bracket that closes it."""
        found: list[tuple[Part, ...]] = []
        while True:
            parts: list[Part] = []
            while self._at < len(self._text) and self._text[self._at] not in "|)":
                parts.append(self._repeated(self._part()))
            found.append(tuple(parts))
            if not self._text.startswith("|", self._at):
                return Group(tuple(found))
            self._at += 1

    def _part(self) -> Part:
        if look := self._take(_LOOK):
            return Look(self._closed(), look[1] == "=")
        if self._take(_GROUP):
            return self._closed()
        if self._text[self._at] == "(":
            raise UnreadError(f"has {self._text[self._at : self._at + 4]}...")
        atom = self._take(_ATOM)
        if atom is None:
            raise UnreadError(f"has {self._text[self._at : self._at + 2]}, a group's text again")
        if atom[0] in _PLACES:
            return At(_PLACES[atom[0]])
        return Character(atom[0])

    def _closed(self) -> Group:
        group = self.group()
        self._at += 1
        return group

    def _repeated(self, part: Part) -> Part:
        times = self._take(_TIMES)
        if times is None:
            return part
        if self._text.startswith("+", self._at):
            raise UnreadError(f"has {times[0]}+, which never gives back")
        self._at += self._text.startswith("?", self._at)  # the fewest first: the same texts
        if times[0] in _BOUNDED:
            return Repeat(part, *_BOUNDED[times[0]])
        least, comma, most = times[0][1:-1].partition(",")
        return Repeat(part, int(least or 0), int(most) if most else None if comma else int(least))

    def _take(self, what: re.Pattern[str]) -> re.Match[str] | None:
        found = what.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found
