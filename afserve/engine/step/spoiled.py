"""Which rows of a step met a value that is not finite, and in which layer first. One per micro-batch.

The kernels that add a layer's sums mark rows as they go (`Ops.add_sums`), so nothing is read twice. Once per step one
number tells whether any is marked; from a device it comes along with the step's tokens. Shapes: T tokens of the step,
R rows of them that the last layer goes on with.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from afserve.engine.scheduling.request import NO_EXPERTS, NOT_FINITE

FINE = -1


class Spoiled:
    def __init__(self, most_tokens: int, device: torch.device) -> None:
        self._layer_N = torch.full((2 * most_tokens,), FINE, dtype=torch.int32, device=device)
        self._layer_T, self._tokens = self._layer_N[:0], 0
        self._starts: Sequence[int] = (0,)
        self._rows: Sequence[int] = ()
        self._before: Mapping[int, str] = {}

    def of(self, starts: Sequence[int]) -> Tensor:
        """The marks of a step's rows, all fine yet; `failures` has reset them since the last step. Chunk i has the rows
        from `starts[i]` up to `starts[i + 1]`."""
        self._starts, self._tokens = starts, starts[-1]
        self._layer_T = self._layer_N[: self._tokens]
        self._rows, self._before = (), {}
        return self._layer_T

    def shorten(self, starts: Sequence[int]) -> None:
        """The step's rows are its first ones alone; those behind them were padding, and are fine again."""
        self._layer_N[starts[-1] : self._tokens].fill_(FINE)
        self._starts, self._tokens = starts, starts[-1]

    def only(self, rows: Sequence[int], normed_TH: Tensor, layer: int, given_up: Mapping[int, str]) -> Tensor:
        """The marks of these rows, with which the step goes on alone from `layer` on; `normed_TH` tells what its
        attention gave all of them, so that nothing stays in a cache that others trip over. `given_up` is of the layers
        so far; what comes later counts these rows."""
        spoiled_T = ~normed_TH.sum(-1).isfinite()
        self._layer_T.masked_fill_(spoiled_T & (self._layer_T == FINE), layer)
        self._rows, self._before = rows, given_up
        return self._marks[self._tokens :]

    @property
    def _marks(self) -> Tensor:
        """Of all rows, and behind them of those that the step goes on with: one tensor, so that a host waits once."""
        return self._layer_N[: self._tokens + len(self._rows)]

    def failures(
        self, given_up: Callable[[], Mapping[int, str]] = dict, worst: int | None = None
    ) -> dict[int, str]:
        """Why a chunk gave nothing, by its index; the next step begins without marks. `worst` is what `worst_layer`
        was, read by somebody else.

        The row that was spoiled in the lowest layer names it: others have it from that row's keys, also rows before
        it, as a masked value that is not finite times a weight of 0 is not finite either.
        `given_up` says of rows that the experts gave no sum, and why; it is asked only where a row was spoiled.
        """
        if self._all_fine() if worst is None else worst == FINE:
            return {}
        layers, why = self._marks.tolist(), dict(given_up())
        if self._rows:
            why = {self._rows[at]: said for at, said in why.items()}
        why |= self._before
        for row, layer in zip(self._rows, layers[self._tokens :], strict=True):
            layers[row] = layer if layers[row] == FINE else layers[row]
        self._marks.fill_(FINE)
        found = {}
        for index, (start, end) in enumerate(pairwise(self._starts)):
            spoiled = [row for row in range(start, end) if layers[row] != FINE]
            if spoiled:
                first = min(spoiled, key=lambda row: (layers[row], row not in why, row))
                said = NO_EXPERTS if first in why else NOT_FINITE
                found[index] = said.format(where=f"layer {layers[first]}", why=why.get(first))
        return found

    def worst_layer(self) -> Tensor | None:
        """Int32, (1,): FINE where all rows are, for who reads something else from the device anyway. None in host
        memory, where a look costs nothing."""
        if self._layer_N.is_cpu:
            return None
        marks_N = self._marks
        return marks_N.amax(0, keepdim=True) if len(marks_N) else None

    @property
    def fine(self) -> bool:
        """Whether no row was spoiled so far. It waits for a device."""
        return self._all_fine()

    def drop(self) -> None:
        """The step ended in the middle: the next one begins without marks."""
        self._marks.fill_(FINE)

    def _all_fine(self) -> bool:
        """In host memory a list is quicker than a reduction; from a device one number is fetched, not all."""
        marks_N = self._marks
        return (max(marks_N.tolist()) if marks_N.is_cpu else int(marks_N.max())) == FINE
