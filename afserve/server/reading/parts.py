"""What an answer's text turns out to be, part by part, and the one way to read it."""

from collections.abc import Mapping
from dataclasses import dataclass

MOST_HEADER = 512  # characters of a mark or a channel's header, white space and a name
Types = Mapping[str, Mapping[str, str]]  # function -> parameter -> types, as `kinds.kinds_of` names them


@dataclass(frozen=True, slots=True)
class Content:
    """Words of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Words of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a tool begins; `index` counts the calls of one answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """More of the JSON text that holds a call's arguments."""

    index: int
    text: str


Part = Content | Thought | Called | Argued


class Reader:
    """All text of one answer in pieces, then its end. It raises for no text, however it is cut.

    All text is words to this one; others read in their own way what has come and is not told yet, `_text`.
    """

    def __init__(self) -> None:
        self._text = ""

    def read_text(self, text: str) -> list[Part]:
        self._text += text
        return self._read()

    def end_text(self, *, cut: bool = False) -> list[Part]:
        """What was held back because it might have become something else, and what makes an open call's arguments
        JSON. `cut`: the answer was not at its end, so they stay as they are: nobody runs half a command."""
        return self._end(cut)

    def _read(self) -> list[Part]:
        parts: list[Part] = []
        while self._advance(parts, final=False):
            pass
        return parts

    def _advance(self, parts: list[Part], *, final: bool) -> bool:
        """One more part of the text; False where more text is needed. `final`: there is no more."""
        say(parts, self._rest())
        return False

    def _end(self, cut: bool) -> list[Part]:
        return []

    def _rest(self) -> str:
        rest, self._text = self._text, ""
        return rest


def held(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def say(parts: list[Part], text: str) -> None:
    if text:
        parts.append(Content(text))
