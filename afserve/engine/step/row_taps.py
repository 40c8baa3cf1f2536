"""Copies of the rows behind some layers of a step, for a head that guesses further tokens by them."""

from collections.abc import Sequence

from torch import Tensor


class RowTaps:
    """Of one micro-batch."""

    def __init__(self, behind: Sequence[int]) -> None:
        """`behind` how many layers, 0 the embedding."""
        self._behind = behind
        self._rows: dict[int, Tensor] = {}

    def note_rows(self, layers: int, x_TH: Tensor) -> None:
        """So many layers gave x_TH, which the next one changes in place."""
        if layers in self._behind:
            self._rows[layers] = x_TH.clone()

    def seen_rows(self) -> list[Tensor]:
        """Of the step that ran last, (T, H) each, in the order asked for."""
        return [self._rows[layers] for layers in self._behind]
