"""Prompts of one tenant: a short one does not wait for all long ones before it, and no long one waits without end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.engine.scheduling.turns import Turns
from afserve.errors import OverloadedError
from tests.engine.test_fair_share import BUDGET, A, Asked, scheduler

LENGTH = st.integers(1, 390)


def left(made):
    return [sequence.prompt_left for sequence in made.open.values()]


def finish(asked, most=5000):
    for _ in range(most):
        if not asked.made.busy:
            return
        asked.turn()
    raise AssertionError("it does not end")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    flood=st.tuples(st.integers(20, 60), LENGTH),
    later=st.integers(0, 60),
    length=LENGTH,
    places=st.sampled_from((12, 256)),
)
def test_a_prompt_waits_for_as_many_tokens_of_each_other_one_as_it_has(flood, later, length, places):
    asked = Asked(scheduler(max_sequences=places))
    count, each = flood
    for _ in range(count):
        asked.submit(A, each)
    for _ in range(later):
        asked.turn()
    before, others = asked.step, left(asked.made)
    mine = asked.submit(A, length)
    while mine not in asked.first:
        asked.turn()
    tokens = 2 * length + sum(min(length, other) for other in others)
    assert asked.first[mine] - before <= tokens // BUDGET + 1 + count // places
    finish(asked)


@pytest.mark.slow
def test_of_three_hundred_long_prompts_a_short_one_waits_for_a_few():
    asked = Asked(scheduler(max_sequences=64, max_batch_tokens=128))
    long = [asked.submit(A, 380) for _ in range(300)]
    for _ in range(20):
        asked.turn()
    short = asked.submit(A, 10)
    while short not in asked.first:
        asked.turn()
    assert asked.first[short] <= 20 + 25
    finish(asked)
    came = [asked.first[handle] for handle in long]
    assert came == sorted(came) and came[-1] == -(-(300 * 380 + 10) // 128)


@pytest.mark.slow
@pytest.mark.parametrize("priority", [0, 3])
def test_a_place_that_nothing_was_computed_in_is_given_back(priority):
    """Else a short prompt would wait until an answer before it has ended."""
    asked = Asked(scheduler(max_sequences=4))
    long = [asked.submit(A, 300, max_tokens=90, priority=priority) for _ in range(9)]
    asked.turn()
    short = asked.submit(A, 10)
    while short not in asked.first:
        asked.turn()
    assert asked.first[short] <= 3 and not asked.made.preemptions
    finish(asked)
    assert [asked.first[handle] for handle in long] == sorted(asked.first[handle] for handle in long)


def test_a_place_in_which_something_was_computed_is_kept():
    asked = Asked(scheduler(max_sequences=2))
    long = [asked.submit(A, 40, max_tokens=20) for _ in range(2)]
    asked.turn()
    asked.turn()
    short = asked.submit(A, 1)
    finish(asked)
    assert asked.first[short] > 20 and max(asked.first[handle] for handle in long) <= 2


ARRIVALS = st.lists(st.one_of(LENGTH, st.just("step"), st.just("cancel")), min_size=5, max_size=120)


@settings(max_examples=80, deadline=None)
@given(ARRIVALS, st.integers(1, 6), st.integers(60, 200), st.integers(1, 9), st.booleans())
def test_none_goes_before_an_elder_one_that_is_as_short(events, places, blocks, answer, caching):
    """Also where they are preempted, cancelled, or find cached blocks: a turn stays what it was."""
    made = scheduler(max_sequences=places, kv_blocks=blocks, prefix_caching=caching)
    asked = Asked(made)
    turns: dict[int, tuple[int, int]] = {}
    for event in events:
        if event == "step":
            asked.turn()
        elif event == "cancel":
            made.cancel(min(made.open, default=0))
        else:
            asked.submit(A, event, answer)
        for sequence in made.open.values():
            turn, length = turns.setdefault(sequence.order, (sequence.turn, len(sequence.request.prompt_ids)))
            assert sequence.turn == turn
        mine = [turns[sequence.order] for sequence in made.open.values()]
        for place, (turn, length) in enumerate(mine):
            assert all(turn > elder for elder, tokens in mine[:place] if tokens <= length)
    finish(asked)


def test_what_is_computed_again_lets_none_go_before_its_elder():
    made = scheduler(max_sequences=2, kv_blocks=60)
    asked = Asked(made)
    for _ in range(2):
        asked.submit(A, 200, max_tokens=190)
    while len(asked.first) < 2:
        asked.turn()
    elder = asked.submit(A, 10)
    preempted = made.open[1]
    turn = preempted.turn
    while not made.preemptions:
        asked.turn()
    younger = asked.submit(A, 10)
    assert preempted.preemptions == 1 and preempted.turn == turn
    assert made.open[elder].turn < made.open[younger].turn
    assert made._waiting.first() is preempted, "it keeps its turn"
    finish(asked)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    flood=st.lists(LENGTH, max_size=30),
    own=LENGTH,
    later=st.lists(LENGTH, min_size=1, max_size=40),
    each=st.integers(1, 12),
    places=st.sampled_from((3, 16, 256)),
    budget=st.sampled_from((8, BUDGET)),
)
def test_a_long_prompt_has_its_turn_however_many_short_ones_come(flood, own, later, each, places, budget):
    """More come in every step than are computed in it, for ever; the bound is that of `engine/scheduling/turns.py`."""
    asked = Asked(scheduler(max_sequences=places, max_waiting=64, max_batch_tokens=budget))
    for tokens in flood:
        asked.submit(A, tokens)
    found, mine, computed, most = sum(flood), asked.submit(A, own), 0, 0
    while mine not in asked.first:
        for _ in range(each):
            try:
                asked.submit(A, later[asked.handles % len(later)])
            except OverloadedError:
                break
        most = max(most, sum(handle > mine for handle in asked.made.open))
        computed += asked.turn()["a"]
        harmonic = sum(1 / count for count in range(1, most + 2))
        assert computed <= (found + own) * (harmonic + 1) + BUDGET


def test_cached_tokens_make_a_prompt_short():
    asked = Asked(scheduler())
    first = asked.submit(A, 300)
    while first not in asked.first:
        asked.turn()
    for _ in range(20):
        asked.submit(A, 200)
    asked.turn()
    asked.handles = first  # the same prompt and salt
    again = asked.submit(A, 300)
    assert asked.made.open[again].lacks == 300 - 296
    del asked.first[again]
    before = asked.step
    while again not in asked.first:
        asked.turn()
    assert asked.first[again] - before <= 3


def test_lengths_matter_within_a_tenant_and_a_priority():
    turns, short, long = Turns(), ("a", 0), ("a", 1)
    assert [turns.next(long, 500, []), turns.next(short, 10, [(long, 500)])] == [500, 10]
    open_ = [(long, 500), (short, 10)]
    assert turns.next(short, 30, open_) == 40 and turns.next(short, 4, [*open_, (short, 30)]) == 44 - 6 - 26
    turns.again(short, 7)
    assert turns.next(short, 10, [(short, 10)]) == 61
    turns.next(("b", 0), 1, [])
    assert set(turns._came) == {("b", 0)}, "groups without open prompts are forgotten"
