"""An expert node's side of steps whose rows devices send by themselves (`link.py`).

Each box has its own end, so a step of one attention node waits for no other one. In host memory a box is served as far
as its messages are there; on a device all layers of a step are launched at once, and the device waits. The next message
on a box ends whatever was open there. It knows no requests and no placements.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from afserve.comm.device_exchange.ends import Boxes, Patience, SymmExpert
from afserve.comm.device_exchange.link import MOST_LAYERS
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.transport import Box, SharedRegion, SharingRegions, Transport
from afserve.errors import PeerLost
from afserve.member import NodeId

Inside = Callable[[Box], AbstractContextManager[None]]
_GLANCE = 50e-6  # seconds between two looks at memory while a step is open


class SteppingPort(ExpertPort):
    """`inside` says in which queue of a device a box's kernels are launched."""

    def __init__(
        self,
        transport: Transport,
        regions: SharingRegions,
        bank: Bank,
        patience: Patience,
        inside: Inside | None = None,
    ) -> None:
        super().__init__(transport, device=transport.device)
        self._regions, self._bank, self._device = regions, bank, transport.device
        self._patience, self._inside = patience, inside or (lambda _: nullcontext())
        self._ends: dict[Box, tuple[SharedRegion, SymmExpert]] = {}
        self._open: dict[Box, Iterator[None]] = {}

    def poll(self) -> list[Arrival]:
        """Goes on with every open step, too, as far as its rows are there."""
        for box, serving in list(self._open.items()):
            with self._inside(box):
                if next(serving, self) is self:
                    self._open.pop(box, None)
        arrivals = super().poll()
        for arrival in arrivals:
            self._close_step(arrival.box)
        return arrivals

    def opens_step(self, arrival: Arrival) -> bool:
        box, header = arrival.box, arrival.header
        if header.rows or not header.call:
            return False
        region, most = self._regions.region(box), self.layout.exchange
        if region is None or header.call > most:
            self.refuse(box, f"{box.attention_node} opens a step of {header.call} layers, at most {most}")
            return True
        with self._inside(box):
            end = self._end(box, region)
            end.begin([header.sequence * MOST_LAYERS])
        self._open[box] = self._serve(end, header.call)
        self.reply(arrival)
        self.send(arrival)
        return True

    def wait(self, timeout: float) -> bool:
        try:
            return super().wait(min(timeout, _GLANCE) if self._open else timeout)
        except PeerLost as lost:
            self._forget(lost)
            raise

    def _forget(self, lost: PeerLost) -> None:
        assert isinstance(lost.peer, NodeId), "an expert node has attention nodes as peers only"
        for box in [box for box in self._ends if box.attention == lost.peer.index]:
            self._close_step(box)
            del self._ends[box]

    def _close_step(self, box: Box) -> None:
        """Whatever is open there waits no longer."""
        if self._open.pop(box, None) is not None:
            self._ends[box][1].abort()

    def _end(self, box: Box, region: SharedRegion) -> SymmExpert:
        """A node that came in another one's place brings other memory."""
        known = self._ends.get(box)
        if known is None or known[0].keeper is not region.keeper:
            boxes = Boxes.at([region.own], [region.peer], self._device, region.keeper)
            known = self._ends[box] = region, SymmExpert(self.layout, [boxes], self._patience)
        return known[1]

    def _serve(self, end: SymmExpert, layers: int) -> Iterator[None]:
        """All layers of a step in the same memory."""
        shape, dtype = (self.layout.max_rows, self.layout.hidden), self.layout.combine_wire.dtype
        y_NH, arrival = torch.empty(shape, dtype=dtype, device=self._device), None
        for layer in range(layers):
            while not end.is_there(0):
                yield
            arrival = end.receive(0, arrival)
            self._bank.forward(layer, arrival.x_NH, arrival.slot_NK, arrival.weight_NK, y_NH)
            end.answer(arrival, y_NH)
            self.exchanged += 1
