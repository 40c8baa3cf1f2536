"""An expert node's side of steps whose rows devices send by themselves (`link.py`).

Each box has its own end, so a step of one attention node waits for no other one. In host memory a box is served as far
as its messages are there; on a device all layers of a step are launched at once, and the device waits. Where launches
are recorded, they are one from the second step on. The next message on a box ends whatever was open there. It knows no
requests and no placements.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from afserve.comm.device_exchange.ends import Boxes, Patience, SymmExpert
from afserve.comm.device_exchange.link import MOST_LAYERS
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.transport import Box, SharedRegion, SharingRegions, Transport
from afserve.errors import PeerLost
from afserve.kernels.devices.device import Device
from afserve.member import NodeId

log = logging.getLogger("afserve.comm")
Inside = Callable[[Box], AbstractContextManager[None]]
_GLANCE = 50e-6  # seconds between two looks at memory while a step is open
_MOST_RECORDED = 4  # of a box, by layers of a step: the model's, and those that draft


@dataclass(frozen=True, slots=True)
class _BoxEnd:
    """replays: what launches a step of so many layers as one; None before its second step."""

    region: SharedRegion
    end: SymmExpert
    replays: dict[int, Callable[[], None] | None] = field(default_factory=dict)


class SteppingPort(ExpertPort):
    """`inside` says in which queue of a device a box's kernels are launched; `recorder` is the device where what a step
    launches is recorded."""

    def __init__(
        self,
        transport: Transport,
        regions: SharingRegions,
        bank: Bank,
        patience: Patience,
        inside: Inside | None = None,
        recorder: Device | None = None,
    ) -> None:
        super().__init__(transport, device=transport.device)
        self._regions, self._bank, self._device = regions, bank, transport.device
        self._patience, self._inside = patience, inside or (lambda _: nullcontext())
        self._recorder = recorder
        self._ends: dict[Box, _BoxEnd] = {}
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
            known = self._end(box, region)
            known.end.begin([header.sequence * MOST_LAYERS])
        self._open[box] = self._serve(known, header.call)
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
            self._ends[box].end.abort()

    def _end(self, box: Box, region: SharedRegion) -> _BoxEnd:
        """A node that came in another one's place brings other memory."""
        known = self._ends.get(box)
        if known is None or known.region.keeper is not region.keeper:
            boxes = Boxes.at([region.own], [region.peer], self._device, region.keeper)
            known = self._ends[box] = _BoxEnd(region, SymmExpert(self.layout, [boxes], self._patience))
        return known

    def _serve(self, known: _BoxEnd, layers: int) -> Iterator[None]:
        while not known.end.is_there(0):
            yield
        if not self._launch_as_one(known, layers):
            yield from self._launch_each(known.end, layers)
        self.exchanged += layers

    def _launch_each(self, end: SymmExpert, layers: int) -> Iterator[None]:
        """All layers of a step in the same memory."""
        shape, dtype = (self.layout.max_rows, self.layout.hidden), self.layout.combine_wire.dtype
        y_NH, arrival = torch.empty(shape, dtype=dtype, device=self._device), None
        for layer in range(layers):
            while not end.is_there(0):
                yield
            arrival = end.receive(0, arrival)
            self._bank.forward(layer, arrival.x_NH, arrival.slot_NK, arrival.weight_NK, y_NH)
            end.answer(arrival, y_NH)

    def _launch_as_one(self, known: _BoxEnd, layers: int) -> bool:
        """Whether they were. The first step of so many layers compiles and loads kernels, the second is recorded."""
        if self._recorder is None:
            return False
        if layers not in known.replays:
            if len(known.replays) < _MOST_RECORDED:
                known.replays[layers] = None
            return False
        replay = known.replays[layers] or self._record(self._recorder, known.end, layers)
        if replay is None:
            return False
        known.replays[layers] = replay
        replay()
        known.end.waits_here()
        return True

    def _record(self, recorder: Device, end: SymmExpert, layers: int) -> Callable[[], None] | None:
        """None where a launch cannot be recorded: none is from then on."""
        try:
            return recorder.record_launch(lambda: deque(self._launch_each(end, layers), 0).clear())
        except RuntimeError as error:
            log.warning("steps are not recorded as graphs, and go kernel by kernel: %s", error)
            self._recorder = None
            return None
