"""A request that moves with its KV gives the tokens of one that stayed, whatever its wire does to the blocks."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from afserve.clock import FakeClock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.m2n.ticket import Ticket
from afserve.config import ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.scheduling.request import GenerationRequest
from tests.comm.kv_world import Wires, World
from tests.engine.driving import FAMILIES, GREEDY, NEW, config, prompts
from tests.engine.local_cluster import LocalCluster


@dataclass
class End:
    """A node of the cluster and its exchange."""

    address: str
    node: AttentionNode[Ticket]
    wires: Wires = field(init=False)
    exchange: Exchange = field(init=False)


class Pair(World):
    """Two attention nodes of one cluster, over the wires of the faulty world."""

    nodes: list[End]

    def __init__(self, seed: int, cluster: LocalCluster, faulty: float) -> None:
        self.dice, self.clock, self.faulty = random.Random(seed), FakeClock(), faulty
        self.links, self.happened, self.known = [], Counter(), set()
        self.cluster = cluster
        self.nodes = [End(f"node-{index}", node) for index, node in enumerate(cluster.attention)]
        self.block_bytes = cluster.attention[0].kv.block_bytes
        for end in self.nodes:
            end.wires = Wires(self, end)
            end.exchange = Exchange(end.node.blocks, end.wires, self.clock)

    def round(self) -> list:
        """A turn for all, and what the cluster says."""
        for link in list(self.links):
            for way in (0, 1):
                self.deliver(link, way)
            self.notice(link)
        if self.dice.random() < self.faulty / 20 and self.links:
            self.cut(self.dice.choice(self.links))
        for end in self.nodes:
            end.exchange.turn(self.dice.choice((0.0, 1.0)))
        self.clock.advance(0.01)
        events = self.cluster.step()
        for end in self.nodes:
            end.node.check()
        return events

    def move(self, request: GenerationRequest, here: End, there: End) -> None:
        """What the gateway does, and the node that it is moved to: there its number is the next."""
        here.exchange.part(request.handle, here.node.written_names_of(request.handle))
        here.node.cancel(request.handle)
        names = there.node.usable_names(request)
        there.exchange.pull(here.address, names, 2.0, request=request.handle, generation=0)
        began = self.clock.now()
        while not there.exchange.ended:
            self.round()
        assert self.clock.now() - began < 2.1
        there.exchange.ended.clear()
        there.node.submit(replace(request, handle=request.handle + 1))

    def quiet(self) -> None:
        self.faulty = 0.0
        while any(end.exchange.busy or end.node.busy for end in self.nodes):
            self.round()
        assert not any(list(end.node.blocks.held) for end in self.nodes)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("faulty", [0.0, 0.3])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_a_request_that_stayed(name, faulty, tiny_checkpoint, expected, monkeypatch):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    cluster = LocalCluster.build(source, config(micro_batches=2), attention=2, experts=1)
    world = Pair(len(name), cluster, faulty)
    monkeypatch.setattr("afserve.comm.kv.messages.PIECE_BYTES", 2 * world.block_bytes)
    for turn, (prompt, answer) in enumerate(zip(prompts(), expected(name), strict=True)):
        here, there = world.nodes if turn % 2 else world.nodes[::-1]
        handle, cached, until = 10 * turn, [], [9, 30, NEW]
        said: list[int] = []
        here.node.submit(GenerationRequest(handle, prompt, GREEDY))
        while len(said) < NEW:
            for event in (event for event in world.round() if event.handle == handle):
                said += event.token_ids
                cached.append(event.cached_tokens)
            if len(said) >= until[0] and len(said) < NEW:
                until.pop(0)
                known = GenerationRequest(handle, prompt, GREEDY, tuple(said))
                world.move(known, here, there)
                handle += 1
                here, there = there, here
        assert said == answer
        assert faulty or sum(cached) > len(prompt) // 8 * 8
    world.quiet()
    cluster.close()


@pytest.mark.slow
def test_only_what_fits_is_pulled(tiny_checkpoint, expected):
    """The node that goes on has little memory: the rest is computed, and nobody else loses a block."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    cluster = LocalCluster.build(source, config(kv_blocks=14), attention=2, experts=1)
    world, prompt = Pair(1, cluster, 0.0), prompts()[2]
    here, there = world.nodes
    there.node.submit(GenerationRequest(5, prompts()[0], GREEDY))
    here.node.submit(GenerationRequest(6, prompt, GREEDY))
    said: list[int] = []
    other: list[int] = []

    def round():
        for event in world.round():
            (said if event.handle in (6, 7) else other).extend(event.token_ids)

    while len(said) < 30:
        round()
    move = GenerationRequest(6, prompt, GREEDY, tuple(said))
    here.exchange.part(6, here.node.written_names_of(6))
    here.node.cancel(6)
    there.exchange.pull(here.address, there.node.usable_names(move), 2.0, request=6, generation=0)
    while not there.exchange.ended:
        round()
    (pulled,) = there.exchange.ended
    there.exchange.ended.clear()
    assert 0 < pulled.received <= 8
    there.node.submit(replace(move, handle=7))
    while there.node.busy:
        round()
    assert (said, other) == (expected("qwen3")[2], expected("qwen3")[0])
    world.quiet()
    cluster.close()
