"""Which block is in which slot of an arena in host memory: what was not used for longest makes room for others.

Names and integers. Slots that are being read are pinned, and given to nobody meanwhile. It knows no bytes.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from afserve.engine.kv.blocks import Hash

Placed = dict[Hash, int]  # slots by name


class HostSlots:
    """`capacity` slots, numbered from 0 on."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._slot_of: Placed = {}
        self._order: OrderedDict[Hash, None] = OrderedDict()  # names without a pin, the next to go first
        self._pins: Counter[Hash] = Counter()
        self._used = 0  # slots that were ever given out: the first so many
        self._free: list[int] = []  # of those, the ones that are no more

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: Hash) -> bool:
        return name in self._slot_of

    def run(self, names: Sequence[Hash]) -> int:
        """How many of the names are here, from the first on."""
        known = self._slot_of
        return next((at for at, name in enumerate(names) if name not in known), len(names))

    def slots(self, names: Iterable[Hash]) -> list[int]:
        """Of names that are here."""
        return [self._slot_of[name] for name in names]

    def use(self, names: Iterable[Hash]) -> None:
        """Those that are here go last; of them the later ones after the earlier."""
        for name in names:
            if name in self._order:
                self._order.move_to_end(name)

    def take(self, names: Sequence[Hash]) -> tuple[Placed, Placed]:
        """Slots for names that are not here, and what had them before. The earlier names go before the later ones.

        Where pins leave too few slots, the last names get those. What a slot held is to be read before it is written.
        """
        names = names[max(0, len(names) - self.capacity + len(self._pins)) :]
        left: Placed = {}
        unused = self.capacity - self._used + len(self._free)
        while unused + len(left) < len(names):
            name, _ = self._order.popitem(last=False)
            left[name] = self._slot_of.pop(name)
        slots = sorted(self._empty(len(names) - len(left)) + list(left.values()), reverse=True)
        placed = dict(zip(names, slots, strict=True))
        assert not placed.keys() & self._slot_of.keys()
        self._slot_of.update(placed)
        self._order.update(dict.fromkeys(names))
        return placed, left

    def _empty(self, count: int) -> list[int]:
        freed = self._free[: min(count, len(self._free))]
        del self._free[: len(freed)]
        first = self._used
        self._used += count - len(freed)
        return freed + list(range(first, self._used))

    def pin(self, names: Iterable[Hash]) -> None:
        """They stay where they are until they are unpinned as often."""
        for name in names:
            self._pins[name] += 1
            self._order.pop(name, None)

    def unpin(self, names: Iterable[Hash]) -> None:
        """They were used: they go last, of them the later ones after the earlier."""
        for name in names:
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]
                self._order[name] = None

    def forget(self, name: Hash) -> bool:
        """Unless somebody reads it: whether it was dropped."""
        if name not in self._order:
            return False
        del self._order[name]
        self._free.append(self._slot_of.pop(name))
        return True

    def check(self) -> None:
        """Integrity; for tests."""
        taken = list(self._slot_of.values())
        assert sorted(taken + self._free) == list(range(self._used)), "a slot is lost, or there twice"
        assert self._used <= self.capacity
        assert self._order.keys().isdisjoint(self._pins), "a pinned block could make room"
        assert self._order.keys() | self._pins.keys() == self._slot_of.keys()
        assert all(count > 0 for count in self._pins.values())
