"""What an answer's text turns out to be, part by part, and the one way to read it."""

from dataclasses import dataclass
from typing import Protocol


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


class Reader(Protocol):
    """Feed it all text of one answer in pieces, then finish. It raises for no text, however it is cut."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self, *, cut: bool = False) -> list[Part]:
        """What was held back because it might have become something else, and what makes an open call's arguments
        JSON. `cut`: the answer was not at its end, so they stay as they are: nobody runs half a command."""
        ...


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
