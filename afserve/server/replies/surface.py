"""What the answers of all APIs have in common: one answer in one API's words. Knows no engine and no sockets."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from afserve.errors import AfserveError
from afserve.server.reading.parts import Part
from afserve.server.reading.table import Reading
from afserve.server.replies.chat_reply import ReadChoice
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.wording import Usage

EVENTS = b"text/event-stream; charset=utf-8"
COMMENT = b": still here\n\n"  # what clients of server-sent events skip


class Surface(ABC):
    """What it has said of pieces becomes part of `whole_body`.

    `size`: about the bytes of a whole answer. `at_once`: whether pieces may be written without a turn for others.
    """

    media = EVENTS
    comment: bytes | None = COMMENT
    at_once = False
    size = 0

    def stream_opening(self, usage: Usage) -> bytes:
        """What a stream says first, once its first piece is there."""
        return b""

    @abstractmethod
    def say_piece(self, index: int, piece: TextPiece, usage: Usage) -> Iterable[bytes]:
        """Of a piece of a choice, which `usage` counts already. Where it is empty, others have a turn."""

    def stream_end(self, usage: Usage) -> bytes:
        return b""

    def say_failure(self, error: AfserveError | None) -> bytes:
        """What a stream that has begun says of its end; None is a bug, whose reason the log has."""
        return b""

    def whole_body(self, usage: Usage) -> Iterable[bytes]:
        """The whole answer, once everything was said."""
        return ()


class ReadSurface(Surface):
    """One choice, told part by part as it is read: words, reasoning, calls."""

    at_once = True

    def __init__(self, reading: Reading | None) -> None:
        self._told = ReadChoice(reading)

    def say_piece(self, index: int, piece: TextPiece, usage: Usage) -> Iterable[bytes]:
        self.size += len(piece.text)
        said = b"".join(map(self._part, self._told.read_piece(piece)))
        if piece.finish_reason is not None:
            said += self._last(piece, piece.finish_reason)
        return (said,) if said else ()

    @abstractmethod
    def _part(self, part: Part) -> bytes: ...

    @abstractmethod
    def _last(self, piece: TextPiece, reason: str) -> bytes:
        """Behind the parts of the piece that ends the choice."""
