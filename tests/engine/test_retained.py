"""Blocks that are asked to be kept go last, for a time, up to a share, and hurt nobody."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.config import EngineConfig
from afserve.engine.kv.blocks import BlockPool
from afserve.engine.kv.retained import SHARE, Owned, RetainedBlocks, Retention
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, Tenant
from afserve.engine.scheduling.scheduler import Scheduler

SIZE = 4


def filled(pool, count, first=0, retain=None):
    """`count` blocks that were computed and left; their names."""
    names = [number.to_bytes(16, "big") for number in range(first, first + count)]
    blocks = pool.allocate(count)
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    pool.release(blocks, retain=retain)
    return names


def found(pool, names):
    return sum(pool.knows(name) for name in names)


def test_what_is_kept_outlives_what_came_later():
    clock = FakeClock(0.0)
    pool = BlockPool(10, SIZE, clock=clock)
    kept = filled(pool, 4, retain=Retention("a", 60.0))
    later = filled(pool, 6, 100)
    filled(pool, 6, 200)
    assert found(pool, kept) == 4 and not found(pool, later)
    clock.advance(60.0)
    filled(pool, 7, 300)
    assert not found(pool, kept), "its time has passed"
    pool.check([])


def test_no_request_is_refused_a_block_for_it():
    pool = BlockPool(10, SIZE, clock=FakeClock(0.0))
    kept = filled(pool, 5, retain=Retention("a", 60.0))
    assert pool.can_allocate(10) and pool.available == 10
    pool.release(pool.allocate(10))
    assert not found(pool, kept)
    pool.check([])


def test_half_is_kept_and_the_owner_of_most_gives_way():
    pool = BlockPool(16, SIZE, clock=FakeClock(0.0))
    many = filled(pool, 8, retain=Retention("many", 60.0))
    few = filled(pool, 3, 100, retain=Retention("few", 60.0))
    assert len(pool.retained) == 16 // SHARE
    filled(pool, 8, 200)
    assert found(pool, few) == 3 and found(pool, many) == 5
    pool.check([])


def test_what_is_kept_no_longer_goes_when_it_would_have_gone_anyway():
    pool = BlockPool(16, SIZE, clock=FakeClock(0.0))
    old = filled(pool, 6)
    new = filled(pool, 10, 100, retain=Retention("a", 60.0))  # two more than are kept
    filled(pool, 6, 200)
    assert found(pool, new) == 10 and not found(pool, old), "the ordinary ones are older"
    pool.check([])


def test_one_that_is_read_by_others_stays_kept_until_its_own_time():
    clock = FakeClock(0.0)
    pool = BlockPool(8, SIZE, clock=clock)
    names = filled(pool, 2, retain=Retention("a", 60.0))
    blocks = pool.match(names)
    pool.hold(blocks)
    assert not len(pool.retained)
    pool.release(blocks)
    assert len(pool.retained) == 2
    filled(pool, 6, 100)
    filled(pool, 6, 200)
    assert found(pool, names) == 2
    pool.check([])


def test_who_keeps_what_is_told_and_can_be_let_go():
    clock = FakeClock(0.0)
    pool = BlockPool(20, SIZE, clock=clock)
    mine = filled(pool, 3, retain=Retention("a", 60.0))
    other = filled(pool, 2, 100, retain=Retention("b", 10.0))
    held = pool.match(mine[:1])
    pool.hold(held)
    clock.advance(1.0)
    assert pool.retained.owned() == [Owned("a", 3, 59.0), Owned("b", 2, 9.0)]
    assert pool.unpin("a") == 3 and pool.unpin("a") == 0
    assert pool.retained.owned() == [Owned("b", 2, 9.0)]
    pool.release(held)
    later = filled(pool, 14, 200)
    filled(pool, 4, 300)
    assert not found(pool, mine) and found(pool, other) == 2 and found(pool, later) == 14, "they go first"
    clock.advance(9.5)
    assert not pool.retained.owned(), "its time has passed"
    filled(pool, 2, 400, retain=Retention("c", 60.0))
    assert pool.unpin(None) >= 2 and not pool.retained.owned()
    pool.check([])


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.integers(0, 99)), max_size=80))
def test_whoever_has_most_gives_up_first(steps):
    """However owners come and go: compared with counting all of them."""
    kept, blocks, left = RetainedBlocks(1000, FakeClock(0.0)), itertools.count(), dict[int, str]()
    for owner, comes, which in steps:
        if comes or not left:
            block = next(blocks)
            kept.ask(block, Retention(owner, 60.0))
            assert kept.keep_idle(block, block)
            left[block] = owner
        else:
            block = list(left)[which % len(left)]
            kept.drop(block)
            del left[block]
    while left:
        counts = Counter(left.values())
        block, _ = kept.give_up()
        owner = left[block]
        assert counts[owner] == max(counts.values()) and block == min(b for b in left if left[b] == owner)
        del left[block]
    assert not len(kept)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(16, 40))
def test_scheduling_is_the_same_with_and_without(seed, blocks):
    """Any load: what is kept changes which blocks are found, never whether somebody runs, is preempted or ends."""

    def ran(retain):
        draw, clock = random.Random(seed), FakeClock(0.0)
        config = EngineConfig(64, blocks, block_size=SIZE, max_batch_tokens=64, micro_batches=1)
        pool = BlockPool(blocks, SIZE, clock=clock)
        scheduler, told = Scheduler(config, 50, frozenset({0}), pool), []
        for turn in range(200):
            clock.advance(draw.random() * 20)
            prompt = tuple(draw.randrange(1, 3) for _ in range(draw.randrange(1, 40)))
            tenant, seconds = Tenant(draw.choice("ab"), 1), draw.choice((0.0, 5.0, 500.0))
            params = SamplingParams(max_tokens=draw.randrange(1, 9), temperature=0.0, ignore_eos=True)
            if turn < 120 and draw.random() < 0.6:
                kept = seconds if retain else 0.0
                scheduler.submit(GenerationRequest(turn, prompt, params, tenant=tenant, retain=kept))
            if (plan := scheduler.plan(0)) is not None:
                done = scheduler.commit(plan, [[1] for chunk in plan.chunks if chunk.last])
                told += [one.sequence.request.handle for one in done]
            scheduler.check()
            assert len(pool.retained) <= blocks // SHARE
        while scheduler.busy:
            plan = scheduler.plan(0)
            assert plan is not None
            told += [
                one.sequence.request.handle
                for one in scheduler.commit(plan, [[1] for chunk in plan.chunks if chunk.last])
            ]
        assert pool.used == 0
        return sorted(told)

    assert ran(True) == ran(False)
