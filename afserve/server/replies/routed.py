"""The experts that the tokens of an answer chose, as its last words: with the end of each choice."""

from afserve.engine.scheduling.routed_experts import RoutedExperts, joined
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.wording import encode


class RoutedAnswer:
    """Of all choices of one answer. Of who did not ask there is nothing."""

    def __init__(self) -> None:
        self._parts: dict[int, list[RoutedExperts]] = {}

    def add_piece(self, index: int, piece: TextPiece) -> int:
        """How many characters it adds to the choice's JSON, about."""
        if piece.routed is None:
            return 0
        self._parts.setdefault(index, []).append(piece.routed)
        return len(piece.routed.data) * 4 // 3

    def json(self, index: int, reason: str | None) -> str:
        """A field of the choice and the comma before it, once that has ended."""
        found = None if reason is None else joined(self._parts.get(index, ()))
        return "" if found is None else f',"routed_experts":{encode(found.as_json())}'
