"""The pool of a model with several groups: blocks of the first one, and what the others keep of the same tokens.

A group that sees all tokens has its blocks at fixed places. One that sees the last ones only attaches blocks to those
of the first group that a sequence computes, and takes them back, longest unused first, from those that nobody's next
token can see: of what is cached the ends of prefixes stay longest. A prefix is found up to where everything that its
next token sees is there. It knows no tensors and no requests.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from afserve.clock import Clock
from afserve.engine.kv.blocks import ROOT, BlockPool, Hash, OnEvict, OnIdle
from afserve.engine.kv.groups import KvGroup
from afserve.engine.kv.retained import SHARE, Retention


class FixedBlocks:
    """The blocks of a group that sees all tokens, by those of the first group."""

    def __init__(self, group: KvGroup, unit: int) -> None:
        """`unit` is the first group's block size."""
        self.block_size, self._per = group.block_size, unit // group.block_size

    def table(self, blocks: Iterable[int]) -> list[int]:
        """This group's block table, given the first group's."""
        return [block * self._per + at for block in blocks for at in range(self._per)]

    def __contains__(self, block: int) -> bool:
        return True

    def attach(self, block: int) -> bool:
        """It is always there."""
        return True


class AttachedBlocks:
    """The blocks of a group that sees the last tokens only: so many of them in a row are attached to a block of the
    first group, or none."""

    def __init__(
        self,
        group: KvGroup,
        unit: int,
        on_take: Callable[[int], None],
        is_asked: Callable[[int], bool] = lambda block: False,
    ) -> None:
        """`on_take` is told a block of the first group whose part is about to be taken back, and can still be read;
        `is_asked` says whether somebody wants it to stay."""
        assert group.sees is not None
        self._is_asked = is_asked
        self.block_size, self._per = group.block_size, unit // group.block_size
        self._unit, self._sees, self._on_take = unit, group.sees, on_take
        self._rows = group.blocks // self._per
        self._free = list(range(self._rows))
        self._row: dict[int, int] = {}
        self._readers: dict[int, int] = {}  # sequences whose next token sees it
        # Attached and without readers, the longest unused first.
        self._unread: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()  # the same, which go after those
        self._ends: set[int] = set()  # attached, and seen from the end of what somebody wants to stay

    def table(self, blocks: Iterable[int]) -> list[int]:
        """As of `FixedBlocks`; 0, which nobody reads, for what is not attached."""
        found: list[int] = []
        for block in blocks:
            row = self._row.get(block)
            found += (0,) * self._per if row is None else range(row * self._per, (row + 1) * self._per)
        return found

    def __contains__(self, block: int) -> bool:
        return block in self._row

    @property
    def available(self) -> int:
        """How many blocks of the first group this can attach to."""
        return len(self._free) + len(self._unread) + len(self._kept)

    def spared(self, blocks: Iterable[int]) -> int:
        """How many of these `available` does not count once they are read again."""
        return sum(1 for block in blocks if block in self._unread or block in self._kept)

    def first_seen(self, computed: int) -> int:
        """Of a sequence's blocks, the first that is seen by the token behind so many."""
        return max(0, computed - self._sees + 1) // self._unit

    def attach(self, block: int) -> bool:
        """Whether there was room. Nobody reads it yet."""
        if block not in self._row:
            if not self.available:
                return False
            if not self._free:
                taken = self._next_taken()
                self._on_take(taken)
                self.detach(taken)
            self._row[block] = self._free.pop()
        if not self._readers.get(block):
            self._kept.pop(block, None)
            self._unread[block] = None
            self._unread.move_to_end(block)
        return True

    def _next_taken(self) -> int:
        """The longest unused one. What is asked to stay goes last, and is half of all at most."""
        for block in list(self._kept):
            if self._is_asked(block):
                break
            return block
        for block in list(self._unread):
            if not (block in self._ends and self._is_asked(block)) or len(self._kept) >= self._rows // SHARE:
                return block
            del self._unread[block]
            self._kept[block] = None
        return next(iter(self._kept))

    def keep(self, blocks: Iterable[int]) -> None:
        """These are asked to stay, as far as they are attached."""
        self._ends.update(block for block in blocks if block in self._row)

    def detach(self, block: int) -> None:
        """May be said of any that nobody reads."""
        if (row := self._row.pop(block, None)) is not None:
            self._unread.pop(block, None)
            self._kept.pop(block, None)
            self._ends.discard(block)
            self._free.append(row)

    def read(self, blocks: Iterable[int]) -> None:
        """One more sequence's next token sees these."""
        for block in blocks:
            self._readers[block] = self._readers.get(block, 0) + 1
            self._unread.pop(block, None)
            self._kept.pop(block, None)

    def unread(self, blocks: Iterable[int]) -> None:
        """It does no more."""
        for block in blocks:
            if left := self._readers.pop(block) - 1:
                self._readers[block] = left
            elif block in self._row:
                self._unread[block] = None

    def worthless(self, block: int) -> None:
        """Nobody can find it any more: it is the first to be taken back."""
        if block in self._unread:
            self._unread.move_to_end(block, last=False)

    def check(self, holders: Iterable[tuple[Sequence[int], int]]) -> None:
        """`holders` are sequences' blocks with how many tokens are computed."""
        readers: dict[int, int] = {}
        for blocks, computed in holders:
            for block in blocks[self.first_seen(computed) :]:
                readers[block] = readers.get(block, 0) + 1
        assert readers == self._readers, "what sequences see is miscounted"
        assert readers.keys() <= self._row.keys(), "a sequence sees what is not there"
        unread = [*self._unread, *self._kept]
        assert sorted(unread) == sorted(self._row.keys() - readers.keys()), "a block is read and unread"
        assert self._ends <= self._row.keys(), "a part that is not there is to stay"
        assert sorted([*self._free, *self._row.values()]) == list(range(self._rows)), (
            "a row is lost, or there twice"
        )


