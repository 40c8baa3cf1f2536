"""Which block is in which slot of a store: a ring that is written in order and forgets what it overwrites.

Writing in order keeps a prompt's blocks side by side, so that they are read in one go. What is used again comes back
into memory, and is written anew once its slot is among those that are overwritten next: so the ring forgets what was
not used for longest, nearly. Integers and names; it knows no bytes and no files.
"""

from collections.abc import Iterable, Sequence

from afserve.comm.disk.record import BlockRecord, Name

_AGEING = 4  # one part in so many of a full ring is overwritten soon


class Ring:
    """`capacity` slots. `overwritten` counts blocks that were forgotten for others."""

    def __init__(self, capacity: int, records: Iterable[tuple[int, BlockRecord]] = ()) -> None:
        """`records` are those of slots that were written before; of two with one name the later counts."""
        assert capacity > 0
        self.capacity = capacity
        self.overwritten = 0
        self._slots: list[BlockRecord | None] = []
        self._slot_of: dict[Name, int] = {}
        self._next = self._number = 0
        for slot, record in records:
            if slot < capacity:
                self._adopt(slot, record)
        self._next %= capacity

    def _adopt(self, slot: int, record: BlockRecord) -> None:
        self._slots += [None] * (slot + 1 - len(self._slots))
        known = self._slot_of.get(record.name)
        if record.number > self._number:
            self._number, self._next = record.number, slot + 1
        if known is not None:
            before = self._slots[known]
            if before is not None and before.number > record.number:
                return
            self._slots[known] = None
        self._slots[slot], self._slot_of[record.name] = record, slot

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: Name) -> bool:
        return name in self._slot_of

    @property
    def slots_written(self) -> int:
        """Slots that were ever written: the first so many."""
        return len(self._slots)

    def run(self, names: Sequence[Name]) -> int:
        """How many of the names are there, from the first on."""
        known = self._slot_of
        for at, name in enumerate(names):
            if name not in known:
                return at
        return len(names)

    def holds(self, names: Iterable[Name]) -> list[bool]:
        """Of each whether it is there."""
        known = self._slot_of
        return [name in known for name in names]

    def places(self, names: Sequence[Name]) -> tuple[list[int], list[BlockRecord]]:
        """Slots and records of the names, from the first on, up to one that is not there."""
        slots: list[int] = []
        records: list[BlockRecord] = []
        for name in names:
            if (slot := self._slot_of.get(name)) is None:
                break
            record = self._slots[slot]
            assert record is not None and record.name == name
            slots.append(slot)
            records.append(record)
        return slots, records

    def find(self, name: Name) -> tuple[int, BlockRecord] | None:
        """Its slot and what was written there."""
        slot = self._slot_of.get(name)
        if slot is None:
            return None
        record = self._slots[slot]
        assert record is not None and record.name == name
        return slot, record

    def worth_writing(self, names: Iterable[Name]) -> list[Name]:
        """Those that are not there, or are among those that are overwritten next."""
        known, capacity = self._slot_of, self.capacity
        soon, first = capacity // _AGEING if self.slots_written >= capacity else 0, self._next
        return [
            name
            for name in names
            if (slot := known.get(name)) is None or (soon and (slot - first) % capacity < soon)
        ]

    def take(self, count: int) -> range:
        """Up to `count` slots, one behind the other, to be written next. What was there is forgotten."""
        first = self._next
        slots = range(first, min(first + count, self.capacity))
        self._slots += [None] * (slots.stop - len(self._slots))
        for slot in slots:
            if (record := self._slots[slot]) is not None:
                self._drop(slot, record)
                self.overwritten += 1
        self._next = slots.stop % self.capacity
        return slots

    def put(self, slot: int, name: Name, checksum: int) -> BlockRecord:
        """This slot, which was taken, holds the block now."""
        self._number += 1
        record = BlockRecord(name, self._number, checksum)
        if (known := self.find(name)) is not None:
            self._drop(*known)
        self._slots[slot], self._slot_of[name] = record, slot
        return record

    def forget(self, name: Name, record: BlockRecord) -> bool:
        """Drop a block, unless it was written anew since; whether it was there."""
        found = self.find(name)
        if found is None or found[1] is not record:
            return False
        self._drop(*found)
        return True

    def end_at(self, slot: int) -> bool:
        """There is no room for this slot and those behind it: go on at the first. False where none is left."""
        if slot == 0:
            return False
        for behind in range(slot, len(self._slots)):
            if (record := self._slots[behind]) is not None:
                self._drop(behind, record)
        del self._slots[slot:]
        self.capacity, self._next = slot, 0
        return True

    def _drop(self, slot: int, record: BlockRecord) -> None:
        self._slots[slot] = None
        del self._slot_of[record.name]

    def check(self) -> None:
        """Integrity; for tests."""
        found = {r.name: slot for slot, r in enumerate(self._slots) if r is not None}
        assert found == self._slot_of, "slots and names disagree"
        assert len(self._slots) <= self.capacity and 0 <= self._next < self.capacity, "a slot beyond the end"
