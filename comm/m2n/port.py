"""The expert side of M2N: receives dispatches and answers each row with one weighted partial sum.

It knows boxes; it knows no experts.

Shapes: R rows of a message, H hidden size, K top-k.
"""

from collections import deque
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.staging import Copy, Stage, stage_for
from afserve.comm.mailbox.fp8 import dequantise
from afserve.comm.transport import HOST, Answered, Box, Header, Kind, Layout, Queue, Transport, WireType
from afserve.errors import ProtocolError
from afserve.kernels.stack import LayeredExperts


@dataclass(frozen=True, slots=True)
class Arrival:
    """One dispatch. x_RH is a view of the mailbox (a copy if it came as fp8), valid until the reply is sent."""

    box: Box
    header: Header
    x_RH: Tensor
    slot_RK: Tensor
    weight_RK: Tensor


@dataclass(frozen=True, slots=True)
class _Leaving:
    """An answer on its way from a device to the host, from where it is posted."""

    arrival: Arrival
    copy: Copy
    late: bool


class ExpertPort:
    """Over any transport, on all its boxes.

    `device` is where rows are computed, when that is not where the transport's mailboxes are; `stage` replaces the way
    between the two.
    """

    def __init__(
        self, transport: Transport, *, device: torch.device = HOST, stage: Stage | None = None
    ) -> None:
        self._transport, self._offers = transport, transport.offers
        self._boxes = tuple(transport.boxes())
        self._wire = transport.layout.combine_wire
        self._stage = stage or stage_for(device, transport.device)
        self._replies: dict[Box, Tensor] = {}
        self._calls: dict[Box, int] = {}  # rows computed together with these
        self._queues: dict[int, Queue] = {}
        self._leaving: deque[_Leaving] = deque()
        self.refused = 0
        self.exchanged = 0  # dispatches that a device took in and answered by itself

    @property
    def layout(self) -> Layout:
        return self._transport.layout

    def limit(self, attention: int, rows: int) -> None:
        """An attention node's messages have at most so many rows from now on; what is under way may be larger."""
        if self._offers.limiting is not None:
            self._offers.limiting.limit(attention, rows)

    def take_in(self, attention: int, queue: Queue) -> None:
        """What an attention node sends is brought to the device inside `queue` from now on."""
        self._queues[attention] = queue
        if self._offers.queueing is not None:
            self._offers.queueing.take_in(attention, queue)

    def poll(self) -> list[Arrival]:
        """What has arrived and was not yet taken. What no correct peer sends is refused and counted, not returned."""
        arrivals = []
        for box in self._transport.ready(self._boxes):
            try:
                with self._queues.get(box.attention, nullcontext)():
                    arrivals.append(self._take(box))
            except ProtocolError as error:
                self.refuse(box, str(error))
        return arrivals

    def opens_step(self, arrival: Arrival) -> bool:
        """Whether it only opens what devices exchange by themselves, and is answered (`device_exchange/served.py`)."""
        return False

    def wait(self, timeout: float) -> bool:
        """Park until something arrives or an answer can be posted. Raises PeerLost once for each attention node that
        is gone."""
        first = next((leaving for leaving in self._leaving if not leaving.late), None)
        if first is not None:
            first.copy.wait()
            self.flush()
            return True
        return bool(self._transport.wait(self._boxes, timeout))

    def answering(self, bank: Bank) -> LayeredExperts | None:
        """What `answer` may ask in the bank's place; None where Python takes part in every answer."""
        layout, answers = self.layout, self._offers.answering is not None and self._stage is None
        if not answers or layout.dispatch_wire is WireType.FLOAT8:
            return None
        return bank.answering(layout.dispatch_wire.dtype, layout.combine_wire.dtype)

    def answer(
        self,
        experts: LayeredExperts,
        epochs: Collection[int],
        most_rows: Callable[[int], int],
        wait: float,
        serve: float,
    ) -> Answered | None:
        """As `Answering`, of experts that `answering` gave."""
        assert self._offers.answering is not None, "a transport without `answer`"
        return self._offers.answering.answer(experts, epochs, most_rows, wait, serve)

    def flush(self) -> None:
        """Post the answers that have come down from the device. Raises PeerLost for one whose asker is gone."""
        for leaving in [leaving for leaving in self._leaving if leaving.copy.copied()]:
            self._leaving.remove(leaving)
            (reply_RH,) = leaving.copy.tensors
            call = self._calls.pop(leaving.arrival.box, 0)
            self._stage_reply(leaving.arrival, call).copy_(reply_RH)
            self._transport.post(leaving.arrival.box)

    def reply(self, arrival: Arrival, call: int = 0) -> Tensor:
        """The rows of the answer, to be filled in place. `call`: rows that are computed together with them."""
        if self._stage is None:
            return self._stage_reply(arrival, call)
        shape = (arrival.header.rows, self.layout.hidden)
        reply_RH = torch.empty(shape, dtype=self._wire.dtype, device=self._stage.device)
        self._replies[arrival.box], self._calls[arrival.box] = reply_RH, call
        return reply_RH

    def send(self, arrival: Arrival, *, late: bool = False) -> None:
        """`late`: others that are sent after it may leave the device before it, and nobody blocks on it."""
        if self._stage is None:
            self._transport.post(arrival.box)
            return
        copy = self._stage.to_host(("reply", arrival.box, late), self._replies.pop(arrival.box))
        self._leaving.append(_Leaving(arrival, copy, late))
        self.flush()

    def refuse(self, box: Box, reason: str) -> None:
        """Answer what came last on `box` with the reason why it is not computed."""
        self.refused += 1
        self._transport.refuse(box, reason)

    def close(self) -> None:
        self._transport.close()

    def _stage_reply(self, arrival: Arrival, call: int) -> Tensor:
        _, epoch, sequence, layer, rows, *_ = arrival.header
        header = Header(Kind.COMBINE, epoch, sequence, layer, rows, self._wire, call)
        return self._transport.stage(arrival.box, header).x_RH

    def _take(self, box: Box) -> Arrival:
        parcel = self._transport.take(box)
        assert parcel.slot_RK is not None and parcel.weight_RK is not None
        rows = parcel.x_RH, parcel.slot_RK, parcel.weight_RK
        scales: tuple[Tensor, ...] = () if parcel.scale_RS is None else (parcel.scale_RS,)
        if self._stage is not None:
            # Whoever dispatches again on a box has given up the answer that is still on its way.
            self._leaving = deque(leaving for leaving in self._leaving if leaving.arrival.box != box)
            above = self._stage.to_device(("rows", box), *rows, *scales)
            rows, scales = (above[0], above[1], above[2]), above[3:]
        x_RH, slot_RK, weight_RK = rows
        return Arrival(box, parcel.header, dequantise(x_RH, *scales) if scales else x_RH, slot_RK, weight_RK)
