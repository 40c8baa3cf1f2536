"""The attention side of M2N: sends rows to the expert nodes that hold their experts, and adds the partial sums.

A row is sent once to each expert node that holds any of its chosen slots. `combine` adds partial sums in float32 in the
order of the expert nodes, so the sum does not depend on who answers first. It knows placements; it knows no sockets.

Shapes: T rows of a micro-batch, R rows of one message, H hidden size, K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from afserve import member
from afserve.clock import AwakeClock, Clock
from afserve.comm.m2n.bank import Bank, LocalBankLink
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.m2n.routes import LayerRoutes, RouteTable
from afserve.comm.m2n.rows import RowSplit, Splitter
from afserve.comm.m2n.staging import Copy, Stage, stage_for
from afserve.comm.mailbox.wire import name
from afserve.comm.native import native_library
from afserve.comm.transport import HOST, Box, Header, Kind, Layout, Sender, Transport
from afserve.errors import DeadlineError, PeerLost, ProtocolError
from afserve.member import NodeId
from afserve.placement.placement import Placement

__all__ = ["Arrival", "Bank", "ExpertLink", "ExpertPort", "Link", "LocalBankLink", "Part", "Ticket"]

_AnyTicket = TypeVar("_AnyTicket")


class Link(Protocol[_AnyTicket]):
    """What an attention node holds instead of experts.

    Micro-batches call `dispatch`, `ready` and `combine`, which never raise PeerLost: a ticket that a lost peer owes an
    answer stays unready. The node learns of the loss from `lost` and `wait`.
    """

    @property
    def lost(self) -> PeerLost | None:
        """A peer that was found gone and has no successor yet; the first of them."""
        ...

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> _AnyTicket:
        """Send rows on their way; `expert_TK` are logical experts (int32 or int64, -1 = none), weights float32."""
        ...

    def ready(self, ticket: _AnyTicket) -> bool: ...

    def combine(self, ticket: _AnyTicket) -> Tensor:
        """y_TH, float32, of a ticket that is ready; its own until the micro-batch's next dispatch."""
        ...

    def wait(self, tickets: Sequence[_AnyTicket], timeout: float) -> None:
        """Park until a ticket may be ready, at most `timeout` seconds. Raises PeerLost or DeadlineError."""
        ...

    def adopt(self, placement: Placement) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One message of a dispatch."""

    box: Box
    header: Header


@dataclass(slots=True)
class Ticket:
    """One dispatch under way; `missing` are the boxes whose answer is not there yet.

    Its rows are kept until it is combined, to be sent again to a lost node's successor. `leaving` are rows, experts and
    weights that are on their way from a device to the host, from where they are sent.
    """

    layer: int
    micro_batch: int
    rows: int
    deadline: float
    routes: LayerRoutes
    epoch: int
    leaving: Copy | None = None
    split: RowSplit | None = None
    parts: list[Part] = field(default_factory=list)
    missing: list[Box] = field(default_factory=list)


class ExpertLink:
    """Over any transport. `deadline` is how long an answer may take before DeadlineError names who owes it.

    `device` is where rows come from and sums go to, when that is not where the transport's mailboxes are; `stage`
    replaces the way between the two.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        attention: int,
        layout: Layout,
        placement: Placement,
        deadline: float = 30.0,
        clock: Clock | None = None,
        device: torch.device = HOST,
        stage: Stage | None = None,
    ) -> None:
        self._transport = transport
        self._sender = transport if isinstance(transport, Sender) else None
        self._attention = attention
        self._layout = layout
        self._deadline = deadline
        # Whoever waits polls it at least every 50 ms: an answer is not late because this node was stopped.
        self._clock = AwakeClock() if clock is None else clock
        self._native = native_library()
        self._splitter = Splitter(self._native)
        self._device = device
        self._stage = stage or stage_for(device, transport.device)
        self._under_way: dict[int, Ticket] = {}  # by micro-batch
        self._losses: dict[NodeId | str, PeerLost] = {}
        self.lost: PeerLost | None = None  # kept, not derived: the node looks at it before every turn
        self.adopt(placement)

    @property
    def epoch(self) -> int:
        """Of the placement that the next dispatch is routed under."""
        return self._table.epoch

    def adopt(self, placement: Placement) -> None:
        """Route later dispatches by another placement; tickets under way are not touched."""
        where = HOST if self._stage is not None else self._device
        self._table = RouteTable(placement, self._layout.slots, self._native, where)

    def attach(self, expert: int, address: str, timeout: float) -> None:
        """Connect to an expert node that joined, or that came in a lost one's place; `adopt` then sends it rows.

        What its predecessor was sent and nobody has combined is sent to it again, under the same epoch.
        """
        self._transport.attach(expert, address, timeout)
        self._regain(member.expert_node(expert))
        for ticket in self._under_way.values():
            self._send_again(ticket, expert)

    def detach(self, expert: int) -> None:
        """Leave an expert node that the placement no longer names, once nothing is under way to it."""
        self._transport.detach(expert)
        self._regain(member.expert_node(expert))

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> Ticket:
        rows = x_TH.shape[0]
        deadline = self._clock.now() + self._deadline
        table = self._table
        ticket = Ticket(layer, micro_batch, rows, deadline, table.layers[layer], table.epoch)
        if not rows:
            return ticket
        self._under_way[micro_batch] = ticket
        if self._stage is not None:
            ticket.leaving = self._stage.to_host(micro_batch, x_TH, expert_TK, weight_TK)
            self._send_when_there(ticket)
        else:
            self._send_parts(ticket, x_TH, expert_TK, weight_TK)
        return ticket

    def ready(self, ticket: Ticket) -> bool:
        if ticket.leaving is not None:
            self._send_when_there(ticket)
            return False  # nobody can have answered yet
        if ticket.missing:
            for box in self._transport.ready(ticket.missing):
                ticket.missing.remove(box)
        return not ticket.missing

    def wait(self, tickets: Sequence[Ticket], timeout: float) -> None:
        if not tickets or any(self.ready(ticket) for ticket in tickets):
            return
        leaving = next((ticket for ticket in tickets if ticket.leaving is not None), None)
        if leaving is not None:
            assert leaving.leaving is not None
            leaving.leaving.wait()
            self._send_when_there(leaving)
            return
        missing = [box for ticket in tickets for box in ticket.missing]
        for box in missing if self._losses else ():
            if box.expert_node in self._losses:
                raise self._losses[box.expert_node]
        now = self._clock.now()
        for ticket in tickets:
            if now >= ticket.deadline:
                raise DeadlineError(self._overdue(ticket))
        until = min(ticket.deadline for ticket in tickets) - now
        try:
            self._transport.wait(missing, min(timeout, until))
        except PeerLost as error:
            self._lose(error)
            raise

    def combine(self, ticket: Ticket) -> Tensor:
        answered = ticket.leaving is None and not ticket.missing
        assert answered or self.ready(ticket), "combine called on a ticket that is not ready"
        y_TH = self._sum(ticket)
        self._under_way.pop(ticket.micro_batch, None)
        if self._stage is None:
            return y_TH
        (above_TH,) = self._stage.to_device(("sums", ticket.micro_batch), y_TH)
        return above_TH

    def _sum(self, ticket: Ticket) -> Tensor:
        """Where the mailboxes are."""
        if len(ticket.parts) == 1 and ticket.parts[0].header.rows == ticket.rows:
            y_TH = self._answer(ticket.parts[0])
            return y_TH if y_TH.dtype is torch.float32 else y_TH.float()
        where = HOST if self._stage is not None else self._device
        y_TH = torch.zeros((ticket.rows, self._layout.hidden), dtype=torch.float32, device=where)
        for part in ticket.parts:
            assert ticket.split is not None
            ticket.split.add(part.box.expert, self._answer(part), y_TH)
        return y_TH

    def close(self) -> None:
        self._transport.close()

    def _lose(self, error: PeerLost) -> None:
        self._losses.setdefault(error.peer, error)
        self.lost = next(iter(self._losses.values()))

    def _regain(self, node: NodeId) -> None:
        self._losses.pop(node, None)
        self.lost = next(iter(self._losses.values()), None)

    def _send_when_there(self, ticket: Ticket) -> None:
        """Rows of a device are split and sent once they are in host memory."""
        if ticket.leaving is not None and ticket.leaving.done():
            x_TH, expert_TK, weight_TK = ticket.leaving.tensors
            ticket.leaving = None
            self._send_parts(ticket, x_TH, expert_TK, weight_TK)

    def _send_parts(self, ticket: Ticket, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> None:
        split = ticket.split = self._splitter.split(ticket.routes, x_TH, expert_TK, weight_TK)
        for node, count in split.parts():
            box = Box(self._attention, node, ticket.micro_batch)
            ticket.parts.append(self._send(ticket, split, box, count))
            ticket.missing.append(box)

    def _send(self, ticket: Ticket, split: RowSplit, box: Box, rows: int) -> Part:
        """To a node that is gone nothing is sent, `lost` tells it, and `attach` sends the part to its successor."""
        sequence = self._transport.next_sequence(box)
        wire = self._layout.dispatch_wire
        header = Header(Kind.DISPATCH, ticket.epoch, sequence, ticket.layer, rows, wire)
        try:
            if self._sender is not None:
                self._sender.send_part(box, header, split)
            else:
                split.fill(box.expert, self._transport.stage(box, header))
                self._transport.post(box)
        except PeerLost as error:
            self._lose(error)
        return Part(box, header)

    def _send_again(self, ticket: Ticket, expert: int) -> None:
        """To another node in the same place; the order of the parts stays, so the sum does too."""
        for index, part in enumerate(ticket.parts):
            if part.box.expert != expert:
                continue
            assert ticket.split is not None, "a part without rows"
            ticket.parts[index] = self._send(ticket, ticket.split, part.box, part.header.rows)
            if part.box not in ticket.missing:
                ticket.missing.append(part.box)
            ticket.deadline = self._clock.now() + self._deadline

    def _answer(self, part: Part) -> Tensor:
        parcel = self._transport.take(part.box)
        sent, got = part.header, parcel.header
        if (got.epoch, got.layer, got.rows) != (sent.epoch, sent.layer, sent.rows):
            raise ProtocolError(f"{name(part.box)}: {got} does not answer {sent}")
        return parcel.x_RH

    def _overdue(self, ticket: Ticket) -> str:
        who = ", ".join(str(box.expert_node) for box in ticket.missing)
        return (
            f"{who} did not answer layer {ticket.layer} of {member.attention_node(self._attention)}, micro-batch "
            f"{ticket.micro_batch}, within {self._deadline:g} s"
        )
