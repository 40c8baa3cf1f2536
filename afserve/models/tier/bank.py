"""An expert bank with memory for some of its experts: it reads the others from the checkpoint when rows name them.

Sums have the same bits as with all experts in memory, whatever is there. A call that names more experts than there are
places goes through them in the order of slots, in passes; how their sums are made is the places' to know. Rows whose
expert cannot be read get NaN, which ends their requests and nobody else's. Shapes: R rows, K top-k, H hidden.
"""

from collections import deque

import torch
from torch import Tensor

from afserve.comm.m2n.bank import Bank
from afserve.errors import CheckpointError
from afserve.models.experts import Held, Progress
from afserve.models.tier.ahead import NextExperts
from afserve.models.tier.device_places import DevicePlaces
from afserve.models.tier.host_places import HostPlaces
from afserve.models.tier.hot_set import HotSet
from afserve.models.tier.memory import ExpertMemory, HeldSlots
from afserve.placement.expert_memory import ExpertMemoryStats

_LAYERS_AT_ONCE = 2
"""That are read at the start: while one's last experts are packed, the disk has the next one's."""


class TieredBank(Bank):
    """`places` are fewer than slots. `ahead` guesses what the next layer asks for. `close` ends its threads."""

    def __init__(self, places: HostPlaces | DevicePlaces, ahead: NextExperts) -> None:
        self.bank = bank = places.bank
        assert bank.places is not None, "all experts are in memory"
        self._places, self._ahead, self.places = places, ahead, bank.places
        self._memory = ExpertMemory(places, bank.places, bank.layers)
        self._hot = [HotSet(()) for _ in range(bank.layers)]
        self.slots, self.expert_bytes = bank.slots, bank.expert_bytes

    @property
    def rounding_error(self) -> float | None:
        """Of those that were read so far."""
        return self.bank.rounding_error

    def load(self, held: Held, progress: Progress) -> None:
        """The first experts of each layer, while the next layer's are read; the others are only known by name, where
        they are read from the disk later. Raises CheckpointError."""
        memory, slots = self._memory, [list[int]() for _ in self._hot]
        for layer, slot, expert in held:
            memory.name(layer, slot, expert)
            slots[layer].append(slot)
        self._hot = [HotSet(one) for one in slots]
        ends = range(0, 1 if self._places.from_disk else max(map(len, slots)), memory.places)
        parts = [  # the first ones last, which stay
            (layer, one[at : at + memory.places]) for at in reversed(ends) for layer, one in enumerate(slots)
        ]
        under_way = deque[HeldSlots]()
        for number, (layer, part) in enumerate(parts):
            under_way.append(memory.hold(layer, part, counted=False))
            if len(under_way) == min(_LAYERS_AT_ONCE, len(slots)):
                self._loaded(under_way.popleft())
            progress((number + 1) / len(parts))
        while under_way:
            self._loaded(under_way.popleft())
        self.bank.tell_rounding()

    def _loaded(self, reading: HeldSlots) -> None:
        failed = self._memory.wait(reading)
        self._memory.release(reading, failed)
        if failed:
            raise CheckpointError(next(iter(failed.values())))

    def fill(self, layer: int, slot: int, expert: int) -> None:
        """As `ExpertBank.fill`."""
        self.bank.check_slot(layer, slot)
        self._memory.fill(layer, slot, expert)

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """As `ExpertBank.forward`."""
        early = self._ahead.choose(layer, x_RH) if self._places.waits else []
        slot_RK, *guessed = self._places.on_host(slot_RK, *early)
        named = _named(slot_RK)
        for slot in named:
            self._hot[layer].use(slot)
        if len(named) <= self._memory.places:
            self._ahead.check(layer, named)
            reading = self._memory.hold(layer, named)
            self._look_ahead(layer, self._ahead.order(guessed or self._ahead.choose(layer, x_RH)))
            self._compute(reading, x_RH, slot_RK, weight_RK, out_RH, add)
            return
        for call in self._places.in_passes(x_RH, slot_RK, weight_RK, out_RH, add):
            self._pass_through(layer, _named(call.slot_RK), *call)

    def _look_ahead(self, layer: int, experts: list[int]) -> None:
        """Reads for the next layer are behind those for this one, and go on while this one computes."""
        guessed = self._memory.slots_of(layer + 1, experts)
        missing = self._memory.missing(layer + 1, guessed)
        if missing:
            self._ahead.guess(layer + 1, missing)
            if self._ahead.is_right:
                self._memory.fetch(layer + 1, guessed)

    def _pass_through(
        self, layer: int, named: list[int], x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, sum_RH: Tensor
    ) -> None:
        """Some experts at a time, while the next ones are read."""
        size, keep = max(1, self._memory.places // 2), frozenset(named)
        parts = [named[at : at + size] for at in range(0, len(named), size)]
        beside = 2 * size <= self._memory.places
        reading = self._memory.hold(layer, parts[0], keep)
        for number, part in enumerate(parts):
            following = parts[number + 1 : number + 2]
            coming = [self._memory.hold(layer, one, keep) for one in following if beside]
            only_RK = slot_RK.where((slot_RK >= part[0]) & (slot_RK <= part[-1]), -1)
            self._compute(reading, x_RH, only_RK, weight_RK, sum_RH, True)
            coming = coming or [self._memory.hold(layer, one, keep) for one in following]
            reading = coming[0] if coming else reading

    def _compute(
        self, reading: HeldSlots, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool
    ) -> None:
        """What was held is released."""
        failed = self._memory.wait(reading)
        try:
            if not failed:
                self._places.forward(reading.layer, x_RH, slot_RK, weight_RK, out_RH, add)
                return
            lost_RK = torch.isin(slot_RK, torch.tensor(list(failed), dtype=slot_RK.dtype))
            left_RK = slot_RK.masked_fill(lost_RK, -1)
            self._places.forward(reading.layer, x_RH, left_RK, weight_RK, out_RH, add)
            out_RH.masked_fill_(lost_RK.any(1, keepdim=True).to(out_RH.device), torch.nan)
        finally:
            self._memory.release(reading, failed)

    def stats(self) -> ExpertMemoryStats:
        """A snapshot, for the thread that calls `forward`."""
        memory = self._memory
        served = [sum(hot.served[at] for hot in self._hot) for at in range(3)]
        return ExpertMemoryStats(
            memory.places * len(self._hot),
            memory.resident,
            memory.hits,
            *((memory.misses, 0) if self._places.from_disk else (0, memory.misses)),
            memory.unreadable,
            memory.read_ahead,
            memory.ahead_used,
            self.bank.bytes_read,
            memory.read_seconds,
            *self._places.copied,
            memory.waited,
            *served,
        )

    def close(self) -> None:
        self._memory.close()


def _named(slot_RK: Tensor) -> list[int]:
    """The lowest first."""
    return [slot for slot in slot_RK.unique().tolist() if slot >= 0]
