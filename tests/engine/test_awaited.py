"""Blocks that came for a request which has not begun yet go last of all, for a time and up to a share."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.engine.kv.awaited import SECONDS, SHARE
from afserve.engine.kv.blocks import BlockPool
from afserve.engine.kv.cache import KvCache
from afserve.engine.kv.retained import Retention
from afserve.engine.kv.store import PooledBlocks
from tests.engine.test_retained import SIZE, filled, found


class Cache(KvCache):
    """Only its pool."""

    block_bytes = 64

    def __init__(self, pool):
        self.pool = pool


def came(pool, count, first):
    """A chain of blocks that was brought for a request; their names."""
    names = [number.to_bytes(16, "big") for number in range(first, first + count)]
    blocks = pool.allocate(count)
    pool.publish_restored(blocks, names, "disk")
    pool.release(blocks, awaited=True)
    return names


def test_what_a_request_waits_for_outlives_all_else_until_it_begins_and_ends():
    pool = BlockPool(10, SIZE, clock=FakeClock(0.0))
    kept = filled(pool, 3, retain=Retention("a", 60.0))
    waited = came(pool, 4, 100)
    filled(pool, 3, 200)
    filled(pool, 6, 300)
    assert found(pool, waited) == 4 and not found(pool, kept)
    blocks = pool.match(waited)
    pool.hold(blocks)  # it begins
    pool.release(blocks)
    filled(pool, 10, 400)
    assert not found(pool, waited), "an ordinary cached chain since then"
    pool.check([])


def test_nobody_who_runs_is_refused_a_block_for_it_and_the_last_chain_loses_its_end_first():
    pool = BlockPool(10, SIZE, clock=FakeClock(0.0))
    first, last = came(pool, 2, 100), came(pool, 3, 200)
    assert pool.available == 10 and pool.can_allocate(10)
    held = pool.allocate(7)
    assert found(pool, first) == 2 and [pool.knows(name) for name in last] == [True, False, False]
    pool.release(held)
    pool.check([])


def test_it_ends_with_its_time_and_beyond_a_share_nothing_is_kept():
    clock = FakeClock(0.0)
    pool = BlockPool(10, SIZE, clock=clock)
    waited = came(pool, 7, 100)
    assert len(pool.awaited) == 10 // SHARE and found(pool, waited) == 7
    filled(pool, 5, 200)
    assert [pool.knows(name) for name in waited] == [True] * 5 + [False] * 2
    clock.advance(SECONDS)
    filled(pool, 10, 300)
    assert not found(pool, waited) and not len(pool.awaited)
    pool.check([])


def test_what_is_brought_for_one_request_takes_of_another_the_end_and_only_where_nothing_else_is():
    pool = BlockPool(64, SIZE, clock=FakeClock(0.0))
    store = PooledBlocks(Cache(pool))
    waited = came(pool, 32, 100)
    store.release(store.reserve(32, copies=False))
    assert found(pool, waited) == 32
    assert len(store.reserve(64, copies=False)) == 64 - 64 // 32
    assert [pool.knows(name) for name in waited] == [True] * 2 + [False] * 30


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(4, 24))
def test_books_are_right_through_any_life(seed, blocks):
    draw, clock = random.Random(seed), FakeClock(0.0)
    pool, held, number = BlockPool(blocks, SIZE, clock=clock), [], 0
    for _ in range(120):
        clock.advance(draw.random() * 4)
        count = draw.randrange(1, 5)
        if pool.can_allocate(count):
            taken = pool.allocate(count)
            for block in taken:
                pool.publish(block, (number := number + 1).to_bytes(16, "big"))
            held.append(taken)
        if held and draw.random() < 0.7:
            retain = Retention("a", draw.random() * 20) if draw.random() < 0.5 else None
            pool.release(held.pop(draw.randrange(len(held))), retain=retain, awaited=draw.random() < 0.5)
        names = [one.to_bytes(16, "big") for one in range(max(1, number - 9), number + 1)]
        if draw.random() < 0.3 and (some := pool.match(names)):
            pool.hold(some)
            held.append(some)
        pool.check(held)


def test_a_chain_is_brought_only_where_nothing_that_others_wait_for_makes_room():
    pool = BlockPool(64, SIZE, clock=FakeClock(0.0))
    room = pool.awaited.room_for
    assert room(60, 0, pool.available), "nobody runs: there is as much as there ever is"
    came(pool, 20, 100)
    running = pool.allocate(10)
    assert pool.available == 54 and room(12, 0, 54) and not room(13, 0, 54), (
        "half of the blocks are kept for who waits"
    )
    assert room(6, 6, 54) and not room(7, 6, 54), "what is under way counts"
    more = pool.allocate(22)
    assert room(10, 0, pool.available) and not room(11, 0, pool.available), (
        "32 idle, 20 awaited, 2 for who runs"
    )
    pool.release(running + more)
    assert room(60, 0, pool.available), "nobody runs: nobody begins either"
