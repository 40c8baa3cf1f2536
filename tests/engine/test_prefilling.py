"""What a prefill node need not compute of others' prompts: scripted tiers, a scripted exchange, a fake clock."""

import pytest

from afserve.clock import FakeClock
from afserve.comm.kv.messages import Prefill
from afserve.comm.kv.puller import COMPLETE, Pulled
from afserve.engine.kv.moving.prefilling import FETCHED_TOKENS, Prefilling
from afserve.engine.kv.moving.restoring import Restores
from afserve.engine.scheduling.request import TokenEvent
from afserve.errors import OverloadedError
from tests.engine.scripted_kv import ScriptedEngine, ScriptedWire

BLOCK, KEY = 16, (3, 7)
MANY = FETCHED_TOKENS // BLOCK


class Node(ScriptedEngine):
    def __init__(self):
        self.submitted, self.cancelled, self.here, self.full = [], [], 0, False

    def usable_names(self, request):
        return [index.to_bytes(16) for index in range((len(request.prompt_ids) - 1) // BLOCK)]

    def known(self, names):
        return min(self.here, len(names))

    def submit(self, request, shared=None):
        if self.full:
            raise OverloadedError("too many wait", retry_after=1.0)
        self.submitted.append(request.handle)

    def cancel(self, handle):
        self.cancelled.append(handle)


class Exchange(ScriptedWire):
    def __init__(self):
        super().__init__()
        self.asked, self.unwanted, self.fetches, self.cancelled = [], [], [], []
        self.found_keys, self.over = [], []

    def take_asked(self):
        asked, self.asked = self.asked, []
        return asked

    def take_unwanted(self):
        unwanted, self.unwanted = self.unwanted, []
        return unwanted

    def fetch(self, key, names, limit, generation):
        self.fetches.append((key, len(names), limit, generation))
        return len(self.fetches)

    def cancel(self, transfer):
        self.cancelled.append(transfer)

    def found(self, key):
        self.found_keys.append(key)

    def computed(self, key, row=b""):
        self.over.append((key, row))


class Tiers(Restores):
    def __init__(self):
        self.has, self.asked, self.cancelled = False, [], []

    def restore(self, request, source=None):
        self.asked.append(request)
        return self.has

    def cancel(self, number):
        self.cancelled.append(number)


class Scene:
    limit = 2.0

    def __init__(self):
        self.node, self.exchange, self.tiers = Node(), Exchange(), Tiers()
        self.side = Prefilling(
            self.node, self.exchange, FakeClock(5.0), BLOCK, lambda blocks: self.limit, self.tiers
        )

    def asks(self, here=0, blocks=100):
        """The first `here` blocks are with whoever asks, in life 4 of it."""
        tokens = tuple(range(blocks * BLOCK + 3))
        self.exchange.asked.append((KEY, Prefill(KEY[1], 9, 0, tokens, here=here, life=4)))
        self.side.take()

    def comes(self, transfer=1, blocks=MANY, why=COMPLETE):
        return self.side.fetched(Pulled(transfer, 0, blocks, blocks, 0, 1, 0.1, why))


@pytest.fixture
def scene():
    return Scene()


def test_what_who_asks_has_comes_from_there_and_then_from_tiers(scene):
    scene.tiers.has = True
    scene.node.here = 5
    scene.asks(here=MANY + 5)
    assert scene.exchange.fetches == [(KEY, MANY + 5, 2.0, 4)]
    assert not (scene.tiers.asked or scene.node.submitted)
    assert scene.comes()
    (request,) = scene.tiers.asked
    assert not scene.node.submitted
    scene.side.go_on(request)
    assert scene.node.submitted == [request.handle] and scene.exchange.found_keys == [KEY]
    scene.side.ended(TokenEvent(request.handle, (0,), "length", row=b"row"))
    assert scene.exchange.over == [(KEY, b"row")] and scene.side.prompts == 1


def test_what_does_not_come_is_computed(scene):
    scene.asks(here=MANY)
    assert scene.comes(blocks=3, why="nothing came for 1 s") and len(scene.node.submitted) == 1
    assert scene.exchange.found_keys == [KEY], "the three that came"


def test_little_and_what_is_sooner_computed_is_not_fetched(scene):
    scene.asks(here=MANY - 1)
    scene.node.here = 1
    scene.asks(here=MANY)
    scene.node.here, scene.limit = 0, 0.0
    scene.asks(here=MANY)
    assert not scene.exchange.fetches and len(scene.node.submitted) == 3


def test_who_says_that_it_has_more_than_there_is_is_asked_for_what_there_is(scene):
    scene.asks(here=1 << 31, blocks=MANY)
    assert scene.exchange.fetches == [(KEY, MANY, 2.0, 4)]


def test_what_nobody_waits_for_any_more_is_not_waited_for(scene):
    scene.tiers.has = True
    scene.asks(here=MANY)
    scene.exchange.unwanted.append(KEY)
    scene.side.take()
    assert scene.exchange.cancelled == [1] and scene.tiers.cancelled == [-1]
    assert not scene.comes(), "it is nobody's"
    scene.asks()
    (request,) = scene.tiers.asked
    scene.exchange.unwanted.append(KEY)
    scene.side.take()
    assert scene.tiers.cancelled == [-1, request.handle]
    scene.side.go_on(request)
    assert not scene.node.submitted


def test_a_prompt_that_waited_may_be_refused(scene):
    scene.node.full = True
    scene.asks(here=MANY)
    scene.comes()
    assert scene.exchange.over == [(KEY, b"")]
