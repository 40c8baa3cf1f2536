"""What an API's answers have in common, and the short way of a piece to its client: both know no engine."""

from collections.abc import Iterable
from typing import Protocol

from afserve.errors import AfserveError
from afserve.server.answers.writer import Writer
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.wording import Usage


class Surface(Protocol):
    """One answer in one API's words. What it has said of pieces becomes part of `body`.

    `size`: about the bytes of a whole answer. `at_once`: whether pieces may be written without a turn for others.
    """

    media: bytes
    comment: bytes | None
    size: int
    at_once: bool

    def begin(self, usage: Usage) -> bytes:
        """What a stream says first, once its first piece is there."""
        ...

    def say(self, index: int, piece: TextPiece, usage: Usage) -> Iterable[bytes]:
        """Of a piece of a choice, which `usage` counts already. Where it is empty, others have a turn."""
        ...

    def end(self, usage: Usage) -> bytes: ...

    def failed(self, error: AfserveError | None) -> bytes:
        """What a stream that has begun says of its end; None is a bug, whose reason the log has."""
        ...

    def body(self, usage: Usage) -> Iterable[bytes]:
        """The whole answer, once everything was said."""
        ...


class PieceWriter:
    """Pieces of a stream that has begun, written without a turn of the event loop while its task waits for the next."""

    __slots__ = ("_surface", "_usage", "_writer")

    def __init__(self, surface: Surface, usage: Usage, writer: Writer) -> None:
        self._surface, self._usage, self._writer = surface, usage, writer

    def can_write(self) -> bool:
        """Whether it would write a piece now."""
        return self._writer.can_write_now

    def write_piece(self, index: int, piece: TextPiece) -> None:
        """One that ends nothing."""
        self._usage.count_piece(piece)
        for data in self._surface.say(index, piece, self._usage):
            self._writer.write_now(data)
