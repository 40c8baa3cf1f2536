"""What is computed ahead: alone, in small steps, found by those who ask later, and never in anybody's way."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.fair_share import MOST_AHEAD
from afserve.engine.scheduling.open_requests import AHEAD_TOKENS, REST
from afserve.engine.scheduling.request import AHEAD_PRIORITY, GenerationRequest, SamplingParams, Tenant
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.errors import OverloadedError
from tests.engine.driving import config, drive

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def scheduler(**fields):
    base = {
        "max_model_len": 2048,
        "kv_blocks": 400,
        "block_size": 16,
        "max_batch_tokens": 256,
        "micro_batches": 1,
    }
    return Scheduler(EngineConfig(**{**base, **fields}), 5000, frozenset({0}))


def prompt(seed, length):
    return tuple(1 + (seed * 977 + at * 31) % 4999 for at in range(length))


def ahead(handle, tokens, **more):
    return GenerationRequest(handle, tokens, ONE, priority=AHEAD_PRIORITY, **more)


def asked(handle, tokens, most=1, **more):
    return GenerationRequest(handle, tokens, SamplingParams(max_tokens=most, seed=1, ignore_eos=True), **more)


def step(s, micro_batch=0):
    """The tokens of each request in a step that ran; {} where there was nothing to do."""
    plan = s.plan(micro_batch)
    if plan is None:
        return {}
    s.commit(plan, [[7] for chunk in plan.chunks if chunk.last])
    s.check()
    return {chunk.sequence.request.handle: chunk.count for chunk in plan.chunks}


def test_one_at_a_time_in_small_steps_and_found_by_the_next_turn():
    s = scheduler()
    s.submit(ahead(1, prompt(1, 200)))
    s.submit(ahead(2, prompt(2, 100)))
    counts = []
    while s.busy:
        ran = step(s)
        counts.append(sum(ran.values()))
        assert len(ran) == 1
    assert max(counts) == AHEAD_TOKENS and sum(counts) == s.ahead_tokens == 300
    assert s.prefix.queries == s.open.queued_tokens == s.waiting == 0
    s.submit(asked(3, prompt(1, 200) + prompt(3, 40)))
    assert step(s) == {3: 240 - 192} and s.prefix.hits == 192


def test_it_leaves_at_once_for_whoever_comes_and_goes_on_later():
    s = scheduler()
    s.submit(ahead(1, prompt(1, 320)))
    assert step(s) == {1: 32} == step(s)
    s.submit(asked(2, prompt(2, 300), most=3))
    assert (s.running, s.waiting, s.open.queued_tokens) == (1, 1, 300)
    assert [step(s) for _ in range(4)] == [{2: 256}, {2: 44}, {2: 1}, {2: 1}]
    assert s.preemptions == 0, "it was no lack of blocks"
    assert step(s) == {1: 32} and s.ahead_tokens == 96, "what it had is found again"


def test_what_is_under_way_ends_and_nothing_of_it_follows():
    s = scheduler(micro_batches=2)
    s.submit(ahead(1, prompt(1, 320)))
    under_way = s.plan(0)
    s.submit(asked(2, prompt(2, 300)))
    assert step(s, 1) == {2: 256}
    s.commit(under_way, [])
    assert step(s, 0) in ({}, {2: 44}) and s.ahead_tokens == AHEAD_TOKENS


def test_it_takes_no_place_and_no_turn():
    s = scheduler(max_waiting=2, max_sequences=1)
    for handle in range(MOST_AHEAD):
        s.submit(ahead(handle, prompt(handle, 20), tenant=Tenant("a")))
    try:
        s.submit(ahead(99, prompt(99, 20)))
    except OverloadedError:
        pass
    else:
        raise AssertionError("more than are ever wanted")
    step(s)
    for handle in (200, 201):
        s.submit(asked(handle, prompt(handle, 20), tenant=Tenant("b")))
    assert s.waiting == 2 and step(s) == {200: 20}
    assert not s._shares.given("a")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 400), st.integers(1, 5)), min_size=1, max_size=12
    ),
    early=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 400)), max_size=12),
    micro_batches=st.integers(1, 2),
)
def test_who_asks_waits_for_no_more_than_one_small_step(arrivals, early, micro_batches):
    """In tokens that the node computes before each first token, beside the same without anything ahead."""

    def first_tokens(with_ahead):
        s, tokens = scheduler(kv_blocks=4000, micro_batches=micro_batches), 0
        first: dict[int, int] = {}
        since, turn, number = {}, 0, 0
        for at in range(7):
            for when, length in early if with_ahead else ():
                if when == at:
                    number += 1
                    s.submit(ahead(1000 + number, prompt(1000 + number, length)))
            step_now = step(s, turn % micro_batches)
            tokens, turn = tokens + sum(step_now.values()), turn + 1
            for index, (when, length, most) in enumerate(arrivals):
                if when == at:
                    s.submit(asked(index, prompt(index, length), most=most))
                    since[index] = tokens
            done(first, step_now, s, tokens)
        while s.busy:
            step_now = step(s, turn % micro_batches)
            tokens, turn = tokens + sum(step_now.values()), turn + 1
            done(first, step_now, s, tokens)
        return {index: first[index] - since[index] for index in since}

    def done(first, ran, s, tokens):
        for handle in ran:
            known = s.open.get(handle)
            if handle < 1000 and handle not in first and (known is None or known.output_length):
                first[handle] = tokens

    without, beside = first_tokens(with_ahead=False), first_tokens(with_ahead=True)
    assert all(beside[index] <= without[index] + AHEAD_TOKENS for index in without)


def test_a_cancelled_one_leaves_nothing():
    s = scheduler()
    s.submit(ahead(1, prompt(1, 320)))
    plan = s.plan(0)
    s.cancel(1)
    (ended,) = s.commit(plan, [])
    s.check()
    assert ended.reason == "cancelled" and not s.busy and s.pool.used == 0
    s.submit(replace(ahead(2, prompt(2, 20)), retain=5.0))
    s.cancel(2)
    assert not s.busy


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("for_whom", [ahead, asked])
def test_a_cancelled_one_that_nobody_waits_for_is_not_kept(for_whom, in_flight):
    s = scheduler()
    s.submit(replace(for_whom(1, prompt(1, 320)), retain=60.0))
    step(s)
    plan = s.plan(0) if in_flight else None
    s.cancel(1)
    if plan is not None:
        s.commit(plan, [[7] for chunk in plan.chunks if chunk.last])
    s.check()
    assert not s.busy and bool(s.pool.retained.owned()) is (for_whom is asked)


LAYER = 0.004  # seconds of a scripted layer, whatever its rows


class Timed:
    """A node by a scripted clock: every layer that is computed takes `LAYER`, nothing else takes any time. `computed`:
    whose each one was, and when it began. In the middle of one, `during` may do something."""

    def __init__(self, folder):
        self.clock, self.during = FakeClock(100.0), lambda: None
        self.computed: list[tuple[int, float]] = []
        self.node = colocated(ModelSource(str(folder), "tiny"), config(max_batch_tokens=96))
        self.node._meter.now = self.clock.now
        (self.micro_batch,), link = self.node._micro_batches, self.node._link
        dispatch = link.dispatch

        def timed(*args, **more):
            assert self.micro_batch.plan is not None
            (chunk,) = self.micro_batch.plan.chunks
            self.computed.append((chunk.sequence.request.handle, self.clock.now()))
            self.clock.advance(LAYER / 2)
            self.during()
            self.clock.advance(LAYER / 2)
            return dispatch(*args, **more)

        link.dispatch = timed  # type: ignore[method-assign]

    def run(self, *requests):
        return drive(self.node, requests)


@pytest.fixture
def timed(tiny_checkpoint, monkeypatch):
    """A node of this family that computes layer by layer."""
    monkeypatch.setattr("afserve.engine.step.stack_runner.fits_one_call", lambda step, meter: False)
    return lambda name: Timed(tiny_checkpoint(name))


def words(seed, length):
    return tuple(3 + (seed * 977 + at * 31) % 199 for at in range(length))


def tokens_of(events, handle):
    return [token for event in events if event.handle == handle for token in event.token_ids]


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "qwen3-next"])
@pytest.mark.parametrize("layers", range(1, 6))
def test_who_comes_in_the_middle_of_a_layer_waits_for_its_end(name, layers, timed):
    """Whichever layer of whichever step it is. What ended in the middle is computed again, states and all: tokens are
    those of a node that computes nothing ahead."""
    plain, mine, later = timed(name), words(5, 60), words(1, 180)
    expected = (
        tokens_of(plain.run(asked(7, mine, most=4)), 7),
        tokens_of(plain.run(asked(8, later, most=4)), 8),
    )
    beside, came = timed(name), []

    def come():
        if len(beside.computed) == layers:
            beside.node.submit(asked(7, mine, most=4))
            came.append(beside.clock.now())

    beside.during = come
    beside.node.submit(ahead(1, later))
    events = []
    for _ in range(100):
        events += beside.node.step()
    own = next(began for handle, began in beside.computed if handle == 7)
    assert own - came[0] == pytest.approx(LAYER / 2), "no layer but the one under way came first"
    assert tokens_of(events, 7) == expected[0]
    beside.clock.advance(REST)
    beside.run()
    events = beside.run(asked(8, later, most=4))
    assert tokens_of(events, 8) == expected[1] and events[0].cached_tokens >= 168


@pytest.mark.slow
def test_a_node_rests_before_it_computes_ahead(timed):
    """For a stated time behind the last step that somebody waited for, and it says for how long."""
    one = timed("v3")
    one.run(asked(1, words(1, 20)))
    one.node.submit(ahead(2, words(1, 60)))
    before = len(one.computed)
    assert one.node.rests == pytest.approx(REST)
    one.clock.advance(REST - 0.001)
    assert not one.node.step() and len(one.computed) == before and one.node.stalled
    assert one.node.rests == pytest.approx(0.001)
    one.clock.advance(0.002)
    assert one.node.rests == 0.0
    one.run()
    assert len(one.computed) > before and one.node.stats().ahead_tokens == 60 - 16


def test_what_is_ahead_gives_way_to_who_waits_for_room(timed):
    """Such a request is not submitted yet: its beginning is still below the cache."""
    one = timed("v3")
    one.node.submit(ahead(1, words(1, 60)))
    for _ in range(3):
        one.node.step()
    assert one.computed and one.node.stats().running == 1
    one.node.note_line(1)
    for _ in range(8):
        one.node.step()
    assert one.node.stats().running == 0 and 0.0 < one.node.rests < REST, "it stepped back"
    one.node.note_line(0)
    assert one.node.rests == 0.0
    one.run()
    assert one.node.stats().ahead_tokens >= 59
