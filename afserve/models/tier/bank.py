"""An expert bank with memory for some of its experts: it reads the others from the checkpoint when rows name them.

Sums have the same bits as with all experts in memory, whatever is there: kernels add an expert's part in the order of
slots, and a slot is the same expert's wherever its weights lie. A call that names more experts than there are places
goes through them in that order, in passes whose sums stay in float32. Rows whose expert cannot be read get NaN, which
ends their requests and nobody else's. Shapes: R rows, K top-k, H hidden.
"""

import torch
from torch import Tensor

from afserve.comm.m2n.bank import Bank
from afserve.errors import CheckpointError
from afserve.models.experts import ExpertBank, Held, Progress
from afserve.models.tier.ahead import NextExperts
from afserve.models.tier.hot_set import HotSet
from afserve.models.tier.memory import ExpertMemory, HeldSlots
from afserve.placement.expert_memory import ExpertMemoryStats


class TieredBank(Bank):
    """`bank` has places, fewer than slots. `ahead` guesses what the next layer asks for. `close` ends its threads."""

    def __init__(self, bank: ExpertBank, ahead: NextExperts) -> None:
        assert bank.places is not None, "all experts are in memory"
        self._bank, self._ahead = bank, ahead
        self._memory = ExpertMemory(bank, bank.places, bank.layers)
        self._hot = [HotSet(()) for _ in range(bank.layers)]
        self.slots, self.expert_bytes = bank.slots, bank.expert_bytes

    @property
    def rounding_error(self) -> float | None:
        """Of those that were read so far."""
        return self._bank.rounding_error

    def load(self, held: Held, progress: Progress) -> None:
        """The first experts of each layer; the others are only known by name. Raises CheckpointError."""
        memory, first = self._memory, [list[int]() for _ in self._hot]
        for layer, slot, expert in held:
            memory.name(layer, slot, expert)
            first[layer].append(slot)
        for layer, slots in enumerate(first):
            self._hot[layer] = HotSet(slots)
            reading = memory.hold(layer, slots[: memory.places], counted=False)
            failed = memory.wait(reading)
            memory.release(reading, failed)
            if failed:
                raise CheckpointError(next(iter(failed.values())))
            progress((layer + 1) / len(first))
        self._bank.tell_rounding()

    def fill(self, layer: int, slot: int, expert: int) -> None:
        """As `ExpertBank.fill`."""
        self._bank.check_slot(layer, slot)
        self._memory.fill(layer, slot, expert)

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """As `ExpertBank.forward`."""
        named = [slot for slot in slot_RK.unique().tolist() if slot >= 0]
        for slot in named:
            self._hot[layer].use(slot)
        if len(named) <= self._memory.places:
            self._ahead.check(layer, named)
            reading = self._memory.hold(layer, named)
            self._look_ahead(layer, x_RH)
            self._compute(reading, x_RH, slot_RK, weight_RK, out_RH, add)
            return
        sum_RH = out_RH.float() if add else torch.zeros(x_RH.shape, dtype=torch.float32)
        self._pass_through(layer, named, x_RH, slot_RK, weight_RK, sum_RH)
        out_RH.copy_(sum_RH)

    def _look_ahead(self, layer: int, x_RH: Tensor) -> None:
        """Reads for the next layer are behind those for this one, and go on while this one computes."""
        guessed = self._memory.slots_of(layer + 1, self._ahead.suggest(layer, x_RH))
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
                self._bank.forward(reading.layer, x_RH, slot_RK, weight_RK, out_RH, add)
                return
            lost_RK = torch.isin(slot_RK, torch.tensor(list(failed), dtype=slot_RK.dtype))
            self._bank.forward(reading.layer, x_RH, slot_RK.masked_fill(lost_RK, -1), weight_RK, out_RH, add)
            out_RH.masked_fill_(lost_RK.any(1, keepdim=True), torch.nan)
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
            memory.misses,
            memory.unreadable,
            memory.read_ahead,
            memory.ahead_used,
            self._bank.bytes_read,
            memory.read_seconds,
            memory.waited,
            *served,
        )

    def close(self) -> None:
        self._memory.close()
