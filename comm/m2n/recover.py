"""What a link does about lost expert nodes: rows go to replicas at once, or wait until their experts have a home again.

It decides and keeps the books of all tickets; sending and taking are the link's. A box carries one dispatch at a time,
so a message to a node that still owes an earlier answer waits for it.

Shapes: T rows of a dispatch, H hidden size, K top-k.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from afserve import member
from afserve.clock import Clock
from afserve.comm.m2n.routes import RouteTable
from afserve.comm.m2n.rows import RowSplit, Splitter
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.m2n.waves import NEVER, NO_EXPERT, DispatchRecovery, Message, RecoveryStats, Wave, nodes_of
from afserve.comm.transport import Box, Header
from afserve.errors import DispatchRefused, ProtocolError
from afserve.placement.placement import Placement

Send = Callable[[int, int, RowSplit, Box, int], Header]
Answer = Callable[[Box, Header], Tensor]
Refused = Callable[[Box, DispatchRefused], None]


@dataclass(frozen=True, slots=True)
class WaveLoss:
    why: str
    since: float


class Recoveries:
    """Of one attention node. `send` (epoch, layer, split, box, rows) posts; `answer` takes what a box holds; `refused`
    is told of a node that does not compute what it was sent, and is to be lost.

    `deadline` is how many seconds a choice may stay unanswered, and an expert without a home.
    """

    def __init__(
        self,
        *,
        attention: int,
        splitter: Splitter,
        clock: Clock,
        deadline: float,
        send: Send,
        answer: Answer,
        refused: Refused,
    ) -> None:
        self._attention, self._splitter, self._clock, self._deadline = attention, splitter, clock, deadline
        self._send, self._answer, self._refused = send, answer, refused
        self._losses: dict[int, WaveLoss] = {}
        self._given_up: dict[int, dict[int, str]] = {}  # micro-batch -> row of its step -> why
        self._waves = self._resent_rows = self._given_up_rows = self._stalled_tickets = 0
        self._stalled = {"unnoticed": 0.0, "resend": 0.0, "homeless": 0.0}

    def route_by(self, placement: Placement, table: RouteTable) -> None:
        self._placement, self._table = placement, table

    def absent(self, nodes: Iterable[int], why: str) -> None:
        """Expert nodes that are not there; the first reason that was given for one stays."""
        for node in nodes:
            self._losses.setdefault(node, WaveLoss(why, self._clock.now()))

    def lost(self, node: int, why: str) -> None:
        self._losses[node] = WaveLoss(why, self._clock.now())

    def present(self, node: int) -> None:
        self._losses.pop(node, None)

    def displace(self, ticket: Ticket, node: int) -> None:
        """What `node` has answered counts; what it still owes goes elsewhere, or waits for a home."""
        if ticket.rows_given is None:
            ticket.routes, ticket.epoch = self._table.of(ticket.layer), self._table.epoch
            return
        if ticket.recovery is None and all(part.box.expert != node for part in ticket.parts):
            return
        with torch.inference_mode():  # as the micro-batches, whose tensors it adds to
            recovery = self._of(ticket)
            for message in recovery.answered_messages(ticket.missing):
                if message.box.expert == node:
                    self._add_if_sound(recovery, message)
            ticket.missing = [box for box in ticket.missing if box.expert != node]
            back_TK = recovery.displace(node)
            if back_TK is not None:
                self._route(ticket, recovery, back_TK)

    def keep_homeless(self, ticket: Ticket) -> None:
        """Choices of a new dispatch that the table sends nowhere."""
        assert ticket.rows_given is not None
        homeless_TK = ticket.routes.homeless(ticket.rows_given[1])
        if homeless_TK is None:
            return
        with torch.inference_mode():
            recovery = self._of(ticket)
            recovery.keep_homeless(torch.where(homeless_TK, recovery.expert_TK, NO_EXPERT))
        self.rehome(ticket)  # rows of a device may be routed by a table that another one has followed

    def rehome(self, ticket: Ticket) -> None:
        """The table has changed: send what waited for it."""
        recovery = ticket.recovery
        if recovery is None:
            return
        with torch.inference_mode():
            homeless_TK = recovery.take_homeless()
            if homeless_TK is not None:
                self._route(ticket, recovery, homeless_TK)
        self.advance(ticket)

    def advance(self, ticket: Ticket) -> bool:
        """Take answers, send what had to wait, give up what is overdue; whether nothing is left to wait for."""
        if ticket.recovery is None or not ticket.recovery.recovered:
            with torch.inference_mode():
                return self._advance(ticket, self._of(ticket))
        return True

    def _advance(self, ticket: Ticket, recovery: DispatchRecovery) -> bool:
        for message in recovery.answered_messages(ticket.missing):
            try:
                self._add(recovery, message)
            except DispatchRefused as refused:
                ticket.missing.append(message.box)
                self._refused(message.box, refused)
        now = self._clock.now()
        self._give_up(ticket, recovery, now)
        for message in recovery.sendable():
            wave, box = message.wave, message.box
            message.header = self._send(wave.epoch, ticket.layer, wave.split, box, message.rows)
            message.sent = now
            ticket.missing.append(box)
        ticket.deadline = self._due(ticket, recovery)
        if recovery.recovered:
            self._count(recovery, now)
        return recovery.recovered

    def unanswered(self, ticket: Ticket) -> Iterator[tuple[int, float]]:
        """(expert node, when it was sent what it has not answered) of a ticket that is under way."""
        if ticket.recovery is None:
            for box in ticket.missing:
                yield box.expert, ticket.deadline - self._deadline
        else:
            for message in ticket.recovery.messages:
                if message.header is not None and message.box in ticket.missing:
                    yield message.box.expert, message.sent

    def take_given_up(self, micro_batch: int) -> dict[int, str]:
        """Why rows have no sum, by their number in the dispatch, since the last call."""
        return self._given_up.pop(micro_batch, {})

    def stats(self) -> RecoveryStats:
        stalled = dict(self._stalled)
        return RecoveryStats(
            self._waves, self._resent_rows, self._given_up_rows, stalled, self._stalled_tickets
        )

    def _of(self, ticket: Ticket) -> DispatchRecovery:
        """The ticket's, which begins here with the messages that are under way."""
        if ticket.recovery is None:
            assert ticket.rows_given is not None and ticket.split is not None, "a ticket that sent nothing"
            x_TH, expert_TK, weight_TK = ticket.rows_given
            since = ticket.deadline - self._deadline
            first = Wave(expert_TK, ticket.routes, ticket.epoch, ticket.split)
            messages = [
                Message(first, part.box, part.header.rows, since, since, part.header) for part in ticket.parts
            ]
            y_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
            ticket.recovery = DispatchRecovery(
                x_TH, expert_TK, weight_TK, y_TH, since, self._clock.now(), messages
            )
            self._keep(ticket, ticket.recovery)
        return ticket.recovery

    def _keep(self, ticket: Ticket, recovery: DispatchRecovery) -> None:
        """Answers that were taken already are in the sum."""
        for message in [m for m in recovery.messages if m.box in ticket.answers]:
            recovery.add(message, ticket.answers[message.box])
        ticket.answers.clear()

    def _route(self, ticket: Ticket, recovery: DispatchRecovery, expert_TK: Tensor) -> None:
        """One more wave, by the table of now; NO_EXPERT where a choice is not concerned."""
        routes = self._table.of(ticket.layer)
        homeless_TK = routes.homeless(expert_TK)
        if homeless_TK is not None:
            recovery.keep_homeless(torch.where(homeless_TK, expert_TK, NO_EXPERT))
            expert_TK = torch.where(homeless_TK, NO_EXPERT, expert_TK)
        nodes = nodes_of(routes, recovery.x_TH, expert_TK)
        if not nodes:
            return
        self._waves += 1
        now = self._clock.now()
        split = self._splitter.split(routes, recovery.x_TH, expert_TK, recovery.weight_TK)
        wave = Wave(expert_TK, routes, self._table.epoch, split)
        for node, rows in split.parts():
            if node in nodes:
                box = Box(self._attention, node, ticket.micro_batch)
                recovery.messages.append(Message(wave, box, rows, now))
                self._resent_rows += rows

    def _add(self, recovery: DispatchRecovery, message: Message) -> None:
        assert message.header is not None, "an answer to what was not sent"
        recovery.add(message, self._answer(message.box, message.header))

    def _add_if_sound(self, recovery: DispatchRecovery, message: Message) -> None:
        """Of a node that is lost: what it refused, or answered wrongly, is asked elsewhere."""
        try:
            self._add(recovery, message)
        except ProtocolError:
            return

    def _give_up(self, ticket: Ticket, recovery: DispatchRecovery, now: float) -> None:
        before = len(recovery.given_up)
        for message in [m for m in recovery.messages if now - m.since >= self._deadline]:
            if message.header is not None and message.box in ticket.missing:
                ticket.missing.remove(message.box)
            recovery.give_up_message(message, partial(self._silent, str(message.box.expert_node)))
        late = [e for e in recovery.homeless_experts if now >= self._homeless_until(ticket.layer, e)]
        if late:
            recovery.give_up_homeless(late, partial(self._homeless, ticket.layer))
        if len(recovery.given_up) > before:
            self._given_up_rows += len(recovery.given_up) - before
            known = self._given_up.setdefault(ticket.micro_batch, {})
            for row, why in recovery.given_up.items():
                known.setdefault(row, why)

    def _due(self, ticket: Ticket, recovery: DispatchRecovery) -> float:
        """When something has to be given up next."""
        messages = min((m.since + self._deadline for m in recovery.messages), default=NEVER)
        experts = (self._homeless_until(ticket.layer, e) for e in recovery.homeless_experts)
        return min(messages, min(experts, default=NEVER))

    def _homeless_until(self, layer: int, expert: int) -> float:
        """It has been homeless since the last of its nodes was lost."""
        return self._deadline + max((loss.since for _, loss in self._homes(layer, expert)), default=0.0)

    def _homes(self, layer: int, expert: int) -> list[tuple[str, WaveLoss]]:
        """The nodes that the placement gives an expert, all of them absent."""
        placed = self._placement.layers
        nodes = (node for node, _, _ in placed[layer if layer < len(placed) else 0].replicas(expert))
        return [(str(member.expert_node(node)), self._losses[node]) for node in nodes if node in self._losses]

    def _silent(self, node: str, expert: int) -> str:
        return f"{node} did not answer for expert {expert} within {self._deadline:g} s"

    def _homeless(self, layer: int, expert: int) -> str:
        homes = "; ".join(f"{node}: {loss.why}" for node, loss in self._homes(layer, expert))
        return f"expert {expert} was on no node for {self._deadline:g} s ({homes})"

    def _count(self, recovery: DispatchRecovery, now: float) -> None:
        self._stalled_tickets += 1
        self._stalled["unnoticed"] += max(0.0, recovery.noticed - recovery.since)
        self._stalled["homeless" if recovery.was_homeless else "resend"] += now - recovery.noticed
