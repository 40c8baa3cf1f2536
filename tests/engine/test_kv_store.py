"""A node's cache as those see it who move blocks: there is room exactly where all that is missing can be reserved."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.engine.kv.blocks import BlockPool
from afserve.engine.kv.cache import KvCache
from afserve.engine.kv.store import PooledBlocks

BLOCKS = 40


class Cache(KvCache):
    """Only its pool."""

    block_bytes = 64

    def __init__(self, pool):
        self.pool = pool


@given(st.integers(1, BLOCKS), st.integers(0, BLOCKS), st.integers(0, BLOCKS), st.booleans(), st.booleans())
def test_there_is_room_exactly_where_all_that_is_missing_is_reserved(chain, here, held, used, awaited):
    """`here` blocks of the chain are cached, and held by somebody where they are `used`; others hold `held`."""
    pool = BlockPool(BLOCKS, 2)
    store = PooledBlocks(Cache(pool))
    names = [bytes([index]) * 16 for index in range(chain)]
    here = min(here, chain)
    cached = store.reserve(min(here, BLOCKS - 1), copies=False)
    for block, name in zip(cached, names, strict=False):
        store.publish(block, name)
    store.reserve(held, copies=False)
    if not used:
        store.release(cached, awaited=awaited)
    room = store.has_room(names)
    found = store.find(names)
    assert len(found) == len(cached)
    missing = len(names) - len(found)
    assert room == (len(store.reserve(missing, copies=False)) == missing) or (not missing and not room)
