"""What a node that leaves has goes to others, into free memory, what was asked for first; and gateways hear of it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from afserve.comm.kv.split import SplitMember
from afserve.engine.kv.blocks import BlockPool
from afserve.engine.kv.moving import handing_on
from afserve.engine.kv.moving.handing_on import HandingOn
from afserve.engine.kv.retained import Retention
from afserve.engine.kv.told import ToldCache
from tests.comm.kv_world import BLOCK, World, chain

TURNS = 400


def engine_of(pool):
    return cast(Any, SimpleNamespace(kv=SimpleNamespace(pool=pool), told=ToldCache(pool)))


class Three(World):
    """A node that leaves and two others with so much memory, over wires that lose nothing."""

    def __init__(self, *rooms):
        super().__init__(1)
        self.faulty = 0.0
        while len(self.nodes) < 3:
            self.nodes.append(type(self.nodes[0])(self, len(self.nodes), 0))
        for node, room in zip(self.nodes, (64, *rooms), strict=True):
            node.store.pool = BlockPool(room, 1, clock=self.clock)
        self.told: dict[int, ToldCache] = {}
        self.lines: list[str] = []
        self.leaver = self.nodes[0]
        self.engine = engine_of(self.leaver.store.pool)
        for node in self.nodes[1:]:
            engine = engine_of(node.store.pool)
            node.exchange.on_inherited, self.told[node.index] = engine.told.inherited, engine.told
        self.handing = HandingOn(self.engine, self.leaver.exchange, BLOCK, self.clock, self.lines.append)

    def leave(self):
        """Until it is over; in how many turns."""
        peers = [SplitMember(0, node.address) for node in self.nodes[1:]]
        for turn in range(TURNS):
            if not self.handing.go_on(peers):
                return turn
            for link in list(self.links):
                for way in (0, 1):
                    self.deliver(link, way)
            for node in self.nodes:
                node.exchange.turn(1.0)
            for offer, kept in self.leaver.exchange.settled:
                self.handing.settled(offer, kept)
            self.leaver.exchange.settled.clear()
            self.clock.advance(0.01)
        raise AssertionError("it never leaves")

    def found(self, node, names):
        return len(self.nodes[node].store.pool.match(names))


def test_what_only_it_has_goes_on_in_its_order_and_gateways_hear_of_it(monkeypatch):
    monkeypatch.setattr(handing_on, "_OFFER_BYTES", 4 * BLOCK)
    world = Three(20, 64)
    old, new, both = chain(1, 9), chain(2, 9), chain(3, 5)
    for names in (old, new, both):
        world.leaver.store.compute(names)
    world.nodes[1].store.compute(both)
    world.engine.told.prefixes.filled(new[8], 77)
    world.engine.told.prefixes.filled(old[8], 78)
    assert world.leave() > 4
    assert (world.found(1, both), world.found(1, new)) == (5, 9)
    assert (
        sum(world.nodes[1].store.pool.knows(name) or world.nodes[2].store.pool.knows(name) for name in old)
        == 9
    )
    assert (world.told[1].prefixes.all(), world.told[2].prefixes.all()) == ([77], [78])
    assert world.lines == ["23 blocks of KV are with other nodes as this one leaves, 0 are not"]


@pytest.mark.parametrize("full", [True, False])
def test_nothing_is_thrown_out_for_it_and_what_was_asked_for_goes_first(full):
    world = Three(8, 8)
    kept, later, own = chain(1, 3), chain(2, 9), chain(5, 8)
    pool = world.leaver.store.pool
    world.leaver.store.compute(kept)
    blocks = pool.match(kept)
    pool.hold(blocks)
    pool.release(blocks, retain=Retention("a", 60.0))
    world.leaver.store.compute(later)
    if full:
        for node in world.nodes[1:]:
            node.store.compute(own)
    world.leave()
    assert world.found(1, kept) + world.found(2, kept) == (0 if full else 3)
    assert not full or (world.found(1, own), world.found(2, own)) == (8, 8)


def test_it_leaves_when_its_time_is_over_or_nobody_is_there():
    world = Three(64, 64)
    world.leaver.store.compute(chain(1, 9))
    peers = [SplitMember(0, "nowhere")]
    assert world.handing.go_on(peers)
    world.clock.advance(handing_on.SECONDS)
    world.handing.settled(1, 9)
    assert not world.handing.go_on(peers)
    alone = Three(64, 64)
    alone.leaver.store.compute(chain(1, 9))
    assert not alone.handing.go_on([])
