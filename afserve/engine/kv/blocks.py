"""Blocks of KV cache as integers: who holds which, and which full blocks can be found again by content.

A block is free, held (reference count > 0), or cached: unheld but still findable by its name until it is evicted for
reuse, least recently released first. A cached copy that is kept for another node stays for longer: as if it had been
released as many releases later as there are blocks. Blocks that were asked to be kept (`retained`) go after those, and
blocks that came for a request which has not begun yet (`awaited`) last. It knows no tensors and no requests.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from afserve.clock import Clock
from afserve.engine.kv.awaited import AwaitedBlocks
from afserve.engine.kv.free_blocks import FreeBlocks
from afserve.engine.kv.retained import Released, RetainedBlocks, Retention
from afserve.engine.stats import COPIES, ORDINARY, RETAINED
from afserve.tiles import PictureTile


class GroupTable(Protocol):
    """A group behind the first one, as a step reads it."""

    block_size: int

    def table(self, blocks: Iterable[int]) -> list[int]:
        """Its block table, given the first group's; 0, which nobody reads, for what is not there."""

    def __contains__(self, block: int) -> bool:
        """Whether it has anything of the tokens of this block of the first group."""

    def attach(self, block: int) -> bool:
        """Make room for that; whether there was any."""


Hash = bytes
OnEvict = Callable[[Sequence[tuple[int, Hash]]], None]
OnIdle = Callable[[Sequence[tuple[int, Hash]]], None]
ROOT: Hash = b""


def root_hash(model: str, dtype: str, salt: bytes = b"") -> Hash:
    """What stands before a sequence's first block: equal names mean equal keys and values only within one model and
    dtype, and nobody finds blocks of another salt."""
    digest = hashlib.blake2b(digest_size=16, person=b"afserve-kv-root")
    for part in (model.encode(), dtype.encode(), salt):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_hash(parent: Hash, tokens: Sequence[int]) -> Hash:
    """Name of a full block: its tokens and everything before them. 128 bits of BLAKE2b."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def salted(root: Hash, salt: str) -> Hash:
    """The root of one request's blocks: those of another salt are never found."""
    if not salt:
        return root
    return hashlib.blake2b(root + salt.encode(), digest_size=16, person=b"afserve-kv-salt").digest()


def pictured(parent: Hash, tiles: Iterable[PictureTile]) -> Hash:
    """In the place of `parent`, for a block in which these tiles begin: other pixels make another name."""
    begun = b"".join(tile.start.to_bytes(8, "big") + tile.name for tile in tiles)
    return (
        hashlib.blake2b(parent + begun, digest_size=16, person=b"afserve-kv-tiles").digest()
        if begun
        else parent
    )


