"""The experts of a node that are in memory now: read from the checkpoint when a call names them, several at once.

It knows no rows. A slot that a call holds keeps its weights until it is released; the others make room, the one used
longest ago first, each layer by itself. An expert that cannot be read costs who asked for it, and is tried again by the
next. One thread calls `hold` and `release`, another one may `fill`.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import NamedTuple

from afserve.errors import AfserveError, CheckpointError
from afserve.models.tier.device_places import DevicePlaces
from afserve.models.tier.host_places import HostPlaces
from afserve.models.tier.residency import Residency

log = logging.getLogger("afserve.models")
READERS = 8
MOST_AHEAD = 4
"""Experts that are read before anybody has named them, at a time: fewer than there are readers."""
_DEADLINE = 60.0  # seconds that a call waits for a read


class HeldSlots(NamedTuple):
    """Slots of one layer that a call holds, and those of them that are still being read."""

    layer: int
    slots: tuple[int, ...]
    under_way: dict[int, "Future[None]"]


class ExpertMemory:
    """Of `bank`, with so many places in each layer. `close` ends its threads."""

    def __init__(self, bank: HostPlaces | DevicePlaces, places: int, layers: int) -> None:
        self.places = places
        self._bank = bank
        self._layers = [Residency(places) for _ in range(layers)]
        self._expert: list[dict[int, int]] = [{} for _ in range(layers)]  # by slot
        self._slot: list[dict[int, int]] = [{} for _ in range(layers)]  # by expert
        self._reads: dict[tuple[int, int], Future[None]] = {}
        self._ahead: set[tuple[int, int]] = set()  # read before anybody named them, and not named since
        self._once: set[tuple[int, int]] = set()  # experts that were read before
        self._untold: set[tuple[int, int]] = set()  # experts that could not be read, of which the log knows
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(READERS, "expert-reader")
        self.hits = self.misses = self.unreadable = 0
        self.read_ahead = self.ahead_used = 0
        self.waited = 0.0
        self._reading_since, self._read_seconds = 0.0, 0.0

    def name(self, layer: int, slot: int, expert: int) -> None:
        """The slot is this expert's from now on; nothing is read."""
        before = self._expert[layer].get(slot)
        if before is not None and self._slot[layer].get(before) == slot:
            del self._slot[layer][before]
        self._expert[layer][slot] = expert
        self._slot[layer][expert] = slot

    def slots_of(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Of those that this node has."""
        found = self._slot[layer] if layer < len(self._slot) else {}
        return [found[expert] for expert in experts if expert in found]

    def fill(self, layer: int, slot: int, expert: int) -> None:
        """The slot, which nobody names, is another expert's, and in memory. Raises CheckpointError."""
        with self._changed:
            free = self._changed.wait_for(lambda: (layer, slot) not in self._reads, _DEADLINE)
            if not free:
                raise CheckpointError(f"slot {slot} of MoE layer {layer} has been read for {_DEADLINE:.0f} s")
            self._forget(layer, slot)
            self.name(layer, slot, expert)
        reading = self.hold(layer, (slot,), counted=False)
        failed = self.wait(reading)
        self.release(reading, failed)
        if failed:
            with self._changed:
                del self._expert[layer][slot], self._slot[layer][expert]
            raise CheckpointError(failed[slot])

    def hold(
        self, layer: int, slots: Sequence[int], keep: Collection[int] = (), *, counted: bool = True
    ) -> HeldSlots:
        """They stay in memory until `release`; what is not there is being read when this returns. `keep`: slots that
        the same call names later, or has named."""
        slots = tuple(slots)
        residency, under_way = self._layers[layer], {}
        with self._changed:
            here = [slot for slot in slots if slot in residency]
            for slot in here:
                residency.use(slot)
                residency.pin(slot)
                if (layer, slot) in self._reads:
                    under_way[slot] = self._reads[layer, slot]
            for slot in slots:
                if slot not in residency:
                    under_way[slot] = self._start(layer, slot, keep)
            if counted:
                self._count(layer, slots, len(here))
        return HeldSlots(layer, slots, under_way)

    def wait(self, reading: HeldSlots) -> dict[int, str]:
        """Until all reads have ended; why those slots have no weights that have none."""
        start, failed = time.monotonic(), {}
        for slot, read in reading.under_way.items():
            try:
                read.result(max(0.0, start + _DEADLINE - time.monotonic()))
            except Late:
                failed[slot] = f"it has been read for {_DEADLINE:.0f} s"
                self._give_up(reading.layer, slot)
            except AfserveError as error:
                failed[slot] = error.message
        self.waited += time.monotonic() - start if reading.under_way else 0.0
        self.unreadable += len(failed)
        for slot, why in failed.items():
            self._tell(reading.layer, slot, why)
        return failed

    def _give_up(self, layer: int, slot: int) -> None:
        with self._changed:
            if slot in self._layers[layer]:
                self._layers[layer].unpin(slot)

    def release(self, reading: HeldSlots, failed: Collection[int] = ()) -> None:
        residency = self._layers[reading.layer]
        with self._changed:
            for slot in reading.slots:
                if slot not in failed:
                    residency.unpin(slot)
            self._changed.notify_all()

    def fetch(self, layer: int, slots: Sequence[int]) -> None:
        """Begin to read those that are missing, the first ones first, as far as nothing useful leaves for them."""
        residency, keep = self._layers[layer], frozenset(slots)
        with self._changed:
            most = max(0, MOST_AHEAD - sum(one in self._ahead for one in self._reads))
            for slot in [slot for slot in slots if slot not in residency][:most]:
                admitted = residency.admit(slot, keep, strictly=True)
                if admitted is None:
                    return
                self._ahead.add((layer, slot))
                self.read_ahead += 1
                self._begin(layer, slot, admitted.place, admitted.evicted)

    @property
    def read_seconds(self) -> float:
        """In which anything was read."""
        with self._changed:
            now = time.monotonic() - self._reading_since if self._reads else 0.0
            return self._read_seconds + now

    @property
    def resident(self) -> int:
        with self._changed:
            return sum(map(len, self._layers))

    def missing(self, layer: int, slots: Sequence[int]) -> list[int]:
        """Of these; neither in memory nor on the way there."""
        return [slot for slot in slots if slot not in self._layers[layer]] if slots else []

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _count(self, layer: int, slots: Sequence[int], here: int) -> None:
        self.hits += here
        self.misses += len(slots) - here
        for slot in slots:
            if (layer, slot) in self._ahead:
                self._ahead.discard((layer, slot))
                self.ahead_used += 1

    def _start(self, layer: int, slot: int, keep: Collection[int]) -> "Future[None]":
        """A read of a slot that the caller holds; it waits where all places are being read into."""
        residency = self._layers[layer]
        if slot not in self._expert[layer]:
            return _refused(f"slot {slot} of MoE layer {layer} has no expert")
        end = time.monotonic() + _DEADLINE
        while (admitted := residency.admit(slot, keep)) is None:
            if not self._changed.wait(max(0.0, end - time.monotonic())):
                return _refused(f"no place of MoE layer {layer} became free for {_DEADLINE:.0f} s")
        residency.pin(slot)
        return self._begin(layer, slot, admitted.place, admitted.evicted)

    def _begin(self, layer: int, slot: int, place: int, evicted: int | None) -> "Future[None]":
        if evicted is not None:
            self._ahead.discard((layer, evicted))
            self._bank.put(layer, evicted, None)
        self._bank.put(layer, slot, place)
        self._layers[layer].pin(slot)  # until it is read
        if not self._reads:
            self._reading_since = time.monotonic()
        read = self._reads[layer, slot] = self._pool.submit(
            self._read, layer, slot, self._expert[layer][slot]
        )
        return read

    def _read(self, layer: int, slot: int, expert: int) -> None:
        done = False
        try:
            self._bank.fill(layer, slot, expert, again=(layer, expert) in self._once)
            done = True
        finally:
            with self._changed:
                self._ended(layer, slot, expert, done)

    def _ended(self, layer: int, slot: int, expert: int, done: bool) -> None:
        del self._reads[layer, slot]
        if not self._reads:
            self._read_seconds += time.monotonic() - self._reading_since
        if done:
            self._once.add((layer, expert))
            self._untold.discard((layer, expert))
            self._layers[layer].unpin(slot)
        else:
            self._forget(layer, slot)
        self._changed.notify_all()

    def _forget(self, layer: int, slot: int) -> None:
        self._ahead.discard((layer, slot))
        if slot in self._layers[layer]:
            self._layers[layer].drop(slot)
            self._bank.put(layer, slot, None)

    def _tell(self, layer: int, slot: int, why: str) -> None:
        """Once, until it could be read."""
        one = layer, self._expert[layer].get(slot, -1)
        if one not in self._untold:
            self._untold.add(one)
            log.error(
                "expert %d of MoE layer %d cannot be read, rows that chose it have no sum: %s",
                one[1],
                layer,
                why,
            )


def _refused(why: str) -> "Future[None]":
    made: Future[None] = Future()
    made.set_exception(CheckpointError(why))
    return made
