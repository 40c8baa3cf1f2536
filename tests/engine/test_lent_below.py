"""Blocks that lie only below another node's cache: they come from there, as they are read, and are the same."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from afserve.clock import MonotonicClock
from afserve.comm.kv.exchange import Exchange
from afserve.engine.kv.moving.lending import LentBelow
from afserve.engine.kv.moving.restoring import Restores
from tests.comm.kv_world import Wires, World
from tests.engine.driving import collect, prompts, requests
from tests.engine.tiered import PATIENCE, Node


@dataclass
class End:
    address: str
    one: Node
    wires: Wires = field(init=False)
    exchange: Exchange = field(init=False)


class Two(World):
    """Two nodes, each with a disk of its own, over wires that lose nothing."""

    nodes: list[End]

    def __init__(self, *nodes):
        self.dice, self.faulty = random.Random(1), 0.0
        self.clock: Any = MonotonicClock()
        self.links, self.happened, self.known = [], Counter(), set()
        self.nodes = [End(f"node-{index}", one) for index, one in enumerate(nodes)]
        self.block_bytes = nodes[0].engine.kv.block_bytes
        for end in self.nodes:
            end.wires = Wires(self, end)
            end.exchange = Exchange(end.one.engine.blocks, end.wires, self.clock)
        owner = self.nodes[0]
        self.restores = Restores(
            owner.one.tiers, owner.one.engine, self.clock, 8, self.block_bytes, print, 64
        )
        self.lent = LentBelow(owner.exchange, self.restores)

    def look(self):
        for link in list(self.links):
            for way in (0, 1):
                self.deliver(link, way)
        for end in self.nodes:
            end.exchange.turn(0.01)
        self.lent.turn()
        assert self.restores.turn(0.01) == []
        for end in self.nodes:
            end.one.check()

    def pull(self, names, limit=PATIENCE):
        owner, there = self.nodes
        there.exchange.pull(owner.address, names, limit, request=0, generation=0)
        until = time.monotonic() + PATIENCE
        while not there.exchange.ended:
            assert time.monotonic() < until
            self.look()
            time.sleep(0.001)
        while owner.exchange.busy:
            assert time.monotonic() < until
            self.look()
        return there.exchange.ended.pop()


@pytest.fixture
def nodes(tmp_path, tiny_checkpoint):
    opened: list[Node] = []

    def build(**fields):
        opened.append(Node(tiny_checkpoint("qwen3"), tmp_path / str(len(opened)), **fields))
        return opened[-1]

    yield build
    for one in opened:
        one.close()


def test_what_is_on_another_nodes_disk_alone_is_found_and_the_same(nodes, expected):
    world = Two(nodes(), nodes())
    owner, there = (end.one for end in world.nodes)
    asked, answer = requests(prompts())[2], expected("qwen3")[2]
    assert collect([replace(e, handle=0) for e in owner.ask(asked)])[0] == answer
    known = replace(asked, generated=tuple(answer[:40]), handle=9)
    names = owner.engine.usable_names(known)
    owner.forget()
    assert owner.engine.known(names) == 0 and len(names) == 9
    pulled = world.pull(names)
    assert (pulled.received, pulled.known, pulled.complete) == (9, 0, True) and world.lent.chains == 1
    events = there.ask(known)
    assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
    assert sum(event.cached_tokens for event in events) == 72
    assert not world.restores.stats().restores_short


def test_a_part_in_the_cache_comes_first_and_what_is_nowhere_ends_it(nodes):
    world = Two(nodes(), nodes())
    owner, _ = (end.one for end in world.nodes)
    asked = requests(prompts())[2]
    owner.ask(asked)
    names = owner.engine.usable_names(replace(asked, prompt_ids=asked.prompt_ids + tuple(range(3, 60))))
    here = owner.engine.known(names)
    assert 0 < here < len(names)
    pulled = world.pull(names)
    assert pulled.received == here and not pulled.complete and not world.lent.chains
    assert pulled.seconds < 5.0, "it was granted at once"


def test_whoever_gives_up_leaves_nothing_held(nodes, expected):
    world = Two(nodes(), nodes())
    owner, there = (end.one for end in world.nodes)
    asked = requests(prompts())[1]
    owner.ask(asked)
    names = owner.engine.usable_names(asked)
    owner.forget()
    number = world.nodes[1].exchange.pull("node-0", names, PATIENCE, request=0, generation=0)
    world.look()
    world.nodes[1].exchange.cancel(number)
    until = time.monotonic() + PATIENCE
    while any(end.exchange.busy for end in world.nodes) or world.restores.busy:
        assert time.monotonic() < until
        world.look()
        world.nodes[1].exchange.ended.clear()
        time.sleep(0.001)
    assert not list(owner.engine.blocks.held) and not list(there.engine.blocks.held)
