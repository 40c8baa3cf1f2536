"""What ends have in common whose mailboxes are lanes, of this process's memory or of shared memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.comm.mailbox.lanes import Lanes
from afserve.comm.transport import HOST, Box, Header, Layout, MessageFiller, Parcel
from afserve.comm.transports.lost import Lost


class LaneEnd:
    """One end. `attention` is None on the expert node; `lost` knows which peers are gone."""

    def __init__(self, lanes: Lanes, layout: Layout, attention: int | None, lost: Lost) -> None:
        self._lanes, self._layout, self._attention, self._lost = lanes, layout, attention, lost

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def device(self) -> torch.device:
        return HOST

    def boxes(self) -> list[Box]:
        return self._lanes.boxes()

    def next_sequence(self, box: Box) -> int:
        return self._lanes.next_sequence(box)

    def limit(self, attention: int, rows: int) -> None:
        self._lanes.limit(attention, rows)

    def stage(self, box: Box, header: Header) -> Parcel:
        return self._lanes.stage(box, header)


class MemoryEnd(LaneEnd):
    """Both ends map the same memory: what is posted there has arrived."""

    def post(self, box: Box) -> None:
        if self._lost:
            self._lost.raise_for([box])
        self._lanes.post(box)

    def send(
        self,
        box: Box,
        header: Header,
        x_RH: Tensor,
        slot_RK: Tensor | None = None,
        weight_RK: Tensor | None = None,
    ) -> None:
        if self._lost:
            self._lost.raise_for([box])
        self._lanes.send(box, header, x_RH, slot_RK, weight_RK)

    def send_part(self, box: Box, header: Header, filler: MessageFiller) -> None:
        if self._lost:
            self._lost.raise_for([box])
        self._lanes.send_part(box, header, filler)

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        return self._lanes.ready(boxes)

    def take(self, box: Box) -> Parcel:
        return self._lanes.take(box)

    def refuse(self, box: Box, reason: str) -> None:
        self._lanes.refuse(box, reason)
