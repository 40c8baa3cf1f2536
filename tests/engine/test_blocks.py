"""Blocks of the pool against a model that keeps books in plain sets: owners, names, and what is told of evictions."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.engine.kv.blocks import ROOT, BlockPool, block_hash, root_hash

BLOCKS = 6
CALLS = st.lists(
    st.tuples(st.sampled_from(["allocate", "publish", "release", "share", "find"]), st.integers(0, 50)),
    max_size=60,
)


class Books:
    """What must be true of a pool after any calls: who holds which blocks, and which names must still be found."""

    def __init__(self, caching: bool) -> None:
        self.told: list[tuple[int, bytes]] = []
        self.pool = BlockPool(BLOCKS, 2, caching=caching, root=b"r", on_evict=self._evicted)
        self.holders: list[list[int]] = []
        self.named: dict[bytes, int] = {}
        self.fresh = 0

    def _evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        assert blocks, "told of nothing"
        for block, name in blocks:
            assert not self.pool.is_held(block), "told after it was given out"
            assert self.named.pop(name) == block, "an eviction of what was not there, or twice"
            self.told.append((block, name))

    def allocate(self, n: int) -> None:
        count = n % 3 + 1
        if self.pool.can_allocate(count):
            free = BLOCKS - self.pool.used - len(self.named.keys() - self._held_names())
            before = len(self.told)
            self.holders.append(self.pool.allocate(count))
            assert len(self.told) - before == max(0, count - free), "evicted more or less than was needed"

    def _held_names(self) -> set[bytes]:
        held = {block for blocks in self.holders for block in blocks}
        return {name for name, block in self.named.items() if block in held}

    def publish(self, n: int) -> None:
        if not self.holders:
            return
        block, name = self.holders[n % len(self.holders)][0], b"name %d" % (n % 9)
        wins = self.pool.caching and name not in self.named and block not in self.named.values()
        self.pool.publish(block, name)
        if wins:
            self.named[name] = block

    def release(self, n: int) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(n % len(self.holders)))

    def share(self, n: int) -> None:
        found = self.pool.match([b"name %d" % (n % 9)])
        if found:
            self.pool.hold(found)
            self.holders.append(found)

    def find(self, n: int) -> None:
        name = b"name %d" % (n % 9)
        assert self.pool.match([name]) == ([self.named[name]] if name in self.named else [])


@settings(max_examples=150, deadline=None)
@given(CALLS, st.booleans())
def test_no_leak_no_second_owner_and_each_eviction_told_once(
    calls: list[tuple[str, int]], caching: bool
) -> None:
    books = Books(caching)
    for call, n in calls:
        getattr(books, call)(n)
        books.pool.check(books.holders)
        owned = Counter(block for blocks in books.holders for block in blocks)
        shared = {block for block, owners in owned.items() if owners > 1}
        assert shared <= set(books.named.values()), "two own a block that nobody could find"
        for name, block in books.named.items():
            assert books.pool.match([name]) == [block], "a name was lost without a word"
    while books.holders:
        books.release(0)
    assert books.pool.used == 0
    books.pool.release(books.pool.allocate(BLOCKS))
    assert not books.named, "what was reused was not told"
    assert caching or not books.told


def test_names_cover_model_dtype_salt_and_all_tokens_before() -> None:
    roots = [
        ROOT, root_hash("m", "float32"), root_hash("m", "bfloat16"), root_hash("n", "float32"),
        root_hash("m", "float32", b"salt"), root_hash("mf", "loat32"), root_hash("m", "float32salt"),
    ]  # fmt: skip
    names = [block_hash(root, tokens) for root in roots for tokens in ((1, 2), (2, 1), (1, 2, 3))]
    names += [block_hash(block_hash(root, (1, 2)), (1, 2)) for root in roots]
    assert len(set(names)) == len(names)
    assert root_hash("m", "float32") == root_hash("m", "float32", b"")
    assert all(len(root) == 16 for root in roots[1:])


def test_copies_for_others_stay_for_longer():
    """As if each had been released as many releases later as there are blocks."""
    pool = BlockPool(4, 1)
    copy, *own = pool.allocate(4)
    for block in (copy, *own):
        pool.publish(block, bytes([block]))
    pool.release([copy], copies=True)
    assert pool.copies == 1 and pool.available == 1
    for block in own:
        pool.release([block])
    pool.check([])
    evicted = []
    for turn in range(6):
        (block,) = pool.allocate(1)
        evicted.append(block == copy)
        pool.publish(block, bytes([100 + turn]))
        pool.release([block])
    assert evicted.index(True) == 4, "all others before it, one of them twice"
    assert pool.copies == 0


def test_a_copy_that_is_used_is_counted_and_is_a_copy_no_more():
    pool = BlockPool(2, 1)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    pool.release([block], copies=True)
    pool.hold(pool.match([b"x"]))
    assert (pool.copy_hits, pool.copies) == (1, 0)
    pool.release([block])
    assert pool.copies == 0 and pool.available == 2
    pool.check([])


def test_named_blocks_that_nobody_holds_any_more_are_told_in_the_order_of_their_chain():
    told = []
    pool = BlockPool(8, 4, on_idle=lambda blocks: told.append(list(blocks)))
    blocks = pool.allocate(4)
    for block, name in zip(blocks[:3], (b"a", b"b", b"c"), strict=True):
        pool.publish(block, name)
    pool.hold(blocks[:1])
    pool.release(blocks)
    assert told == [[(blocks[1], b"b"), (blocks[2], b"c")]]
    pool.release(blocks[:1])
    assert told[1:] == [[(blocks[0], b"a")]]
    pool.hold(blocks[1:2])
    pool.release(blocks[1:2], copies=True)
    assert len(told) == 2  # its owner tells it


def test_blocks_from_a_tier_are_counted_once_and_not_under_another_name():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    pool.publish_restored(blocks[:2], [b"a", b"b"], "disk")
    pool.release(blocks)
    assert pool.take_restored(blocks[:1]) == {"disk": 1} and not pool.take_restored(blocks[:1])
    again = pool.allocate(3)
    assert not pool.take_restored(again)
    pool.release(again)
