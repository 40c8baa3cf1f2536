"""Pools of several groups: what sequences see is there, whatever is freed, and a prefix is found where it can go on."""

import random

import pytest

from afserve.clock import FakeClock
from afserve.config import EngineConfig
from afserve.engine.kv.grouped_pool import GroupedPool
from afserve.engine.kv.groups import GroupKind, KvGroup, check_groups
from afserve.engine.kv.retained import Retention
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.scheduling.step_plan import StepPlan

SIZE, BLOCKS = 4, 40
FULL = KvGroup(GroupKind.FULL, (0,), BLOCKS, SIZE)
KEYS = KvGroup(GroupKind.INDEXED, (1,), 4 * BLOCKS, 1)


def window(sees, blocks, size=2):
    return KvGroup(GroupKind.WINDOW, (2,), blocks, size, window=sees)


def state(blocks):
    return KvGroup(GroupKind.STATE, (3,), blocks, SIZE)


def names(count, first=0):
    return [bytes([first + index]) * 16 for index in range(count)]


def computed(pool, chain, blocks, tokens):
    """A sequence of so many tokens, computed at once, and its blocks published."""
    pool.grow(blocks, -(-tokens // SIZE))
    for block, name in zip(blocks, chain, strict=False):
        pool.publish(block, name)
    pool.slide(blocks, 0, tokens)


def test_what_no_token_sees_any_more_is_free_and_the_prefix_still_found_at_its_end():
    pool = GroupedPool((FULL, window(9, 16)))  # eight blocks of the first group can have it
    blocks: list[int] = []
    computed(pool, names(7), blocks, 28)
    assert pool.growable == 1 + 5, "token 28 sees those from 20 on: the first five blocks are free"
    assert pool.match(names(7)) == blocks
    pool.check([blocks], [28])
    pool.release(blocks, computed=28)
    more: list[int] = []
    computed(pool, names(5, 100), more, 20)
    assert pool.match(names(7)) == blocks, "three blocks were kept for its end"
    assert pool.match(names(5)) == [], "of a shorter one the window is gone"
    pool.check([more], [20])


def test_a_state_is_kept_where_somebody_may_go_on():
    pool = GroupedPool((FULL, KEYS, state(3)))
    blocks: list[int] = []
    pool.grow(blocks, 2)
    pool.slide(blocks, 0, 8)
    pool.publish(blocks[0], names(2)[0])
    pool.publish(blocks[1], names(2)[1])
    pool.check([blocks], [8])
    pool.grow(blocks, 1)
    pool.slide(blocks, 8, 9)
    pool.check([blocks], [9])
    assert pool.match(names(2)) == blocks[:2] and pool.match(names(1)) == blocks[:1]
    other: list[int] = []
    pool.grow(other, 1)  # there is room for one: the state that was unread longest goes
    assert pool.match(names(1)) == [] and pool.match(names(2)) == blocks[:2]
    assert list(pool.own_blocks(1, blocks[:1])) == [4 * blocks[0] + at for at in range(4)]


def test_the_end_of_what_is_to_stay_is_found_whole():
    """Its blocks stay; so does what a window or a state has of its last tokens, for as long, half of all at most."""
    clock = FakeClock(0.0)
    pool = GroupedPool((FULL, window(9, 16), state(6)), clock=clock)
    kept: list[int] = []
    computed(pool, names(5), kept, 20)
    pool.release(kept, computed=20, retain=Retention("a", 60.0))

    def others(first):
        for index in range(6):
            blocks: list[int] = []
            computed(pool, names(2, first + 2 * index), blocks, 8)
            pool.release(blocks, computed=8)
            pool.check([])

    others(100)
    assert pool.match(names(5)) == kept, "others took its window or its state"
    clock.advance(61.0)
    others(140)
    assert pool.match(names(5)) == [], "its time has passed"


def test_what_is_to_stay_stands_in_nobodys_way():
    pool = GroupedPool((FULL, state(4)), clock=FakeClock(0.0))
    for first in range(0, 80, 2):
        blocks: list[int] = []
        computed(pool, names(2, first), blocks, 8)
        pool.release(blocks, computed=8, retain=Retention("a", 60.0))
        pool.check([])
    assert pool.growable == 4


def test_whoever_computes_again_what_lost_a_part_has_the_name_from_then_on():
    pool = GroupedPool((FULL, state(3)))
    first: list[int] = []
    second: list[int] = []
    computed(pool, names(2), first, 8)
    pool.release(first, computed=8)
    computed(pool, names(2, 50), second, 8)
    pool.release(second, computed=8)
    third: list[int] = []
    pool.grow(third, 3)
    pool.release(third, computed=0)
    assert pool.match(names(2)) == []
    again: list[int] = []
    computed(pool, names(2), again, 8)
    assert pool.match(names(2)) == again != first
    pool.check([again], [8])


def test_blocks_from_elsewhere_are_attached_as_they_are_written():
    pool = GroupedPool((FULL, state(3)))
    taken = pool.allocate(5)
    (further,) = pool.further
    assert pool.growable == 3, "nobody's next token sees them"
    assert (
        all(further.attach(block) for block in taken)
        and [block in further for block in taken] == [False] * 2 + [True] * 3
    )
    for block, name in zip(taken, names(5), strict=True):
        pool.publish(block, name)
    pool.release(taken)
    assert pool.match(names(5)) == taken and pool.match(names(2)) == []
    pool.check([])


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ((window(9, 16),), "begin with one that sees all tokens"),
        ((FULL, window(9, 16)), "each of 2 layers"),
        ((FULL, KvGroup(GroupKind.FULL, (1,), 2 * BLOCKS, 3)), "which are no part of 4"),
        ((FULL, KvGroup(GroupKind.LATENT, (1,), BLOCKS, 2)), "80 hold the tokens"),
        ((FULL, KvGroup(GroupKind.WINDOW, (1,), 4, SIZE, window=9)), "one sequence needs 6"),
    ],
)
def test_groups_have_to_fit(groups, why):
    with pytest.raises(ValueError, match=why):
        check_groups(groups, 2, 4)


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 12))]
)
def test_any_schedule_keeps_what_sequences_see(seed):
    """Shared beginnings, preemptions, cancellations; small groups beside the first one."""
    dice = random.Random(seed)
    groups = (FULL, KEYS, window(9, 2 * dice.randint(11, 16)), state(dice.randint(9, 14)))
    config = EngineConfig(
        max_model_len=120, kv_blocks=BLOCKS, block_size=SIZE, max_batch_tokens=24, micro_batches=2
    )
    scheduler = Scheduler(config, 99, frozenset(), GroupedPool(groups))
    handles, ended = iter(range(1000)), 0
    plans: dict[int, StepPlan] = {}
    for turn in range(12000):
        if turn > 4000 and not scheduler.busy:
            break
        if turn <= 4000 and len(scheduler.open) < 8 and dice.random() < 0.3:
            prompt = (7,) * dice.randint(0, 40) + (dice.randint(1, 3),) * dice.randint(1, 40)
            params = SamplingParams(max_tokens=dice.randint(1, 30), temperature=0.0, ignore_eos=True)
            retain = 60.0 if dice.random() < 0.3 else 0.0
            scheduler.submit(GenerationRequest(next(handles), prompt, params, retain=retain))
        if scheduler.open and dice.random() < 0.02:
            scheduler.cancel(dice.choice(list(scheduler.open)))
        index = dice.randrange(2)
        if index in plans:
            plan = plans.pop(index)
            ended += len(scheduler.commit(plan, [[7]] * sum(chunk.last for chunk in plan.chunks)))
        elif (planned := scheduler.plan(index)) is not None:
            plans[index] = planned
        scheduler.check()
    assert not scheduler.busy and ended > 20, "nobody waits for ever"
