"""Slots of host memory against a model that keeps books in plain lists: what is where, and who makes room."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from afserve.engine.kv.host_slots import HostSlots

NAMES = st.lists(st.integers(0, 30), max_size=8, unique=True)


class Slots(RuleBasedStateMachine):
    """`order` has what is here and unpinned, the next to go first; `memory` what was written to each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = HostSlots(6)
        self.order: list[bytes] = []
        self.memory: dict[int, bytes] = {}
        self.pins: list[list[bytes]] = []

    def _pinned(self) -> set[bytes]:
        return {name for names in self.pins for name in names}

    def _here(self) -> set[bytes]:
        return {*self.order, *self._pinned()}

    @rule(numbers=NAMES)
    def take(self, numbers):
        names = [b"%d" % n for n in numbers]
        new = [name for name in names if name not in self._here()]
        room = 6 - len(self._pinned())
        free = 6 - len(self._here())
        placed, left = self.slots.take(new)
        kept = new[max(0, len(new) - room) :]
        assert list(placed) == kept
        gone = self.order[: max(0, len(kept) - free)]
        assert list(left) == gone, "what was not used for longest makes room, and nothing else"
        for name, slot in left.items():
            assert self.memory[slot] == name, "its bytes are still there"
            del self.memory[slot]
        for name, slot in placed.items():
            assert slot not in self.memory and 0 <= slot < 6
            self.memory[slot] = name
        self.order = self.order[len(gone) :] + kept

    @rule(numbers=NAMES)
    def use(self, numbers):
        names = [b"%d" % n for n in numbers]
        self.slots.use(names)
        used = [name for name in names if name in self.order]
        self.order = [name for name in self.order if name not in used] + used

    @precondition(lambda self: self._here())
    @rule(data=st.data())
    def pin(self, data):
        here = sorted(self._here())
        names = data.draw(st.lists(st.sampled_from(here), min_size=1, max_size=3, unique=True))
        self.slots.pin(names)
        self.pins.append(names)
        self.order = [name for name in self.order if name not in names]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        names = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.slots.unpin(names)
        self.order += [name for name in names if name not in self._pinned()]

    @precondition(lambda self: self._here())
    @rule(data=st.data())
    def forget(self, data):
        name = data.draw(st.sampled_from(sorted(self._here())))
        assert self.slots.forget(name) is (name in self.order)
        if name in self.order:
            self.order.remove(name)
            self.memory = {slot: other for slot, other in self.memory.items() if other != name}

    @invariant()
    def books_agree(self):
        self.slots.check()
        here = self._here()
        assert len(self.slots) == len(here) <= self.slots.capacity
        assert {name: slot for slot, name in self.memory.items()} == {
            name: self.slots.slots([name])[0] for name in here
        }
        some = [*sorted(here), b"nobody"]
        assert self.slots.run(some) == len(here)


TestSlots = Slots.TestCase


def test_a_chain_lies_side_by_side():
    """It leaves the cache with its last block first, and is read from its first."""
    slots = HostSlots(8)
    chain = [b"a", b"b", b"c", b"d"]
    slots.take(chain[::-1])
    assert slots.slots(chain) == [0, 1, 2, 3]


def test_pins_leave_what_there_is():
    slots = HostSlots(3)
    slots.take([b"c", b"b", b"a"])
    slots.pin([b"a", b"b"])
    placed, left = slots.take([b"z", b"y"])
    assert list(placed) == [b"y"] and list(left) == [b"c"]
    assert slots.take([b"x"])[0].keys() == {b"x"} and b"y" not in slots
    slots.pin([b"x"])
    assert slots.take([b"w"]) == ({}, {})
