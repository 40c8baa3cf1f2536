"""A cluster whose attention nodes have phases, in one thread: prompts are handed over by wires that may fail."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from afserve.clock import FakeClock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.puller import Load
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.comm.m2n.ticket import Ticket
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.moving.moves import KvMoves
from afserve.engine.scheduling.request import ANSWER, GenerationRequest
from afserve.member import AttentionPhase, attention_life
from tests.comm.kv_world import Wires, World
from tests.engine.local_cluster import LocalCluster


@dataclass
class End:
    """An attention node of the cluster, and how it moves KV."""

    address: str
    index: int
    node: AttentionNode[Ticket]
    wires: Wires = field(init=False)
    moves: KvMoves = field(init=False)
    exchange: Exchange = field(init=False)


class Phased(World):
    """Attention nodes 0 .. prefill - 1 compute prompts, the others decode."""

    nodes: list[End]

    def __init__(
        self, cluster: LocalCluster, prefill: int, *, seed: int = 0, faulty: float = 0.0, straight: int = 0
    ) -> None:
        self.dice, self.clock, self.faulty = random.Random(seed), FakeClock(), faulty
        self.links, self.happened, self.known = [], Counter(), set()
        self.cluster = cluster
        self.lost: set[int] = set()
        self.block_bytes = cluster.attention[0].kv.block_bytes
        self.said: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.asked: dict[int, tuple[GenerationRequest, End]] = {}
        self.nodes = [End(f"node-{i}", i, node) for i, node in enumerate(cluster.attention)]
        self.prefilling, self.decoding = self.nodes[:prefill], self.nodes[prefill:]
        self.lines: list[str] = []
        self.rounds, self.slow = 0, 1  # expert nodes have one turn in so many
        self.within = 1.0  # seconds: what a prompt that has helpers is wanted in
        for expert in cluster.experts:
            expert.in_phases({end.index: AttentionPhase.PREFILL for end in self.prefilling})
        size = cluster.attention[0].kv.pool.block_size
        for end in self.nodes:
            end.wires = Wires(self, end)
            exchange = end.exchange = Exchange(end.node.blocks, end.wires, self.clock)
            end.moves = KvMoves(
                end.node,
                exchange,
                self.clock,
                size,
                self.block_bytes,
                tell=self.lines.append,
                straight=straight,
            )

    def submit(
        self, request: GenerationRequest, prefill: End, decode: End, helpers: tuple[End, ...] = ()
    ) -> None:
        """What a gateway does. With `helpers` the prompt is split over them if that is sooner."""
        self.said.setdefault(request.handle, list(request.generated))
        self.asked[request.handle] = request, decode
        members = tuple(SplitMember(0, helper.address) for helper in helpers)
        within = self.within if helpers else None
        source = KvSource(
            attention_life(prefill.index, 0),
            0,
            prefill.address,
            prefills=True,
            within=within,
            helpers=members,
        )
        if not decode.moves.pull(request, source):
            decode.node.submit(request)

    def load(self, rate: float) -> Load:
        """What an idle node says of itself."""
        return Load(self.clock.now(), 0, rate)

    def lose(self, end: End) -> None:
        """As a process that was killed: its connections end, and it says nothing more."""
        self.lost.add(end.index)
        for link, side in end.wires.links.values():
            link.dead = link.closed[side] = True

    def move(self, handle: int, prefill: End, decode: End) -> None:
        """The gateway lost the node where it was decoded."""
        request, _ = self.asked[handle]
        self.submit(replace(request, generated=tuple(self.said[handle])), prefill, decode)

    def round(self) -> None:
        for link in list(self.links):
            for way in (0, 1):
                self.deliver(link, way)
                self.deliver(link, way)
            self.notice(link)
        if self.links and self.dice.random() < self.faulty / 20:
            self.cut(self.dice.choice(self.links))
        self.clock.advance(0.01)
        for end in self.nodes:
            if end.index not in self.lost:
                self._turn(end)
        self.rounds += 1
        for expert in self.cluster.experts * self.slow if self.rounds % self.slow == 0 else ():
            expert.poll()  # in each of them one message more

    def _turn(self, end: End) -> None:
        for request in end.moves.turn():
            if self.asked[request.handle][1] is end:
                end.node.submit(request)
        for event in end.node.step():
            if event.purpose is not ANSWER:
                end.moves.computed(event)
            elif self.asked[event.handle][1] is end:
                assert event.error is None
                self.cached.setdefault(event.handle, event.cached_tokens)
                self.said[event.handle] += event.token_ids
        end.node.check()

    @property
    def busy(self) -> bool:
        here = [end for end in self.nodes if end.index not in self.lost]
        return any(end.moves.busy or end.node.busy for end in here)

    def run(self, rounds: int = 20_000) -> None:
        for _ in range(rounds):
            self.round()
            if not self.busy:
                break
        else:
            raise AssertionError(f"still busy after {rounds} rounds: {self.lines}")
        assert not any(list(end.node.blocks.held) for end in self.nodes if end.index not in self.lost)


def lose_the_decoding_one(world, asked, wanted) -> None:
    """Of two nodes that decode, in the middle of answers; another goes on with them, and drafts too."""
    (prefill,), (decode, other) = world.prefilling, world.decoding
    for request in asked:
        world.submit(request, prefill, decode)
    while sum(map(len, world.said.values())) < 60:
        world.round()
    world.lose(decode)
    moved = [handle for handle in world.asked if len(world.said[handle]) < len(wanted[handle].tokens)]
    for handle in moved:
        world.move(handle, prefill, other)
    world.run()
    assert world.said == {handle: one.tokens for handle, one in wanted.items()}
    assert len(moved) > 5 and other.node.stats().drafts.accepted
