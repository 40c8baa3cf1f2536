"""How far a client is in a stream, as the id of its last event: by tokens, so that any gateway understands it.

`17` stands for 17 tokens of a single choice, `17.3e` for 17 of choice 0, and choice 1 ended after 3. `usage` and `done`
are the last events of a stream. How tokens were grouped into events does not matter.
"""

from collections.abc import Iterable

from afserve.errors import RequestError, shown
from afserve.server.replies.choice import TextPiece

USAGE, DONE = "usage", "done"
MOST_CHOICES = 32  # of a stream that may be resumed: its ids stay short
_MOST_DIGITS = 9


class Position:
    """Of every choice, how many tokens were told and whether the end was."""

    def __init__(self, tokens: Iterable[int], ended: Iterable[bool], last: str = "") -> None:
        self.tokens, self.ended = list(tokens), list(ended)
        self.last = last

    @classmethod
    def at_start(cls, choices: int) -> "Position":
        return cls([0] * choices, [False] * choices)

    @classmethod
    def parse(cls, text: str, choices: int) -> "Position":
        """Raises RequestError for what is no id of a stream with so many choices."""
        if not text:
            return cls.at_start(choices)
        if text in (USAGE, DONE):
            return cls([0] * choices, [True] * choices, text)
        parts = text.split(".")
        digits = [part.removesuffix("e") for part in parts]
        if len(parts) != choices or not all(_is_count(part) for part in digits):
            raise RequestError.about(
                "Last-Event-ID",
                f"{shown(text)} is no event of this request; send the last `id:` that you have read",
            )
        return cls(map(int, digits), (part.endswith("e") for part in parts))

    def passed(self, index: int, piece: TextPiece) -> None:
        self.tokens[index] += piece.tokens
        self.ended[index] = self.ended[index] or piece.finish_reason is not None

    @property
    def id(self) -> str:
        return ".".join(f"{n}e" if end else str(n) for n, end in zip(self.tokens, self.ended, strict=True))


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS


def stamped(events: bytes, before: str, after: str) -> bytes:
    """Events with ids. Only the last of them says `after`: who has not got it has not got what it stands for."""
    parts = events.split(b"\n\n")[:-1]
    ids = [before] * (len(parts) - 1) + [after]
    return b"".join(b"id: %s\n%s\n\n" % (id.encode(), part) for id, part in zip(ids, parts, strict=True))
