"""Exchanges of an attention node: how `Ops.run_stack` sends rows and gets sums without Python between two layers.

An exchange does what a link does while every expert node is there and answers in time. Of anything else it leaves a
`Ticket` to the link. It knows boxes and routes; it knows no recoveries.
"""

from typing import Protocol, TypeVar

from afserve.comm.m2n.called import CalledRows
from afserve.comm.m2n.routes import RouteTable
from afserve.comm.m2n.ticket import Given
from afserve.comm.transport import Box, Header, Kind, Transport
from afserve.kernels.stack import Exchange

_AnyTicket_co = TypeVar("_AnyTicket_co", covariant=True)

_PATIENCE = 0.02  # seconds that a layer's sums may take; then the link looks whether their nodes live


class ExchangingLink(Protocol[_AnyTicket_co]):
    """A link that offers exchanges beside `dispatch` and `combine`."""

    def exchange(self, micro_batch: int, layers: int) -> Exchange | None:
        """What `Ops.run_stack` takes in place of these for the first `layers` MoE layers, always as many; None where
        only they will do now. `settle` follows each use."""

    def settle(self, micro_batch: int, layer: int = 0, stopped: Given | None = None) -> _AnyTicket_co | None:
        """An exchange was used; of the MoE layer at which it stopped the ticket, for the rows that it sent last."""


class Exchanges:
    """One for each micro-batch, made when it is first asked for."""

    def __init__(self, transport: Transport, attention: int, called: CalledRows) -> None:
        """`called` is told of the last answers of each use."""
        self._transport = transport.offers.exchanging
        self._wire = transport.layout.dispatch_wire
        self._attention, self._called = attention, called
        self._made: dict[int, Exchange] = {}

    @property
    def offered(self) -> bool:
        """Whether the transport has such a thing at all."""
        return self._transport is not None

    def clear(self) -> None:
        """The expert nodes that are there, or the routes, are others from now on."""
        self._made.clear()

    def of(self, micro_batch: int, layers: int, table: RouteTable) -> Exchange | None:
        """What `Ops.run_stack` takes. None where the transport has none, and while experts stand on no node."""
        made = self._made.get(micro_batch)
        if made is not None or self._transport is None:
            return made
        if any(one.absent or one.handle is None or one.homeless_E is not None for one in table.layers):
            return None
        routes = [layer.handle for layer in table.layers[:layers]]
        boxes = self._boxes(micro_batch, table)
        made = self._transport.exchange(boxes, routes, table.epoch, _PATIENCE)
        if made is not None:
            self._made[micro_batch] = made
        return made

    def settle(self, micro_batch: int, table: RouteTable) -> list[tuple[Box, Header]]:
        """An exchange was used: by expert node the box, and the header of the last message there but for its layer and
        rows."""
        assert self._transport is not None, "no exchange was made"
        boxes = self._boxes(micro_batch, table)
        numbers = self._transport.exchanged(boxes)
        for rows, call in self._transport.last_answers(boxes):
            self._called.note_answer(micro_batch, rows, call)
        headers = (Header(Kind.DISPATCH, table.epoch, number, 0, 0, self._wire) for number in numbers)
        return list(zip(boxes, headers, strict=True))

    def _boxes(self, micro_batch: int, table: RouteTable) -> tuple[Box, ...]:
        return tuple(Box(self._attention, node, micro_batch) for node in range(table.nodes))
