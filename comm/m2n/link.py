"""The attention side of M2N: sends rows to the expert nodes that hold their experts, and adds the partial sums.

A row is sent once to each expert node that holds any of its chosen slots. `combine` adds partial sums in float32 in the
order of the expert nodes, so the sum does not depend on who answers first. What happens to the rows of a node that is
lost is in `recover.py`. It knows placements; it knows no sockets. Shapes: T rows of a micro-batch, R rows of one
message, H hidden size, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.clock import AwakeClock, Clock
from afserve.comm.m2n.called import CalledRows
from afserve.comm.m2n.exchanges import Exchanges
from afserve.comm.m2n.near import Near
from afserve.comm.m2n.recover import Recoveries
from afserve.comm.m2n.routes import RouteTable
from afserve.comm.m2n.rows import RowSplit, Splitter, fused_on
from afserve.comm.m2n.staging import Stage, stage_for
from afserve.comm.m2n.ticket import Given, Part, Ticket
from afserve.comm.m2n.unrecorded import Unrecorded
from afserve.comm.m2n.waves import RecoveryStats
from afserve.comm.mailbox.wire import name
from afserve.comm.native import native_library
from afserve.comm.transport import HOST, Box, Dialled, Header, Kind, Layout, Transport
from afserve.errors import DispatchRefused, PeerLost, ProtocolError
from afserve.kernels.stack import Exchange
from afserve.member import NodeId
from afserve.placement.placement import Placement


class ExpertLink(Unrecorded):
    """Over any transport. `deadline` is how many seconds an answer may take, and an expert may be on no node.
    `device` is where rows come from and sums go to; `stage` replaces the way between it and the transport's mailboxes.
    `near`: which replicas are to be preferred.
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
        near: Near | None = None,
    ) -> None:
        self._transport = transport
        self._sender, self._limiting = transport.offers.sender, transport.offers.limiting
        self._attention = attention
        self._layout, self._near = layout, near
        # whoever waits polls it every 50 ms: no answer is late as this node was stopped
        self._deadline = deadline
        self._clock = AwakeClock() if clock is None else clock
        self._native, self._device = native_library(), device
        self._splitter = Splitter(self._native, fused_on(device))
        self._stage = stage or stage_for(device, transport.device)
        self._under_way: dict[int, Ticket] = {}  # by micro-batch
        self._attached = {box.expert for box in transport.boxes()}
        self.called = CalledRows()
        self._exchanges = Exchanges(transport, attention, self.called)
        self._broken: list[PeerLost] = []  # met while sending, not yet acted upon
        self._recoveries = Recoveries(
            attention=attention,
            splitter=self._splitter,
            clock=self._clock,
            deadline=deadline,
            send=self._post,
            answer=self._answer,
            refused=self._refused,
        )
        self.adopt(placement)

    @property
    def epoch(self) -> int:
        """Of the placement that the next dispatch is routed under."""
        return self._table.epoch

    def adopt(self, placement: Placement) -> None:
        """Route later dispatches by another placement. Of those under way it concerns rows that had nowhere to go."""
        self._placement = placement
        self._reroute()

    def limit(self, rows: int) -> None:
        """Also of the expert nodes that are attached later."""
        if self._limiting is not None:
            self._limiting.limit(self._attention, rows)

    def lose(self, expert: int, why: str) -> None:
        """Whatever an expert node still owes is asked of other nodes, or waits until its experts have a home again."""
        if expert not in self._attached:
            return
        self._attached.discard(expert)
        self._recoveries.lost(expert, why)
        for ticket in self._under_way.values():
            for box in self._transport.ready([box for box in ticket.missing if box.expert == expert]):
                ticket.missing.remove(box)
        self._route_around()
        for ticket in self._under_way.values():
            self._recoveries.displace(ticket, expert)
        self._transport.detach(expert)
        self._go_on()

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        return self._transport.dial(expert, address, timeout)

    def attach(self, dialled: Dialled) -> None:
        """Send rows to an expert node that joined, or came in a lost one's place.

        It has to hold what the placement in force, and any later one, says of it.
        """
        self.lose(dialled.expert, "another node has taken its place")
        self._transport.attach(dialled)
        self._attached.add(dialled.expert)
        self._recoveries.present(dialled.expert)
        self._reroute()

    def detach(self, expert: int) -> None:
        """Leave an expert node that the placement no longer names."""
        self.lose(expert, "it has left")

    @property
    def present(self) -> frozenset[int]:
        return frozenset(self._attached)

    def oldest_epoch(self) -> int | None:
        return min((epoch for ticket in self._under_way.values() for epoch in ticket.epochs()), default=None)

    def owing(self) -> dict[int, float]:
        return {expert: self._clock.now() - sent for expert, sent in self._unanswered().items()}

    def _unanswered(self) -> dict[int, float]:
        """When the oldest message was sent that an expert node has not answered."""
        found = dict[int, float]()
        for ticket in self._under_way.values():
            self.ready(ticket)
            for expert, sent in self._recoveries.unanswered(ticket):
                found[expert] = min(found.get(expert, sent), sent)
        return found

    def recovery(self) -> RecoveryStats:
        return self._recoveries.stats()

    def take_given_up(self, micro_batch: int) -> dict[int, str]:
        return self._recoveries.take_given_up(micro_batch)

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> Ticket:
        ticket = self._ticket(layer, micro_batch, len(x_TH))
        if not ticket.rows:
            return ticket
        self._under_way[micro_batch] = ticket
        if self._stage is not None:
            ticket.leaving = self._stage.to_host(micro_batch, x_TH, expert_TK, weight_TK)
            self._send_when_there(ticket)
        else:
            self._send_parts(ticket, x_TH, expert_TK, weight_TK)
        return ticket

    def _ticket(self, layer: int, micro_batch: int, rows: int) -> Ticket:
        table, deadline = self._table, self._clock.now() + self._deadline
        return Ticket(layer, micro_batch, rows, deadline, table.of(layer), table.epoch)

    @property
    def packed(self) -> None:
        return None

    @property
    def exchanging(self) -> "ExpertLink | None":
        return self if self._exchanges.offered and self._stage is None else None

    def exchange(self, micro_batch: int, layers: int) -> Exchange | None:
        """As `ExchangingLink`."""
        if self._broken or micro_batch in self._under_way:
            return None
        return self._exchanges.of(micro_batch, layers, self._table)

    def settle(self, micro_batch: int, layer: int = 0, stopped: Given | None = None) -> Ticket | None:
        """As `ExchangingLink`."""
        headers = self._exchanges.settle(micro_batch, self._table)
        if stopped is None:
            return None
        ticket = self._ticket(layer, micro_batch, len(stopped[0]))
        ticket.rows_given = stopped
        split = ticket.split = self._splitter.split(ticket.routes, *stopped)
        for node, count in split.parts():
            box, header = headers[node]
            ticket.parts.append(Part(box, header._replace(layer=layer, rows=count)))
            ticket.missing.append(box)
        self._under_way[micro_batch] = ticket
        return ticket

    def ready(self, ticket: Ticket) -> bool:
        if ticket.leaving is not None:
            self._send_when_there(ticket)
            return False  # nobody can have answered yet
        if ticket.missing:
            for box in self._transport.ready(ticket.missing):
                ticket.missing.remove(box)
        if ticket.recovery is not None:
            return self._recovered(ticket)
        if ticket.missing:
            return False
        return len(ticket.answers) == len(ticket.parts) or self._take_answers(ticket)

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
        now = self._clock.now()
        late = [ticket for ticket in tickets if now >= ticket.deadline]
        if late:
            for ticket in late:
                self._recoveries.advance(ticket)
            self._settle()
            return
        until = min(ticket.deadline for ticket in tickets) - now
        try:
            self._transport.wait(missing, min(timeout, until))
        except PeerLost as error:
            self._broken.append(error)
            self._settle()

    def combine(self, ticket: Ticket) -> Tensor:
        assert self.ready(ticket), "combine called on a ticket that is not ready"
        y_TH = self._sum(ticket)
        self._under_way.pop(ticket.micro_batch, None)
        return y_TH if self._stage is None else self._stage.to_device(("sums", ticket.micro_batch), y_TH)[0]

    def _sum(self, ticket: Ticket) -> Tensor:
        """Where the mailboxes are."""
        if ticket.recovery is not None:
            return ticket.recovery.y_TH
        if len(ticket.parts) == 1 and ticket.parts[0].header.rows == ticket.rows:
            return ticket.answers[ticket.parts[0].box].float()
        where = HOST if self._stage is not None else self._device
        y_TH = torch.zeros((ticket.rows, self._layout.hidden), dtype=torch.float32, device=where)
        for part in ticket.parts:
            assert ticket.split is not None
            ticket.split.add(part.box.expert, ticket.answers[part.box], y_TH)
        return y_TH

    def close(self) -> None:
        self._transport.close()

    def _take_answers(self, ticket: Ticket) -> bool:
        """Whether all parts were computed. A node that refused its part is lost: other nodes are asked, or it is again
        when it has been dialled anew, by the placement that is known by then."""
        for part in ticket.parts:
            try:
                ticket.answers[part.box] = self._answer(part.box, part.header)
            except DispatchRefused as refused:
                ticket.missing.append(part.box)
                self._refused(part.box, refused)
        if not ticket.missing:
            return True
        self._settle()
        return self._recovered(ticket)

    def _refused(self, box: Box, refused: DispatchRefused) -> None:
        self._broken.append(PeerLost(box.expert_node, refused.message))

    def _recovered(self, ticket: Ticket) -> bool:
        done = self._recoveries.advance(ticket)
        self._settle()
        return done

    def _settle(self) -> None:
        """Act on the losses that were met; what is sent again may meet more."""
        while self._broken:
            error = self._broken.pop()
            assert isinstance(error.peer, NodeId), "an attention node has expert nodes as peers only"
            self.lose(error.peer.index, error.reason)

    def _reroute(self) -> None:
        self._route_around()
        for ticket in self._under_way.values():
            self._recoveries.rehome(ticket)
        self._settle()

    def _route_around(self) -> None:
        """A table of the placement in force without the nodes that are not there."""
        absent = frozenset(range(self._placement.nodes)) - self._attached
        where = HOST if self._stage is not None else self._device
        self._table = RouteTable(self._placement, self._layout.slots, self._native, where, absent, self._near)
        self._exchanges.clear()
        self._recoveries.absent(absent, "it has not joined")
        self._recoveries.route_by(self._placement, self._table)

    def _go_on(self) -> None:
        for ticket in self._under_way.values():
            if ticket.recovery is not None:
                self._recoveries.advance(ticket)
        self._settle()

    def _send_when_there(self, ticket: Ticket) -> None:
        """Rows of a device are split and sent once they are in host memory."""
        if ticket.leaving is not None and ticket.leaving.copied():
            x_TH, expert_TK, weight_TK = ticket.leaving.tensors
            ticket.leaving = None
            self._send_parts(ticket, x_TH, expert_TK, weight_TK)

    def _send_parts(self, ticket: Ticket, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> None:
        ticket.rows_given = x_TH, expert_TK, weight_TK
        split = ticket.split = self._splitter.split(ticket.routes, x_TH, expert_TK, weight_TK)
        for node, count in split.parts():
            box = Box(self._attention, node, ticket.micro_batch)
            ticket.parts.append(Part(box, self._post(ticket.epoch, ticket.layer, split, box, count)))
            ticket.missing.append(box)
        if ticket.routes.homeless_E is not None:
            self._recoveries.keep_homeless(ticket)
        if self._broken:
            self._settle()

    def _post(self, epoch: int, layer: int, split: RowSplit, box: Box, rows: int) -> Header:
        """A node that is gone is sent nothing; the loss is acted upon once all other messages are sent."""
        sequence = self._transport.next_sequence(box)
        header = Header(Kind.DISPATCH, epoch, sequence, layer, rows, self._layout.dispatch_wire)
        try:
            if self._sender is not None:
                self._sender.send_part(box, header, split)
            else:
                split.fill(box.expert, self._transport.stage(box, header))
                self._transport.post(box)
        except PeerLost as error:
            self._broken.append(error)
        return header

    def _answer(self, box: Box, sent: Header) -> Tensor:
        parcel = self._transport.take(box)
        got = parcel.header
        if (got.epoch, got.layer, got.rows) != (sent.epoch, sent.layer, sent.rows):
            raise ProtocolError(f"{name(box)}: {got} does not answer {sent}")
        self.called.note_answer(box.micro_batch, got.rows, got.call)
        return parcel.x_RH
