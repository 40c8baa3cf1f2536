"""A prompt that several nodes compute, at one of them: what its scheduler and its steps do with others' layers."""

from dataclasses import replace
from typing import Any

import pytest

from afserve.comm.kv.messages import Prefill
from afserve.comm.kv.sharing import SharedPrompt
from afserve.comm.kv.split import SplitMember, split_over
from afserve.comm.kv.split_messages import Leave, Slice
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.kv.cache import KvCache
from afserve.engine.scheduling.request import GenerationRequest, Purpose, SamplingParams
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.scheduling.shared_prompts import Awaits, PromptLeft
from afserve.engine.step.shared_layers import Abandoned, SharedLayers, tell_others
from tests.engine.driving import config

ENDS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
TOKENS = tuple(range(3, 103))
SIZES = {"max_batch_tokens": 16, "prefill_tokens": 16, "kv_blocks": 20}


def shared_prompt(tokens=TOKENS, start=0, mine=1, said=None):
    whole = split_over(len(tokens), start, 2, 16, 8)
    assert whole is not None
    split = replace(whole, mine=mine)
    members = (SplitMember(0, "unix:0"), SplitMember(0, "unix:1"))
    prefill = Prefill(1, 1, 0, tokens[: split.end])
    said = [] if said is None else said
    return SharedPrompt(7, split, members, prefill, lambda part, message: said.append((part, message)))


def slice_of(prompt, layer, first, count, payload=b""):
    return Slice(prompt.group, 0, layer, first, count, 0, payload)


def submitted(**fields):
    scheduler = Scheduler(config(**SIZES | fields), 200, frozenset())
    shared = shared_prompt()
    scheduler.submit(GenerationRequest(-1, shared.prefill.tokens, ENDS, purpose=Purpose.PART), shared=shared)
    return scheduler, shared


def told(scheduler):
    """The plan, and what it decided said to the others."""
    plan = scheduler.plan(0)
    tell_others(scheduler.shared_news)
    return plan


def commit(scheduler, plan):
    scheduler.commit(plan, [(0,)] * sum(chunk.last for chunk in plan.chunks))
    scheduler.check()


def test_a_chunk_begins_when_the_first_layer_of_all_before_it_is_here():
    scheduler, shared = submitted()
    assert shared.split.own(0) == range(16, 32) and scheduler.plan(0) is None
    shared.came(slice_of(shared, 1, 0, 2))
    assert scheduler.plan(0) is None, "another layer"
    shared.came(slice_of(shared, 0, 0, 2))
    plan = scheduler.plan(0)
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.count, chunk.sequence.computed) == (16, 16, 0) and plan.shared is chunk
    commit(scheduler, plan)
    assert chunk.sequence.computed == 32
    assert len(scheduler.pool.match(chunk.sequence.full_hashes(8))) == 4, "all of it is found from now on"


def test_it_has_a_step_of_its_own_and_others_go_on_while_it_waits():
    scheduler, shared = submitted()
    scheduler.submit(GenerationRequest(1, TOKENS[:60], ENDS))
    first = scheduler.plan(0)
    assert [chunk.sequence.request.handle for chunk in first.chunks] == [1]
    shared.came(slice_of(shared, 0, 0, 2))
    commit(scheduler, first)
    second = scheduler.plan(0)
    assert [chunk.sequence.request.handle for chunk in second.chunks] == [-1]


def test_a_step_that_is_abandoned_was_not_computed():
    scheduler, shared = submitted()
    shared.came(slice_of(shared, 0, 0, 2))
    plan = scheduler.plan(0)
    shared.end("gone")
    assert scheduler.abandon(plan) == [] and plan.chunks[0].sequence.computed == 0
    scheduler.check()
    (alone,) = scheduler.plan(0).chunks
    assert (alone.start, alone.count, alone.sequence.shared) == (0, 16, None)
    scheduler.cancel(-1)
    (done,) = scheduler.abandon(scheduler.plan(0) or type(plan)(0, (alone,)))
    assert done.reason == "cancelled" and not scheduler.busy
    scheduler.check()


