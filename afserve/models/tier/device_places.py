"""The places of a bank on a device that does later what it was told: experts come there on a queue of their own.

Events order what the device does, and no thread that computes waits for a copy: the copying queue goes on when kernels
that read a place have ended, and kernels begin when what they name has come. Kernels know places and no slots. They
add a row's parts by choice, so a call in several passes keeps all parts until it adds them. Shapes: R rows, K top-k,
H hidden, N = R K.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from afserve.comm.m2n.staging import DeviceStage
from afserve.kernels.devices import scratch
from afserve.kernels.devices.device import Device, Event, Queue
from afserve.models.experts import ExpertBank
from afserve.models.tier.host_copies import HostCopies
from afserve.models.tier.host_places import Copied, PassRows

_UPLOADS = 4  # of place numbers, that may be under way before the host waits for the first


class DevicePlaces:
    """`bank` has as many slots as there are places. `copies` of all experts; without, each is read from the checkpoint
    when it is filled, and packed in the copying queue. One thread calls `forward`."""

    waits = True

    def __init__(self, bank: ExpertBank, device: Device, copies: HostCopies | None) -> None:
        self.bank, self.from_disk = bank, copies is None
        self._device, self._copies = device, copies
        self._place = [torch.full((bank.slots + 1,), -1, dtype=torch.int32) for _ in range(bank.layers)]
        self._queue, self._stage, self._uploads = device.queue(), DeviceStage(device), 0
        # by place: until where it is read, and from where on it may be
        self._used: dict[tuple[int, int], dict[Queue, Event]] = defaultdict(dict)
        self._come: dict[tuple[int, int], Event] = {}

    def put(self, layer: int, slot: int, place: int | None) -> None:
        """As `ExpertBank.put`. The last number is of choices that name nothing."""
        self._place[layer][slot] = -1 if place is None else place

    def fill(self, layer: int, slot: int, expert: int, *, again: bool = False) -> None:
        """As `ExpertBank.fill`, of a slot that was put somewhere. The device may still have it to do, behind who reads
        what was there. Several threads may."""
        place = int(self._place[layer][slot])
        with self._queue.beside():
            for event in self._used.pop((layer, place), {}).values():
                self._queue.follow_event(event)
            if self._copies is not None and self._copies.holds(layer, slot, expert):
                self._come[layer, place] = self._copies.bring(layer, slot, place)
                return
            self.bank.fill(layer, place, expert, again=again)
            if self._copies is not None:
                self._copies.keep(layer, slot, place, expert)
            self._come[layer, place] = self._queue.put_event()

    def on_host(self, *tensors: Tensor) -> Sequence[Tensor]:
        """What the host has to know of a call: valid until the next. It waits for the kernels that choose."""
        copy = self._stage.to_host("choices", *tensors)
        copy.wait()
        return copy.tensors

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """As `ExpertBank.forward`, of slots that were filled and lie on the host."""
        place_RK = self._place[layer][slot_RK.long()]  # -1 is the last one
        named = [(layer, place) for place in place_RK.unique().tolist() if place >= 0]
        queue = self._device.current()
        for one in named:
            self._await(queue, one)
        self._uploads += 1
        (above_RK,) = self._stage.to_device(("places", self._uploads % _UPLOADS), place_RK)
        self.bank.forward(layer, x_RH, above_RK, weight_RK, out_RH, add)
        read = queue.put_event()
        for one in named:
            self._used[one][queue] = read

    def _await(self, queue: Queue, place: tuple[int, int]) -> None:
        come = self._come.get(place)
        if come is None:
            return
        if come.done():
            del self._come[place]
        else:
            queue.follow_event(come)

    def in_passes(
        self, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool
    ) -> Iterator[PassRows]:
        """Some rows at a time, as memory allows. Every choice is a row of its own, whose sum is its part. Parts
        are added as kernels do, when all have been made."""
        choices = slot_RK.shape[1]
        size = choices * x_RH.shape[1] * (x_RH.itemsize + self.bank.dtype.itemsize)
        step = max(1, scratch.PASSES // size)
        for first in range(0, len(x_RH), step):
            rows = slice(first, first + step)
            x_NH = x_RH[rows].repeat_interleave(choices, 0)
            part_NH = x_RH.new_zeros(x_NH.shape, dtype=self.bank.dtype)
            yield PassRows(x_NH, slot_RK[rows].reshape(-1, 1), weight_RK[rows].reshape(-1, 1), part_NH)
            _add_parts(part_NH, out_RH[rows], add)

    @property
    def copied(self) -> Copied:
        return Copied() if self._copies is None else self._copies.copied


def _add_parts(part_NH: Tensor, out_RH: Tensor, add: bool) -> None:
    sum_RH = torch.zeros(out_RH.shape, dtype=torch.float32, device=out_RH.device)
    if add:
        sum_RH += out_RH
    for part_RH in part_NH.unflatten(0, (len(out_RH), -1)).unbind(1):
        sum_RH += part_RH
    out_RH.copy_(sum_RH)