class GroupedPool(BlockPool):
    """`further` are the groups behind the first, in order."""

    def __init__(
        self,
        groups: Sequence[KvGroup],
        *,
        caching: bool = True,
        root: Hash = ROOT,
        on_evict: OnEvict = lambda blocks: None,
        on_idle: OnIdle = lambda blocks: None,
        on_part: OnEvict = lambda blocks: None,
        clock: Clock | None = None,
    ) -> None:
        """`on_part` is told blocks that are about to lose a part and keep their names, one at a time."""
        self._on_part = on_part
        first, *others = groups
        super().__init__(
            first.blocks,
            first.block_size,
            caching=caching,
            root=root,
            on_evict=on_evict,
            on_idle=on_idle,
            clock=clock,
        )
        unit, asks = first.block_size, self.retained.asks
        attached = {
            group: AttachedBlocks(group, unit, self._loses_part, asks)
            for group in others
            if group.sees is not None
        }
        self.further = tuple(attached.get(group) or FixedBlocks(group, first.block_size) for group in others)
        self._attached = list(attached.values())
        self.slides = bool(attached)

    def _loses_part(self, block: int) -> None:
        if (name := self._hash_of.get(block)) is not None:
            self._on_part([(block, name)])

    def own_blocks(self, group: int, blocks: Sequence[int]) -> Sequence[int]:
        if not group:
            return blocks
        further = self.further[group - 1]
        return further.table(block for block in blocks if block in further)

    def match(self, hashes: Iterable[Hash]) -> list[int]:
        found = super().match(hashes)
        while found:
            lacking = [
                at
                for attached in self._attached
                for at in range(attached.first_seen(len(found) * self.block_size), len(found))
                if found[at] not in attached
            ]
            if not lacking:
                break
            del found[max(lacking) :]
        return found

    @property
    def growable(self) -> int:
        return min([self.available, *(attached.available for attached in self._attached)])

    def can_grow(self, count: int, prefix: Sequence[int] = ()) -> bool:
        tokens = len(prefix) * self.block_size
        fits = (
            count <= attached.available - attached.spared(prefix[attached.first_seen(tokens) :])
            for attached in self._attached
        )
        return self.can_allocate(count, prefix) and all(fits)

    def allocate(self, count: int, last: int | None = None) -> list[int]:
        taken = super().allocate(count, last)
        for attached in self._attached:
            for block in taken:
                attached.detach(block)
        return taken

    def grow(self, blocks: list[int], count: int) -> None:
        before = len(blocks)
        super().grow(blocks, count)
        for attached in self._attached:
            for block in blocks[before:]:
                there = attached.attach(block)
                assert there, "the caller asked can_grow"
                attached.read((block,))

    def publish(self, block: int, digest: Hash) -> None:
        """A block of which everything is there takes the name of one that lost a part."""
        other = self._block_of.get(digest)
        if other is not None and other != block and self._whole(block) and not self._whole(other):
            self._forget(other)
        super().publish(block, digest)

    def _whole(self, block: int) -> bool:
        return all(block in attached for attached in self._attached)

    def hold(self, blocks: Iterable[int], computed: int | None = None) -> None:
        held = list(blocks)
        super().hold(held)
        if computed is not None:
            for attached in self._attached:
                attached.read(held[attached.first_seen(computed) :])

    def release(
        self,
        blocks: Sequence[int],
        *,
        copies: bool = False,
        computed: int | None = None,
        retain: Retention | None = None,
        awaited: bool = False,
    ) -> None:
        if computed is not None:
            for attached in self._attached:
                seen = blocks[attached.first_seen(computed) :]
                attached.unread(seen)
                if retain is not None:
                    attached.keep(seen)
        super().release(blocks, copies=copies, retain=retain, awaited=awaited)
        for attached in self._attached:
            for block in blocks:
                if block not in self._hash_of:
                    attached.worthless(block)

    def slide(self, blocks: Sequence[int], before: int, after: int) -> None:
        for attached in self._attached:
            first, last = attached.first_seen(before), attached.first_seen(after)
            if first < last:
                attached.unread(blocks[first:last])

    def check(self, holders: Iterable[Sequence[int]], computed: Sequence[int] = ()) -> None:
        held = list(holders)
        super().check(held)
        for attached in self._attached:
            attached.check(zip(held, computed, strict=False))