def test_a_plan_says_nothing_to_others_but_what_there_is_to_say():
    said: list[Any] = []
    shared = shared_prompt(said=said)
    scheduler = Scheduler(config(**SIZES), 200, frozenset())
    scheduler.submit(GenerationRequest(-1, shared.prefill.tokens, ENDS, purpose=Purpose.PART), shared=shared)
    assert scheduler.plan(0) is None and shared.waits_for is None
    (awaits,) = scheduler.shared_news
    assert isinstance(awaits, Awaits) and awaits.arrived.lacks == 0
    tell_others(scheduler.shared_news)
    assert shared.waits_for == 0 and not scheduler.shared_news
    scheduler.prompt_tokens = 8
    assert scheduler.plan(0) is None
    (left,) = scheduler.shared_news
    assert isinstance(left, PromptLeft) and not shared.over and not said
    tell_others(scheduler.shared_news)
    assert [type(message) for _, message in said] == [Leave] and shared.over == left.why
    plan = scheduler.plan(0)
    assert plan is not None and plan.chunks[0].count == 8, "alone from then on"


def test_what_reaches_too_far_is_found_by_a_question_and_ends_it_where_it_is_told():
    scheduler, shared = submitted()
    shared.came(slice_of(shared, 0, 0, 3))
    assert scheduler.plan(0) is None and not shared.over
    tell_others(scheduler.shared_news)
    assert "reaches over block 1" in shared.over


def test_who_has_no_room_leaves():
    scheduler, shared = submitted(kv_blocks=16)
    held = scheduler.pool.allocate(14)
    shared.came(slice_of(shared, 0, 0, 2))
    assert told(scheduler) is None and "room" in shared.over
    (alone,) = scheduler.plan(0).chunks
    assert (alone.start, alone.count) == (0, 16)
    scheduler.check(held)


def test_who_decodes_leaves():
    scheduler, shared = submitted()
    scheduler.submit(GenerationRequest(1, TOKENS[:9], SamplingParams(max_tokens=9, temperature=0.0)))
    commit(scheduler, scheduler.plan(0))
    assert not shared.over
    assert len(told(scheduler).chunks) == 1 and "decodes" in shared.over


def test_a_smaller_limit_of_steps_ends_it():
    scheduler, shared = submitted()
    scheduler.prompt_tokens = 8
    assert told(scheduler) is None and "8 tokens are this node's limit" in shared.over
    assert scheduler.plan(0).chunks[0].count == 8


@pytest.fixture(scope="module")
def kv(tiny_checkpoint):
    node = colocated(ModelSource(str(tiny_checkpoint("v3")), "v3"), config(**SIZES))
    assert isinstance(node.kv, KvCache)
    return node.kv


def layers_of(kv, said):
    shared = shared_prompt(said=said)
    scheduler = Scheduler(config(**SIZES), 200, frozenset())
    scheduler.submit(GenerationRequest(-1, shared.prefill.tokens, ENDS, purpose=Purpose.PART), shared=shared)
    shared.came(slice_of(shared, 0, 0, 2, bytearray(2 * kv.layer_bytes(0))))
    plan = scheduler.plan(0)
    assert plan is not None
    (chunk,) = plan.chunks
    return shared, SharedLayers(chunk, kv)


def test_a_layer_goes_to_who_needs_it_once_it_is_whole(kv):
    said: list[Any] = []
    shared, layers = layers_of(kv, said)
    assert layers.come(0) and not layers.come(1)
    layers.give(0, lambda: True)
    ((part, slice),) = said
    assert (part, slice.layer, slice.first, slice.count) == (0, 0, 2, 2)
    assert len(slice.payload) == 2 * kv.layer_bytes(0) and shared.is_right(slice)


def test_what_is_not_finite_does_not_leave(kv):
    said: list[Any] = []
    shared, layers = layers_of(kv, said)
    layers.give(0, lambda: False)
    assert [type(message) for _, message in said] == [Leave] and "not finite" in shared.over
    layers.give(1, lambda: True)
    assert len(said) == 1


def test_what_has_another_size_is_not_written(kv):
    shared, layers = layers_of(kv, [])
    shared.came(slice_of(shared, 1, 0, 2, b"short"))
    with pytest.raises(Abandoned, match="5 bytes"):
        layers.come(1)
    with pytest.raises(Abandoned):
        layers.come(2)
