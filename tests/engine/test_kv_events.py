"""What a cache tells adds up to what can be found in it, at every step of any run."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import EngineConfig
from afserve.engine.kv.blocks import ROOT, BlockPool, block_hash, salted
from afserve.engine.kv.events import MOST_PENDING, BlocksCleared, BlocksRemoved, BlocksStored, CacheEvents
from afserve.engine.kv.told import ToldCache
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.scheduler import Scheduler

SIZE = 4


class Picture:
    """A receiver: blocks by name, with the tokens up to each."""

    def __init__(self):
        self.blocks = {}

    def hear(self, events):
        for event in events:
            match event:
                case BlocksCleared():
                    self.blocks.clear()
                case BlocksStored(names, parent, tokens, salt, before):
                    assert before or parent is None or parent in self.blocks
                    text = before or (self.blocks[parent][1] if parent else ())
                    for index, name in enumerate(names):
                        assert name not in self.blocks
                        text = (*text, *tokens[index * SIZE : (index + 1) * SIZE])
                        self.blocks[name] = salt, text
                case BlocksRemoved(names):
                    for name in names:
                        del self.blocks[name]


def evicting_pool(blocks):
    """A pool with what is told of it, as a node has them."""
    told: list[ToldCache] = []

    def went(blocks):
        for _, name in blocks:
            told[0].gone(name)

    pool = BlockPool(blocks, SIZE, on_evict=went)
    told.append(ToldCache(pool, "tcp://127.0.0.1:5557"))
    return pool, told[0]


def churned(pool, told, draw, calls):
    """Requests that share beginnings come, run, are cancelled and give way; what is told is heard after each step."""
    config = EngineConfig(64, pool.blocks, block_size=SIZE, max_batch_tokens=8, micro_batches=2)
    scheduler, picture, plans = Scheduler(config, 50, frozenset({0}), pool, told), Picture(), {}
    texts = [tuple(draw.randrange(1, 4) for _ in range(40)) for _ in range(3)]
    for call in range(calls):
        kind = draw.randrange(6)
        if kind == 0 and len(scheduler.open) < 6:
            prompt = draw.choice(texts)[: draw.randrange(1, 40)]
            params = SamplingParams(max_tokens=draw.randrange(1, 12), temperature=0.0, ignore_eos=True)
            scheduler.submit(GenerationRequest(call, prompt, params, cache_salt=draw.choice(("", "", "own"))))
        elif kind == 1 and scheduler.open and draw.random() < 0.2:
            scheduler.cancel(draw.choice(list(scheduler.open)))
        elif kind < 5 and (batch := draw.randrange(2)) not in plans:
            if (plan := scheduler.plan(batch)) is not None:
                plans[batch] = plan
        elif plans:
            plan = plans.pop(draw.choice(list(plans)))
            scheduler.commit(plan, [[draw.randrange(1, 4)] for chunk in plan.chunks if chunk.last])
        picture.hear(told.events.take_news())
        assert set(picture.blocks) == set(pool._block_of)
    assert all(named(salt, text) == name for name, (salt, text) in picture.blocks.items())
    return picture, scheduler


def named(salt, text):
    name = salted(ROOT, salt)
    for at in range(0, len(text), SIZE):
        name = block_hash(name, text[at : at + SIZE])
    return name


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(16, 60), st.integers(0, 1 << 32))
def test_a_receivers_picture_is_the_cache(blocks, seed):
    pool, told = evicting_pool(blocks)
    churned(pool, told, random.Random(seed), 300)


@pytest.mark.slow
def test_after_each_of_ten_thousand_operations():
    pool, told = evicting_pool(24)
    picture, scheduler = churned(pool, told, random.Random(5), 10_000)
    assert scheduler.preemptions and picture.blocks


def test_a_block_behind_one_that_went_is_told_with_the_tokens_before_it():
    pool = BlockPool(8, SIZE)
    events, names = CacheEvents(pool), [bytes([n]) * 16 for n in range(3)]
    for block, name in zip(pool.allocate(3), names, strict=True):
        pool.publish(block, name)
    tokens = list(range(12))
    events.stored(names, tokens, 0, 2, "")
    events.gone(names[1])
    events.stored(names, tokens, 2, 3, "")
    assert events.take_news() == [
        BlocksCleared(),
        BlocksStored((names[0], names[1]), None, tuple(range(8)), ""),
        BlocksRemoved((names[1],)),
        BlocksStored((names[2],), names[1], tuple(range(8, 12)), "", tuple(range(8))),
    ]


def test_a_block_that_nobody_can_find_is_not_told():
    pool = BlockPool(8, SIZE)
    events = CacheEvents(pool)
    events.stored([b"a" * 16], range(4), 0, 1, "")
    events.gone(b"b" * 16)
    assert events.take_news() == [BlocksCleared()] and not events.take_news()


@pytest.mark.slow
def test_what_nobody_takes_stays_bounded_and_ends_in_a_new_beginning():
    pool = BlockPool(2, SIZE)
    events, name = CacheEvents(pool), b"a" * 16
    pool.publish(pool.allocate(1)[0], name)
    for _ in range(MOST_PENDING):
        events.stored([name], range(4), 0, 1, "")
        events.gone(name)
    events.stored([name], range(4), 0, 1, "")
    news = events.take_news()
    assert (
        news[0] == BlocksCleared()
        and len(news) <= MOST_PENDING
        and news[-1] == BlocksStored((name,), None, (0, 1, 2, 3), "")
    )
