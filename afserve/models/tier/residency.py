"""Which slots of one layer have their weights in memory, and at which place; who was used longest ago makes room.

Values in, values out: it reads nothing and knows no thread.
"""

from collections.abc import Collection
from typing import NamedTuple


class Admitted(NamedTuple):
    """Where the new one's weights go, and whose were there."""

    place: int
    evicted: int | None


class Residency:
    """A slot has one place or none, a place one slot or none. A pinned slot keeps its place."""

    def __init__(self, places: int) -> None:
        self._place: dict[int, int] = {}  # by slot; the one used longest ago first
        self._free = list(reversed(range(places)))
        self._pins: dict[int, int] = {}

    def __contains__(self, slot: object) -> bool:
        return slot in self._place

    def __len__(self) -> int:
        return len(self._place)

    @property
    def place_of(self) -> dict[int, int]:
        """By slot, the one used longest ago first."""
        return dict(self._place)

    def use(self, slot: int) -> None:
        self._place[slot] = self._place.pop(slot)

    def pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]

    def admit(self, slot: int, keep: Collection[int] = (), *, strictly: bool = False) -> Admitted | None:
        """A place for a slot that has none; None where all others are pinned.

        Of `keep` a slot leaves only where nothing else can, the one used last first: a call that goes through more
        slots than there are places has just done with that one, and needs the others sooner. `strictly`: none of them.
        """
        assert slot not in self._place, f"slot {slot} has a place"
        evicted = None if self._free else self._victim(keep, strictly)
        if evicted is not None:
            place = self._place.pop(evicted)
        elif self._free:
            place = self._free.pop()
        else:
            return None
        self._place[slot] = place
        return Admitted(place, evicted)

    def drop(self, slot: int) -> None:
        """Its place is free, whoever had pinned it."""
        self._free.append(self._place.pop(slot))
        self._pins.pop(slot, None)

    def _victim(self, keep: Collection[int], strictly: bool) -> int | None:
        last = None
        for slot in self._place:
            if slot in self._pins:
                continue
            if slot not in keep:
                return slot
            last = slot
        return None if strictly else last
