"""Nodes say which beginnings their caches have: a gateway that knows nothing yet routes by it, and it is bounded."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.control import affinity as affinity_file
from afserve.control.affinity import Affinity
from afserve.control.node.prefixes import MOST_KEYS, SECONDS, PrefixTeller
from afserve.control.wire import messages
from afserve.control.wire.request_values import Prefixes
from afserve.engine.kv.prefix_keys import HeldPrefixes, keys_of
from afserve.engine.scheduling.request import GenerationRequest
from tests.control.test_homes import Scene

PROMPT = tuple(range(1600))


class Streams:
    """Gateways that route by what they are told; a life is (how often its stream began)."""

    def __init__(self):
        self.of, self.begun, self.said = {}, {}, []

    def lives(self):
        return dict(self.begun)

    def begin(self, gateway, affinity=None):
        self.begun[gateway] = self.begun.get(gateway, 0) + 1
        self.of[gateway] = affinity or self.of.get(gateway) or Affinity(16)

    def send(self, gateway, value):
        said = messages.decode_from_attention(messages.encode_from_attention(value))
        assert said == value and len(value.came) + len(value.went) <= MOST_KEYS
        self.said.append(gateway)
        self.of[gateway].told(3, value.came, value.went, anew=value.anew)


def known(affinity, node=3):
    return {key for key, nodes in affinity._nodes.items() if nodes >> node & 1}


def scene():
    held, streams, clock = HeldPrefixes(), Streams(), FakeClock(9.0)
    return held, streams, clock, PrefixTeller(held, cast(Any, streams), clock)


def test_a_gateway_that_begins_is_told_all_and_then_what_changes():
    held, streams, clock, teller = scene()
    for number, (key, _) in enumerate(keys_of(PROMPT, 16)):
        held.filled(bytes([number]), key)
    streams.begin(0)
    teller.look()
    first = streams.of[0]
    assert first.missing(PROMPT, [3]) == 64 and first.missing(PROMPT, [4]) == 1600
    held.gone(bytes([20]))
    teller.look()
    assert first.missing(PROMPT, [3]) == 64, "not yet"
    clock.advance(SECONDS)
    teller.look()
    assert first.missing(PROMPT, [3]) == 1600 - 1280
    said = len(streams.said)
    for _ in range(9):
        clock.advance(SECONDS)
        teller.look()
    assert len(streams.said) == said, "what does not change is not said"
    streams.begin(1)
    teller.look()
    assert known(streams.of[1]) == known(first) == set(held.all())


@given(st.lists(st.tuples(st.sampled_from("fgbrlt"), st.integers(0, 9)), max_size=80))
def test_whatever_happens_all_gateways_know_what_is_held(events):
    held, streams, clock, teller = scene()
    for what, number in events:
        match what:
            case "f":
                held.filled(bytes([number]), 100 + number)
            case "g":
                held.gone(bytes([number]))
            case "b":
                streams.begin(number % 3)
            case "r":  # a gateway is started anew, and knows nothing
                streams.begin(number % 3, Affinity(16))
            case "l":  # too early for those that know something
                teller.look()
            case "t":
                clock.advance(SECONDS)
                teller.look()
                for gateway in streams.begun:
                    assert known(streams.of[gateway]) == set(held.all())
    assert known(Affinity(16)) == set()


def test_many_keys_go_in_several_messages():
    held, streams, clock, teller = scene()
    for number in range(2 * MOST_KEYS + 5):
        held.filled(number.to_bytes(4), number + 1)
    streams.begin(0)
    teller.look()
    assert len(streams.said) == 3 and known(streams.of[0]) == set(held.all())
    for number in range(MOST_KEYS + 1):
        held.gone(number.to_bytes(4))
    clock.advance(SECONDS)
    teller.look()
    assert known(streams.of[0]) == set(held.all()) and len(held) == MOST_KEYS + 4


def test_a_gateway_that_was_started_anew_sends_a_conversation_where_its_cache_is():
    fresh = Scene(0, 1)
    first, second = fresh.streams
    for stream in (first, second):
        fresh.homes.heard(stream, Prefixes(anew=True))
    keys = tuple(key for key, _ in keys_of(PROMPT, 16))
    fresh.homes.heard(second, Prefixes(keys))
    fresh.homes.open(GenerationRequest(0, PROMPT))
    assert len(second.submitted()) == 1 and fresh.homes.requests.pending(second.life) == 64
    salted = GenerationRequest(1, PROMPT, cache_salt="own")
    fresh.homes.open(salted)
    assert len(first.submitted()) == 1, "of another salt nothing is there"
    fresh.homes.heard(second, Prefixes((), keys))
    assert fresh.homes._choice._affinity.missing(PROMPT, [1]) == 1600


def test_what_a_node_says_anew_replaces_what_was_thought():
    affinity = Affinity(16)
    affinity.pick(PROMPT, {3: 0, 4: 9})
    assert affinity.missing(PROMPT, [3]) == 64
    affinity.told(3, (), (), anew=True)
    assert affinity.missing(PROMPT, [3]) == 1600 and not affinity._nodes


def test_a_gateway_remembers_so_many_at_most(monkeypatch):
    monkeypatch.setattr(affinity_file, "_REMEMBERED", 50)
    affinity = Affinity(16)
    for node in range(4):
        affinity.told(node, range(node * 40, node * 40 + 40), (), anew=True)
    assert len(affinity._nodes) == 50 and known(affinity, 3) == set(range(120, 160))
