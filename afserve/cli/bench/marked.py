"""A link without experts that notes when rows leave and when their sum is back, to time an attention node by itself.

The partial sums are zero. It knows neither processes nor hardware; `stages.py` turns the notes into stage times.
Shapes: T tokens, H hidden, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.clock import Clock
from afserve.comm.m2n.bank import NoExpertNodes
from afserve.placement.placement import Placement

_MOST_ROWS = 512  # that ever leave at once


class MarkedLink(NoExpertNodes):
    """`left` and `back`: clock readings at each dispatch's start and after each combine, layer after layer."""

    def __init__(self, clock: Clock, hidden: int) -> None:
        self._clock = clock
        self._zero_TH = torch.zeros(_MOST_ROWS, hidden)
        self._rows = 0
        self.left: list[float] = []
        self.back: list[float] = []

    def clear(self) -> None:
        self.left.clear()
        self.back.clear()

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> int:
        self.left.append(self._clock.now())
        self._rows = x_TH.shape[0]
        return layer

    def ready(self, ticket: int) -> bool:
        return True

    def combine(self, ticket: int) -> Tensor:
        y_TH = self._zero_TH[: self._rows]
        self.back.append(self._clock.now())
        return y_TH

    def wait(self, tickets: Sequence[int], timeout: float) -> None:
        """Nothing is ever under way."""

    def adopt(self, placement: Placement) -> None:
        """There are no experts to route to."""

    def close(self) -> None: ...
