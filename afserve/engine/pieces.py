"""In which pieces an expert node computes long messages while others decode: numbers in, numbers of rows out.

A decode message waits for the piece that runs, so a piece is short, against the time from its answer to the next one.
But every piece costs something whatever its size, so it is not shorter than keeps that a small part of the work. Where
a call costs more than a piece of rows can bear, because it reads the weights of its experts, pieces are cut between
experts: all of them together read each one once. What a call and a row cost is measured. It knows no tensors and no
clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PIECE_SECONDS = 200e-6  # of a piece, where a call costs little and decode messages follow quickly
_MOST_SECONDS = 600e-6  # of one, where they do not: nodes that pause look slow too
_OF_GAP = 1 / 4  # of the time from an answer to the same micro-batch's next message
OVERHEAD = 1 / 5  # at most so much of the rows' own time is spent on calls
_SHORTEST, _LONGEST = 0.4, 2.0  # of a piece's usual size
_GRAIN = 16  # rows
_DECAY = 0.98  # of what was measured before, per call


@dataclass(slots=True)
class PieceSize:
    """Least squares of calls' seconds over their rows, older calls counting less."""

    usual: float = PIECE_SECONDS  # seconds of a piece
    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def ran(self, rows: int, seconds: float) -> None:
        """One call."""
        self._weight = _DECAY * self._weight + 1
        self._rows = _DECAY * self._rows + rows
        self._seconds = _DECAY * self._seconds + seconds
        self._squares = _DECAY * self._squares + rows * rows
        self._products = _DECAY * self._products + rows * seconds

    def beside(self, gap: float | None) -> None:
        """Decoding goes on. A micro-batch that does has its next message here `gap` seconds behind an answer, if that
        is known."""
        self.usual = max(PIECE_SECONDS, min(_MOST_SECONDS, _OF_GAP * (gap or 0.0)))

    def costs(self) -> tuple[float, float]:
        """Seconds of a call without rows, and of one row; (0, 0) while calls of one size only were seen."""
        spread = self._weight * self._squares - self._rows**2
        if spread <= 1e-6 * self._squares:
            return 0.0, 0.0
        row = max(0.0, (self._weight * self._products - self._rows * self._seconds) / spread)
        return max(0.0, (self._seconds - row * self._rows) / self._weight), row

    def enough(self, *, beside: bool) -> float:
        """Rows of messages that share a call: with more, a call costs less than `OVERHEAD` of their own time. `beside`
        decoding, which waits for the call, no more than make it twice as long. Unknown costs: one more than usual, to
        learn them."""
        call, row = self.costs()
        if not row:
            return self._rows / self._weight + 1 if self._weight else 0.0
        return call / row if beside else call / OVERHEAD / row

    def rows(self, left: int, quiet: float | None = None) -> int:
        """Of the next piece, of `left` rows. The next decode message is usually here in `quiet` seconds, if that is
        known: a piece ends there rather than a little later, within `_SHORTEST` and `_LONGEST`."""
        call, row = self.costs()
        if not row:
            return left
        wanted = max(self.usual - call, call / OVERHEAD)
        if quiet is not None:
            wanted = min(max(quiet - call, _SHORTEST * wanted), _LONGEST * wanted)
        grains = max(1, int(wanted / row / _GRAIN))
        return min(left, grains * _GRAIN)

    @property
    def whole_experts(self) -> bool:
        """Whether pieces of rows would be longer than usual for what their calls cost."""
        call, row = self.costs()
        return row > 0 and call / OVERHEAD > self.usual - call

    def by_expert(self, rows: int, pairs: Sequence[int]) -> list[float]:
        """Seconds of each expert that computes `pairs` of `rows`."""
        call, row = self.costs()
        read, pair = call / max(1, sum(map(bool, pairs))), row * rows / max(1, sum(pairs))
        return [read + pair * count if count else 0.0 for count in pairs]

    def batch(self, rows: int, pairs: Sequence[int]) -> int:
        """Of `rows`, those that are computed together, some experts at a time: with so many the fullest expert is a
        piece, or reading it a small part of its time."""
        call, row = self.costs()
        if not any(pairs) or not row:
            return rows
        read, pair = call / sum(map(bool, pairs)), row / sum(pairs) * max(pairs)
        grains = max(1, int(max(self.usual - read, read / OVERHEAD) / pair / _GRAIN))
        return min(rows, grains * _GRAIN)

    def experts(self, seconds: Sequence[float], quiet: float | None = None) -> int:
        """How many of the next ones, which take `seconds`, are a piece: one at least. `quiet` as for `rows`."""
        wanted, taken = self.usual, 0.0
        if quiet is not None:
            wanted = min(max(quiet, _SHORTEST * wanted), _LONGEST * wanted)
        for index, one in enumerate(seconds):
            if taken and one and taken + one > wanted:
                return index
            taken += one
        return len(seconds)


@dataclass(slots=True)
class PromptShare:
    """What prompts got of the time since some have been waiting, and whether that is less than `floor`."""

    floor: float
    _prompts: float = 0.0
    _all: float = 0.0

    def ran(self, seconds: float, *, prompt: bool) -> None:
        self._all += seconds
        self._prompts += seconds * prompt

    def none_waits(self) -> None:
        self._prompts = self._all = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a piece comes before the decode messages that wait."""
        return self._prompts < self.floor * self._all