class BlockPool:
    """`root` is the name before the first block of every sequence. `on_evict` is told the blocks that lose their names,
    with those, once, all of one allocation together, before they are given out: what they hold can still be read, and
    the last of a chain comes first. `on_idle` is told the named blocks that nobody holds any more and that are no
    copies, those of one release together, in the order of their chain.

    What sequences do (`grow`, and calls that say how many tokens are `computed`) a pool of several groups does for all
    of them (`grouped_pool.py`). This one has one group.
    """

    slides = False  # whether `slide` has anything to do

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        root: Hash = ROOT,
        on_evict: OnEvict = lambda blocks: None,
        on_idle: OnIdle = lambda blocks: None,
        clock: Clock | None = None,
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self.root = root
        self._on_evict, self._on_idle = on_evict, on_idle
        self._free = FreeBlocks(blocks)
        self._references = [0] * blocks
        self._hash_of: dict[int, Hash] = {}
        self._block_of: dict[Hash, int] = {}
        # All three in the order of release; the value is its number. Of `_lapsed` somebody had asked to keep them.
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._copies: OrderedDict[int, int] = OrderedDict()
        self._lapsed: OrderedDict[int, int] = OrderedDict()
        self.retained = RetainedBlocks(blocks, clock)
        self.awaited = AwaitedBlocks(blocks, clock)
        self._idle: tuple[OrderedDict[int, int] | RetainedBlocks | AwaitedBlocks, ...]
        self._idle = self._cached, self._copies, self._lapsed, self.retained, self.awaited
        self._releases = 0
        self._restored: dict[int, str] = {}  # blocks that came from a tier and were not yet used
        self.copy_hits = 0
        self.evicted: Counter[str] = Counter()  # by what they were
        self.further: Sequence[GroupTable] = ()

    @property
    def blocks(self) -> int:
        return len(self._references)

    @property
    def available(self) -> int:
        return len(self._free) + sum(len(blocks) for blocks in self._idle)

    @property
    def free(self) -> int:
        """Blocks in which nothing is."""
        return len(self._free)

    def idle_names(self) -> list[Hash]:
        """Of what nobody holds and can be found: what was asked to be kept first, then what was released last; chains
        from their beginning on."""
        others = [pair for blocks in (self._cached, self._lapsed) for pair in blocks.items()]
        order = [sorted(some, key=lambda one: -one[1]) for some in (self.retained.released(), others)]
        return [self._hash_of[block] for some in order for block, _ in some]

    @property
    def copies(self) -> int:
        """Cached blocks that are kept for another node."""
        return len(self._copies)

    @property
    def used(self) -> int:
        return self.blocks - self.available

    def own_blocks(self, group: int, blocks: Sequence[int]) -> Sequence[int]:
        """Those of a group, by its number, that belong to these of the first one, as far as they are there."""
        return blocks

    def match(self, hashes: Iterable[Hash]) -> list[int]:
        """The longest run of known blocks from the start. They are not yet held: `hold` them at once."""
        found: list[int] = []
        if self.caching:
            for digest in hashes:
                block = self._block_of.get(digest)
                if block is None:
                    break
                found.append(block)
        return found

    def knows(self, name: Hash) -> bool:
        """Whether a block of this name can be found."""
        return name in self._block_of

    def hold(self, blocks: Iterable[int], computed: int | None = None) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            self._lapsed.pop(block, None)
            self.retained.hold(block)
            self.awaited.let_go(block)
            if self._copies.pop(block, None) is not None:
                self.copy_hits += 1
            self._references[block] += 1

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def can_allocate(self, count: int, sparing: Iterable[int] = ()) -> bool:
        """Whether `count` blocks can be had without touching the unheld ones of `sparing`."""
        spared = sum(1 for block in sparing if any(block in blocks for blocks in self._idle))
        return count <= self.available - spared

    def allocate(self, count: int, last: int | None = None) -> list[int]:
        """`count` held blocks with unknown content, behind block `last` where those are free. The caller asked
        `can_allocate`."""
        assert count <= self.available, f"{count} blocks asked, {self.available} available"
        taken: list[int] = []
        while len(taken) < count and self._free:
            taken += self._free.take_some(last, count - len(taken))
            last = taken[-1]
        if len(taken) < count:
            self.forget_late()
            evicted = [self._evict() for _ in range(count - len(taken))]
            self._on_evict(evicted)
            taken += [block for block, _ in evicted]
        for block in taken:
            self._references[block] = 1
        return taken

    @property
    def growable(self) -> int:
        """How many blocks sequences can get."""
        return self.available

    def can_grow(self, count: int, prefix: Sequence[int] = ()) -> bool:
        """Whether a sequence that holds these blocks from now on can have `count` more."""
        return self.can_allocate(count, prefix)

    def grow(self, blocks: list[int], count: int) -> None:
        """Append `count` blocks to a sequence's. The caller asked `can_grow`."""
        blocks += self.allocate(count, blocks[-1] if blocks else None)

    def slide(self, blocks: Sequence[int], before: int, after: int) -> None:
        """Of this sequence `after` tokens are computed now: what only earlier ones saw is free."""

    def _evict(self) -> tuple[int, Hash]:
        ordinary = self._next_evicted()
        if ordinary:
            block, _ = ordinary.popitem(last=False)
            self.evicted[COPIES if ordinary is self._copies else ORDINARY] += 1
        elif self.retained:
            block, _ = self.retained.give_up()
            self.evicted[RETAINED] += 1
        else:
            block, _ = self.awaited.give_up_newest()
            self.evicted[ORDINARY] += 1
        self.retained.drop(block)
        name = self._hash_of.pop(block)
        del self._block_of[name]
        self._restored.pop(block, None)
        return block, name

    def _next_evicted(self) -> OrderedDict[int, int]:
        """Where the cached block is that was released first, by the count that is a copy's."""

        def first(blocks: OrderedDict[int, int]) -> int:
            return next(iter(blocks.values())) + (self.blocks if blocks is self._copies else 0)

        there = [blocks for blocks in (self._cached, self._lapsed, self._copies) if blocks]
        return min(there, key=first) if there else self._cached

    def forget_late(self) -> None:
        """Claims whose time has passed are none."""
        if self.retained:
            self._let_lapse(self.retained.surplus())
        if self.awaited:
            for block, released in self.awaited.take_late_ones():
                self._keep_idle(block, released)

    def _let_lapse(self, blocks: Sequence[Released]) -> None:
        """These are retained no longer: ordinary cached ones, as old as they are."""
        self._lapsed.update(sorted(blocks, key=lambda one: one[1]))

    def _keep_idle(self, block: int, released: int) -> None:
        """Nobody holds it, and it can be found."""
        if not self.retained.keep_idle(block, released):
            self._cached[block] = released

    def unpin(self, owner: str | None, names: Iterable[Hash] | None = None) -> int:
        """Blocks that this owner, or anybody, has asked to keep are ordinary cached ones from now on, those with these
        names where that is said: how many."""
        wanted = None if names is None else {self._block_of[name] for name in names if name in self._block_of}
        count, idle = self.retained.let_go_of(owner, wanted)
        self._let_lapse(idle)
        return count

    def publish(self, block: int, digest: Hash) -> None:
        """A held block is full and written: let others find it. The first block of a content wins."""
        if self.caching and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def _forget(self, block: int) -> None:
        """Its name is nobody's."""
        del self._block_of[self._hash_of.pop(block)]
        self._restored.pop(block, None)
        self.retained.drop(block)
        if self._references[block] == 0:
            for blocks in (self._cached, self._copies, self._lapsed):
                blocks.pop(block, None)
            self.awaited.let_go(block)
            self._free.add(block)

    def release(
        self,
        blocks: Sequence[int],
        *,
        copies: bool = False,
        computed: int | None = None,
        retain: Retention | None = None,
        awaited: bool = False,
    ) -> None:
        """Give back in reverse, so that the tail of a prefix is reused before its head. `copies` are kept for another
        node, those that can be found as `retain` says, and what is `awaited` by a request until that begins."""
        idle: list[tuple[int, Hash]] = []
        chain: list[Released] = []
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if retain is not None and block in self._hash_of:
                self.retained.ask(block, retain)
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._releases += 1
                    if copies:
                        self._copies[block] = self._releases
                    elif awaited:
                        chain.append((block, self._releases))
                    else:
                        self._keep_idle(block, self._releases)
                    if not copies:
                        idle.append((block, self._hash_of[block]))
                else:
                    self._free.add(block)
        for block, released in reversed(self.awaited.keep_chain(reversed(chain))):
            self._keep_idle(block, released)
        self.forget_late()
        if idle:
            self._on_idle(idle[::-1])

    def publish_restored(self, blocks: Sequence[int], names: Sequence[Hash], tier: str) -> None:
        """`publish` of each; these came from that tier."""
        for block, name in zip(blocks, names, strict=True):
            self.publish(block, name)
            if block in self._hash_of:
                self._restored[block] = tier

    def take_restored(self, blocks: Iterable[int]) -> Counter[str]:
        """How many of them came from which tier; each is counted once."""
        if not self._restored:
            return Counter()
        return Counter(self._restored.pop(block) for block in blocks if block in self._restored)

    def check(self, holders: Iterable[Sequence[int]], computed: Sequence[int] = ()) -> None:
        """Integrity: reference counts equal what `holders` hold, and every block is in exactly one state. The first
        holders are sequences of which so many tokens are `computed`."""
        counted = [0] * self.blocks
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        assert counted == self._references, "reference counts disagree with the holders"
        idle = [*self._free, *(block for blocks in self._idle for block in blocks)]
        assert len(set(idle)) == len(idle), "a block is idle twice"
        assert all(self._references[b] == 0 for b in idle), "a held block is on an idle list"
        assert len(idle) + sum(1 for r in self._references if r) == self.blocks, "a block is lost"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "the two hash maps disagree"
