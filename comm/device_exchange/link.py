"""A link whose rows the device sends by itself: one short message opens the exchange of a step at each expert node, and
from then on kernels of both ends send and await all layers of it.

A step goes so while every expert node is there and every expert has a home. Else, and where a node falls silent, dies
or refuses in the middle, the rest of the step gives NaN at once and `held` says no: whoever runs steps runs that one
again, whose rows then go by messages as in `ExpertLink`. So losses, replicas, refusals and epochs have one place.

An opening is a dispatch without rows whose header says for how many layers it is (`Header.call`). Messages of the
exchange are numbered from the opening's own number on, so both ends agree on every number, also after a step that was
given up in the middle.

Shapes: T rows of a micro-batch, N expert nodes, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from afserve.comm.device_exchange.ends import Boxes, Patience, SymmAttention, SymmTicket
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.routes import RouteTable
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.m2n.unrecorded import Fold
from afserve.comm.transport import Box, Header, Kind, SharingRegions
from afserve.errors import DispatchRefused, PeerLost

MOST_LAYERS = 1 << 10  # of a step: its messages' numbers begin at so many times the opening's number
_LOOK_SECONDS = 1e-3  # that a wait parks on connections before it looks at memory again


@dataclass(slots=True, eq=False)
class _Step:
    """Of one micro-batch. `opened` are the boxes whose answer to the opening is not there; `why` it failed, or ""."""

    front: SymmAttention
    table: RouteTable
    boxes: tuple[Box, ...]
    opened: list[Box]
    since: float = 0.0
    next_layer: int = 0
    why: str = ""
    prepared: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """Boxes and routes whose addresses recorded launches have."""

    front: SymmAttention
    table: RouteTable


@dataclass(frozen=True, slots=True)
class _Exchanged:
    step: _Step
    sent: SymmTicket | None = field(default=None)


class DeviceLink(ExpertLink):
    """`regions` is what the transport offers. Everything that is not a step of all layers goes as in `ExpertLink`."""

    def __init__(self, *args: object, regions: SharingRegions, patience: Patience, **kwargs: object) -> None:
        self._regions, self._patience = regions, patience
        self._fronts: dict[int, SymmAttention] = {}
        self._steps: dict[int, _Step] = {}
        self._ways: dict[int, _Way] = {}
        self._again: set[int] = set()  # micro-batches whose step is run again
        self.exchanged_steps = self.failed_steps = 0
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        assert 0 < self._layout.exchange < MOST_LAYERS, f"steps of {self._layout.exchange} layers"
        layer_L = torch.arange(self._layout.exchange, dtype=torch.int32)
        self._stamps = functional.pad(layer_L[:, None], (0, 3)).to(self._device).unbind()  # 16 bytes a layer

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> Ticket:
        step, rows = self._steps.get(micro_batch), x_TH.shape[0]
        if layer == 0 and rows:
            step = step if step is not None and step.prepared else self._open(micro_batch)
            if step is not None:
                step.next_layer = 0
        if step is None or layer >= self._layout.exchange or not rows:
            return super().dispatch(x_TH, expert_TK, weight_TK, layer=layer, micro_batch=micro_batch)
        routes, deadline = step.table.layers[layer], self._clock.now() + self._deadline
        ticket = Ticket(layer, micro_batch, rows, deadline, routes, step.table.epoch)
        assert step.why or layer == step.next_layer, f"layer {layer} after {step.next_layer - 1}"
        sent = None if step.why else self._send(step, x_TH, expert_TK, weight_TK, layer)
        ticket.exchanged = _Exchanged(step, sent)
        return ticket

    def ready(self, ticket: Ticket) -> bool:
        exchanged = ticket.exchanged
        if not isinstance(exchanged, _Exchanged):
            return super().ready(ticket)
        step = exchanged.step
        self._look(step)
        if not step.why and self._clock.now() >= ticket.deadline:
            self._fail(step, "an answer did not come in time")
        return bool(step.why) or step.front.is_there(0)

    def wait(self, tickets: Sequence[Ticket], timeout: float) -> None:
        steps = [one.exchanged.step for one in tickets if isinstance(one.exchanged, _Exchanged)]
        if not steps:
            super().wait(tickets, timeout)
            return
        if any(self.ready(ticket) for ticket in tickets):
            return
        try:
            self._transport.wait([box for step in steps for box in step.boxes], min(timeout, _LOOK_SECONDS))
        except PeerLost as error:
            self._broken.append(error)
            self._settle()

    def combine(self, ticket: Ticket) -> Tensor:
        exchanged = ticket.exchanged
        if not isinstance(exchanged, _Exchanged):
            return super().combine(ticket)
        step = exchanged.step
        if step.why or exchanged.sent is None:
            shape = ticket.rows, self._layout.hidden
            return torch.full(shape, float("nan"), dtype=torch.float32, device=self._device)
        return step.front.combine(exchanged.sent)

    def folding(self, ticket: Ticket) -> Fold | None:
        exchanged = ticket.exchanged
        if not isinstance(exchanged, _Exchanged) or exchanged.sent is None:
            return None
        return partial(self._fold, exchanged.step, exchanged.sent)

    @staticmethod
    def _fold(
        step: _Step,
        sent: SymmTicket,
        x_TH: Tensor,
        shared_TH: Tensor | None,
        bad_T: Tensor | None,
        layer: int,
    ) -> None:
        if step.why:
            x_TH.fill_(float("nan"))  # the step is run again
        else:
            step.front.fold_sums(sent, x_TH, shared_TH, bad_T, layer)

    def prepare(self, micro_batch: int) -> object | None:
        step = self._open(micro_batch)
        if step is None:
            return None
        step.prepared, way = True, self._ways.get(micro_batch)
        if way is None or way.front is not step.front or way.table is not step.table:
            way = self._ways[micro_batch] = _Way(step.front, step.table)
        return way

    def replayed(self, micro_batch: int) -> None:
        step = self._steps[micro_batch]
        step.next_layer, step.since = self._layout.exchange, self._clock.now()
        step.front.waits_here()

    def held(self, micro_batch: int, *, done: bool = False) -> bool:
        self._again.discard(micro_batch)
        step = self._steps.pop(micro_batch, None)
        if step is None:
            return True
        if not step.why and step.next_layer < self._layout.exchange:
            done = False
        while not step.why and step.next_layer < self._layout.exchange:  # layers of which no row was read
            self._send_nothing(step)
        self._look(step)
        if not step.why and step.front.wait_failed(done=done):
            step.why = "an expert node did not answer its device"
        self.exchanged_steps += 1
        if step.why:
            self.failed_steps += 1
            self._again.add(micro_batch)
        return not step.why

    def oldest_epoch(self) -> int | None:
        epochs = [step.table.epoch for step in self._steps.values()]
        before = super().oldest_epoch()
        return min([*epochs, *([] if before is None else [before])], default=None)

    def _unanswered(self) -> dict[int, float]:
        found = super()._unanswered()
        for step in self._steps.values():
            self._look(step)
            if not step.why and not step.front.is_there(0):
                found |= {
                    box.expert: min(found.get(box.expert, step.since), step.since) for box in step.boxes
                }
        return found

    def _route_around(self) -> None:
        """Nodes have come or gone, or a placement was adopted: steps that are open stay under theirs."""
        super()._route_around()
        self._fronts.clear()
        for step in self._steps.values():
            if gone := {box.expert for box in step.boxes} - self._attached:
                self._fail(step, f"expert node {min(gone)} is lost")

    def _open(self, micro_batch: int) -> _Step | None:
        """None where rows have to go by messages."""
        table = self._table
        self._steps.pop(micro_batch, None)
        usable = not self._broken and micro_batch not in self._under_way and micro_batch not in self._again
        if not usable or any(one.absent or one.homeless_E is not None for one in table.layers):
            return None
        boxes = tuple(Box(self._attention, node, micro_batch) for node in range(table.nodes))
        front = self._front(micro_batch, boxes)
        if front is None:
            return None
        step = self._steps[micro_batch] = _Step(front, table, boxes, [])
        numbers = [self._announce(step, box) for box in boxes]
        front.begin([number * MOST_LAYERS for number in numbers])
        if self._broken:
            self._settle()  # which fails it
        return step

    def _front(self, micro_batch: int, boxes: Sequence[Box]) -> SymmAttention | None:
        if micro_batch not in self._fronts:
            regions = [self._regions.region(box) for box in boxes]
            there = [region for region in regions if region is not None]
            if len(there) < len(regions):
                return None
            own, peer, keepers = zip(*there, strict=True)
            made = Boxes.at(own, peer, self._device, keepers)
            self._fronts[micro_batch] = SymmAttention(self._layout, [made], self._patience)
        return self._fronts[micro_batch]

    def _announce(self, step: _Step, box: Box) -> int:
        """The number of the opening."""
        number, layout = self._transport.next_sequence(box), self._layout
        header = Header(
            Kind.DISPATCH, step.table.epoch, number, 0, 0, layout.dispatch_wire, call=layout.exchange
        )
        try:
            self._transport.stage(box, header)
            self._transport.post(box)
            step.opened.append(box)
        except PeerLost as error:
            self._broken.append(error)
        return number

    def _send(
        self, step: _Step, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, layer: int
    ) -> SymmTicket:
        step.next_layer, step.since = layer + 1, self._clock.now()
        stamp, routes = self._stamps[layer], step.table.layers[layer]
        return step.front.dispatch(x_TH, expert_TK, weight_TK, stamp, 0, routes)

    def _send_nothing(self, step: _Step) -> None:
        layout, device = self._layout, self._device
        x_TH = torch.empty((0, layout.hidden), dtype=layout.dispatch_wire.dtype, device=device)
        none_TK = torch.empty((0, layout.top_k), dtype=torch.int32, device=device)
        self._send(step, x_TH, none_TK, none_TK.float(), step.next_layer)

    def _look(self, step: _Step) -> None:
        """At answers to its opening. A node that refuses is lost, as with any dispatch."""
        for box in self._transport.ready(step.opened) if step.opened and not step.why else ():
            step.opened.remove(box)
            try:
                self._transport.take(box)
            except DispatchRefused as refused:
                self._refused(box, refused)
        if self._broken:
            self._settle()

    def _fail(self, step: _Step, why: str) -> None:
        if not step.why:
            step.why = why
            step.front.abort()
        self._fronts.clear()
