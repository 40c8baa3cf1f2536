"""All experts of a node in memory of the host that its device copies from by itself, as kernels have them.

They come from the device, which packed them when they were read from the checkpoint: one way to pack, and the same
bits. Whoever calls names the queue by being inside of it.
"""

import threading
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from afserve.kernels.devices.device import Device, Event
from afserve.kernels.devices.pages import lent_to
from afserve.kernels.packed import PackedExperts
from afserve.models.tier.host_places import Copied
from afserve.placement.expert_memory import FLAG

_ASKED = FLAG, "give more of the experts memory of the device, or free memory of the host"


class HostCopies:
    """Of `slots` of each layer; `layers` have as many as there are places. Raises DoesNotFitError."""

    def __init__(self, device: Device, layers: Sequence[PackedExperts], slots: int) -> None:
        self._device = device
        self._pairs = [[(near, self._far(near, slots)) for near in packed.slot_tensors] for packed in layers]
        self._expert: list[dict[int, int]] = [{} for _ in layers]  # by slot
        self._guard = threading.Lock()  # between the events of one expert lies no other
        self._timed: deque[tuple[Event, Event]] = deque()
        self._bytes, self._seconds = 0, 0.0

    def _far(self, near: Tensor, slots: int) -> Tensor:
        return lent_to(near.device, (slots, *near.shape[1:]), near.dtype, _ASKED)

    def holds(self, layer: int, slot: int, expert: int) -> bool:
        return self._expert[layer].get(slot) == expert

    def keep(self, layer: int, slot: int, place: int, expert: int) -> None:
        """What lies at the place is this expert."""
        for near, far in self._pairs[layer]:
            far[slot].copy_(near[place], non_blocking=True)
        self._expert[layer][slot] = expert

    def bring(self, layer: int, slot: int, place: int) -> Event:
        """To the place; there where the event is."""
        with self._guard:
            begin = self._device.current().put_event(timed=True)
            for near, far in self._pairs[layer]:
                near[place].copy_(far[slot], non_blocking=True)
                self._bytes += near[place].nbytes
            end = self._device.current().put_event(timed=True)
            self._timed.append((begin, end))
            self._count()
        return end

    def _count(self) -> None:
        while self._timed and self._timed[0][1].done():
            begin, end = self._timed.popleft()
            self._seconds += end.seconds_since(begin)

    @property
    def copied(self) -> Copied:
        """By `bring`; seconds of copies that have ended."""
        with self._guard:
            self._count()
            return Copied(self._bytes, self._seconds)
