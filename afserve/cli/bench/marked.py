"""Links that note when rows leave and when their sum is back: one without experts, to time an attention node by itself,
and one to real expert nodes. They know neither processes nor hardware; others turn the notes into stage times.
Shapes: T tokens, H hidden, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.clock import Clock
from afserve.comm.m2n.bank import LocalTicket, NoExpertNodes
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.transport import Layout, Transport
from afserve.kernels.stack import Exchange
from afserve.placement.placement import Placement

_MOST_ROWS = 512  # that ever leave at once


class MarkedLink(NoExpertNodes):
    """The partial sums are zero. `left` and `back`: clock readings at each dispatch's start and after each combine,
    layer after layer."""

    def __init__(self, clock: Clock, hidden: int) -> None:
        self._clock = clock
        self._zero_TH = torch.zeros(_MOST_ROWS, hidden)
        self.left: list[float] = []
        self.back: list[float] = []

    def clear_marks(self) -> None:
        self.left.clear()
        self.back.clear()

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> LocalTicket:
        self.left.append(self._clock.now())
        return LocalTicket(layer, micro_batch, self._zero_TH[: x_TH.shape[0]])

    def ready(self, ticket: LocalTicket) -> bool:
        return True

    def combine(self, ticket: LocalTicket) -> Tensor:
        self.back.append(self._clock.now())
        return ticket.y_TH

    def wait(self, tickets: Sequence[LocalTicket], timeout: float) -> None:
        """Nothing is ever under way."""

    def adopt(self, placement: Placement) -> None:
        """There are no experts to route to."""

    def close(self) -> None: ...


class NotedLink(ExpertLink):
    """`own`: seconds that sending and adding up took of this node's time, of each exchange; `rounds`: seconds from the
    beginning of a dispatch to the end of its combine. With `whole` a step may be one call, and nothing of it is noted.
    """

    whole = False

    def __init__(self, transport: Transport, *, layout: Layout, placement: Placement, clock: Clock) -> None:
        super().__init__(transport, attention=0, layout=layout, placement=placement)
        self._reading = clock
        self._began: dict[int, tuple[float, float]] = {}
        self.own: list[float] = []
        self.rounds: list[float] = []

    def clear_marks(self) -> None:
        self.own.clear()
        self.rounds.clear()

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> Ticket:
        begin = self._reading.now()
        ticket = super().dispatch(x_TH, expert_TK, weight_TK, layer=layer, micro_batch=micro_batch)
        self._began[micro_batch] = begin, self._reading.now() - begin
        return ticket

    def exchange(self, micro_batch: int, layers: int) -> Exchange | None:
        """Where every dispatch is noted by itself, no call runs several."""
        return super().exchange(micro_batch, layers) if self.whole else None

    def combine(self, ticket: Ticket) -> Tensor:
        begin = self._reading.now()
        y_TH = super().combine(ticket)
        now, began = self._reading.now(), self._began.pop(ticket.micro_batch, None)
        if began is not None:  # else a call sent it, and stopped there
            sent, sending = began
            self.own.append(sending + now - begin)
            self.rounds.append(now - sent)
        return y_TH
