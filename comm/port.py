"""The expert side of M2N: dispatches in, one weighted partial sum per row back. Knows boxes, not experts.

Shapes: R rows of a message, H hidden size, K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from afserve.comm.fp8 import dequantise
from afserve.comm.transport import Box, Header, Kind, Layout, Transport
from afserve.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One dispatch. x_RH is a view of the mailbox (a copy if it came as fp8), valid until the reply is sent."""

    box: Box
    header: Header
    x_RH: Tensor
    slot_RK: Tensor
    weight_RK: Tensor


class ExpertPort:
    """Over any transport; `boxes` are those to listen on, all of them if not given."""

    def __init__(self, transport: Transport, boxes: Sequence[Box] | None = None) -> None:
        self._transport = transport
        self._boxes = tuple(transport.boxes() if boxes is None else boxes)
        self._wire = transport.layout.combine_wire
        self.refused = 0

    @property
    def layout(self) -> Layout:
        return self._transport.layout

    def poll(self) -> list[Arrival]:
        """What has arrived and was not yet taken. What no correct peer sends is refused and counted, not returned."""
        arrivals = []
        for box in self._transport.ready(self._boxes):
            try:
                arrivals.append(self._take(box))
            except ProtocolError as error:
                self.refuse(box, str(error))
        return arrivals

    def wait(self, timeout: float) -> bool:
        """Park until something arrives. Raises PeerLost once for each attention node that is gone."""
        return bool(self._transport.wait(self._boxes, timeout))

    def reply(self, arrival: Arrival) -> Tensor:
        """The rows of the answer, to be filled in place."""
        _, epoch, sequence, layer, rows, _ = arrival.header
        header = Header(Kind.COMBINE, epoch, sequence, layer, rows, self._wire)
        return self._transport.stage(arrival.box, header).x_RH

    def send(self, arrival: Arrival) -> None:
        self._transport.post(arrival.box)

    def refuse(self, box: Box, reason: str) -> None:
        """Answer what came last on `box` with the reason why it is not computed."""
        self.refused += 1
        self._transport.refuse(box, reason)

    def close(self) -> None:
        self._transport.close()

    def _take(self, box: Box) -> Arrival:
        parcel = self._transport.take(box)
        assert parcel.slot_RK is not None and parcel.weight_RK is not None
        x_RH = parcel.x_RH if parcel.scale_RS is None else dequantise(parcel.x_RH, parcel.scale_RS)
        return Arrival(box, parcel.header, x_RH, parcel.slot_RK, parcel.weight_RK)
