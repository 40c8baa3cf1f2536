"""Where requests go: equal beginnings together, long queues avoided, nobody overloaded; and a real trace, simulated."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.kv.source import KvSource
from afserve.control.affinity import Affinity, OpenPrompts, Route
from afserve.control.wire.request_values import (
    Tokens,
)
from afserve.engine.kv.prefix_keys import keys_of
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.member import attention_life
from bench import kv_routing
from tests.control.test_homes import Scene, last_submit, tell_with_addresses

TRACE = Path(__file__).parents[3] / "shared/data/request_traces/mooncake_conversation_trace.jsonl"
IDLE = {0: 0, 1: 0, 2: 0}


def test_equal_beginnings_share_a_node_until_another_is_done_sooner():
    affinity, system = Affinity(16), list(range(1600))
    home = affinity.pick([*system, 90], IDLE).node
    route = affinity.pick([*system, 91, 92], {**IDLE, home: 3})
    assert route.node == home and route.missing <= 256 and route.source is None
    waiting = affinity.pick([*system, 93], IDLE, pending={home: 5000})
    assert waiting.node != home and waiting.missing == 1601 and waiting.source == home
    again = affinity.pick([*system, 93], IDLE, pending={home: 5000})
    assert again.node == waiting.node and again.source is None  # it has them too by now
    assert affinity.pick([*system, 94], {home: 50, waiting.node: 50, 7: 0}).node == 7
    assert affinity.pick([1, 2], {**IDLE, home: 3}).node != home  # too short to be known: the least busy one
    assert affinity.pick([*system, 93], {9: 99}) == Route(9, 1601)


def test_what_is_known_of_a_long_prompt_is_near_the_truth():
    affinity, prompt = Affinity(16), list(range(20_000))
    affinity.pick(prompt[:9000], {0: 0, 1: 99})
    for known in (8999, 9000, 20_000):
        missing = affinity.pick(prompt[:known], {0: 0, 1: 99}).missing
        assert known - 9000 <= missing <= known - 8999 + 512 or missing <= 512
    short = Affinity(16)
    short.pick(prompt[:100], IDLE)
    assert short.pick(prompt[:100], IDLE).missing == 4


def test_what_has_no_room_until_others_end_counts_as_if_it_were_computed():
    affinity, system = Affinity(16), list(range(1600))
    home = affinity.pick([*system, 90], IDLE).node
    full = {node: 2000 if node != home else 500 for node in IDLE}

    def room(node, chain):
        return full[node]

    assert affinity.pick([*system, 91], IDLE, room=room).node == home, (
        "it lacks 1,101 tokens of room, others 1,600"
    )
    full[home] = -500
    elsewhere = affinity.pick([*system, 92], IDLE, room=room)
    assert elsewhere.node != home and elsewhere.source == home
    almost = Affinity(16).pick(system, IDLE, room=lambda node, chain: 100 * node)
    assert almost.node == 2, "of full ones the one with the most room"
    affinity.told(home, (), (), anew=True)
    again = affinity.pick(
        [*system, 93], {home: 0, elsewhere.node: 0}, room=lambda node, chain: -9000 * (node == home)
    )
    assert again.node == elsewhere.node
    beside = {home: 0, elsewhere.node: 0}
    waits = affinity.pick(
        [*system, 94], beside, None, {elsewhere.node: 4000}, room=lambda node, chain: -9000 * (node == home)
    )
    assert waits.node == home, "it lacks the prompt and room for it, which is 3,202 tokens and no more"


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=30), st.booleans()), max_size=30))
def test_what_open_prompts_take_is_what_differs(asked):
    """Beside sets of beginnings: each block that has a key is there once, the rest of each prompt by itself."""
    prompts = OpenPrompts()
    held: list[tuple[list[tuple[int, int]], int]] = []
    for own, ends in asked:
        chain = list(keys_of(own, 4))
        if ends and held:
            prompts.remove(*held.pop(0))
        assert prompts.shared(chain) == max(
            (tokens for key, tokens in chain if any(key in dict(other) for other, _ in held)), default=0
        )
        prompts.add(chain, len(own))
        held.append((chain, len(own)))
        keyed = {key for other, _ in held for key, _ in other}
        assert prompts.tokens == 4 * len(keyed) + sum(length % 4 for _, length in held)
    for one in held:
        prompts.remove(*one)
    assert prompts.tokens == 0


def test_a_preferred_node_is_taken_unless_it_is_too_busy():
    affinity = Affinity(4)
    assert affinity.pick(range(50), IDLE, 2, {2: 9999}).node == 2
    assert affinity.pick(range(50), {**IDLE, 2: 50}, 2).node != 2
    assert affinity.pick(range(50), IDLE, 8).node in IDLE


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 2)), max_size=60))
def test_no_node_is_overloaded(requests):
    affinity, load = Affinity(4), dict(IDLE)
    for prompt, ended in requests:
        load[affinity.pick(prompt * 40, load).node] += 1
        assert max(load.values()) <= max(min(load.values()) + 17, min(load.values()) * 2 + 1)
        load[ended] = max(0, load[ended] - 1)


def test_a_new_request_names_the_node_that_has_its_beginning():
    """Its first home has two long prompts to compute: the other one takes it, and may ask there."""
    scene, prompt = Scene(0, 1), tuple(range(2000))
    tell_with_addresses(scene, 0, 1)
    first, second = scene.streams

    def begin(stream):
        scene.homes.heard(stream, Tokens((TokenEvent(stream.submitted()[-1].handle, (5,)),)))

    scene.homes.open(GenerationRequest(0, prompt))
    begin(first)
    scene.homes.open(GenerationRequest(1, (*prompt, 7)))
    assert len(first.submitted()) == 2 and last_submit(first).kv_from is None
    begin(first)
    scene.homes.open(GenerationRequest(2, tuple(range(9000, 14_000))))
    assert len(second.submitted()) == 1
    scene.homes.open(GenerationRequest(3, tuple(range(20_000, 24_000))))
    assert len(first.submitted()) == 3
    begin(second)  # its prompt is computed, so it is idle but for that
    scene.homes.open(GenerationRequest(4, (*prompt, 8)))
    assert last_submit(second).kv_from == KvSource(attention_life(0, 0), 0, "unix:0")
    assert scene.homes.requests.pending(first.life) == 4000
    tell_with_addresses(scene, 1)
    assert scene.homes.requests.pending(first.life) == 0


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not beside this checkout")
def test_a_real_trace_finds_its_blocks_and_waits_little():
    """Scripted nodes at the rate at which round robin keeps them busy for 80 % of the time."""
    trace = kv_routing.read(TRACE, 4000)
    found = dict(kv_routing.compare(trace, 8, 2500))
    turns, fetching = found["round robin"], found["gateway, fetching"]
    assert abs(turns.busy - kv_routing.BUSY) < 0.02
    assert found["gateway"].p50 < turns.p50 / 3 and fetching.p50 < turns.p50 / 4
    assert fetching.p50 < 1.2 * found["all-knowing, fetching"].p50
    assert fetching.hits > 0.95 * kv_routing.oracle(trace, 8 * 2500)
