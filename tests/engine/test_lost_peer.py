"""Expert nodes are lost at any moment, one or several: the tokens are those of the undisturbed run.

A schedule is drawn from a seed: who is killed or stopped and when, in which order attention nodes hear of it, whether a
successor comes or the experts are placed elsewhere, and which migrations are under way meanwhile.
"""

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from afserve.clock import FakeClock
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.ticket import Ticket
from afserve.config import ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import TokenEvent
from afserve.placement.migrate import fills, stages
from afserve.placement.placement import FREE, LayerPlacement, Placement
from tests.comm.faults import Faults, FaultyTransport
from tests.engine.driving import FAMILIES, GREEDY, NEW, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.test_live_migration import shuffled, with_spare

NODES = 3
ATTENTION = 2


def even(slots):
    """Equal shares for all replicas of an expert."""
    count: dict[int, int] = {}
    for row in slots:
        for expert in row:
            count[expert] = count.get(expert, 0) + 1
    return LayerPlacement(
        tuple(tuple(row) for row in slots),
        tuple(tuple(0.0 if e == FREE else 1.0 / count[e] for e in row) for row in slots),
    )


def rehomed(placement, lost, slots):
    """The next epoch without the lost nodes: what stood only there fills free slots of the others."""
    layers = []
    for layer in placement.layers:
        rows = [
            [FREE] * slots if node in lost else list(row) + [FREE] * (slots - len(row))
            for node, row in enumerate(layer.slots)
        ]
        there = {expert for row in rows for expert in row}
        alive = [row for node, row in enumerate(rows) if node not in lost]
        for expert in set(range(placement.experts)) - there:
            row = max(alive, key=lambda row: row.count(FREE))
            row[row.index(FREE)] = expert
        layers.append(even(rows))
    return Placement(placement.epoch + 1, placement.nodes, placement.experts, tuple(layers))


def doubled(placement, slots):
    """Every expert on its node and on the next one."""
    layers = []
    for layer in placement.layers:
        held = [[e for e in row if e != FREE] for row in layer.slots]
        rows = [own + held[node - 1] for node, own in enumerate(held)]
        layers.append(even([row + [FREE] * (slots - len(row)) for row in rows]))
    return Placement(placement.epoch, placement.nodes, placement.experts, tuple(layers))


class World:
    """One schedule. Each attention node is told things in order, at turns of its own."""

    def __init__(self, seed, source, tokens, micro_batches, replicas, delay, draft="off"):
        self.dice, self.tokens = random.Random(seed), tokens
        plain = LocalCluster.build(source, config(draft=draft), experts=NODES)
        self.start = plain.placement
        plain.close()
        self.slots = self.start.experts  # one node alone could hold everything
        placement = doubled(self.start, self.slots) if replicas else with_spare(self.start, self.slots)

        def wrap(end):
            return FaultyTransport(end, Faults(seed, delay=delay, repeat=0.2)) if delay else end

        self.cluster = LocalCluster.build(
            source,
            config(micro_batches=micro_batches, max_batch_tokens=12, draft=draft),
            attention=ATTENTION,
            experts=NODES,
            placement=placement,
            clock=FakeClock(),
            wrap=wrap,
        )
        self.told: list[list[Callable[[AttentionNode[Ticket]], object]]] = [[] for _ in range(ATTENTION)]
        self.stopped, self.remedies, self.migrating, self.old = set(), [], [], []
        self.losses = self.successors = self.recoveries = self.epochs = 0

    def run(self):
        params = replace(GREEDY, max_tokens=self.tokens)
        for request in requests(prompts(), params):
            self.cluster.submit(request)
        events: list[TokenEvent] = []
        for turn in range(100_000):
            if not any(node.busy for node in self.cluster.attention):
                return events
            for index, node in enumerate(self.cluster.attention):
                if self.told[index] and self.dice.random() < 0.3:
                    self.told[index].pop(0)(node)
                if self.dice.random() < 0.8:
                    events += node.step()
                if node.stalled and self.dice.random() < 0.5:
                    node.wait(0.0)
            self.poll_experts()
            self.maybe(turn)
        raise AssertionError("a hang")

    def poll_experts(self):
        for index, expert in enumerate(self.cluster.experts):
            if index not in self.cluster.lost and index not in self.stopped and self.dice.random() < 0.7:
                expert.poll()

    def maybe(self, turn):
        """Something happens, or what was lost long enough is made good."""
        gone = self.cluster.lost | self.stopped
        if len(gone) < NODES and self.dice.random() < 0.06:
            self.lose(self.dice.choice([n for n in range(NODES) if n not in gone]), turn)
        if self.remedies and self.remedies[0] <= turn and not any(self.told):
            self.remedies.pop(0)
            self.remedy()
        self.migrate()

    def lose(self, expert, turn):
        """Killed: everybody notices. Stopped: everybody is told, one after the other."""
        self.losses += 1
        if self.dice.random() < 0.5:
            self.cluster.lose(expert)
        else:
            self.stopped.add(expert)
            self.tell(lambda node: node.lose(expert, "it is silent"))
        self.remedies.append(turn + self.dice.randrange(60))

    def tell(self, act):
        for queue in self.told:
            queue.append(act)

    def remedy(self):
        """A successor, or another placement where no migration is under way."""
        gone = self.cluster.lost | self.stopped
        if len(gone) < NODES and not self.old and not self.migrating and self.dice.random() < 0.5:
            self.recoveries += 1
            self.switch(rehomed(self.cluster.placement, gone, self.slots))
        for expert in list(gone):
            if self.dice.random() < 0.6 or not self.remedies:
                self.succeed(expert)

    def succeed(self, expert):
        """A process that was stopped goes on too, and answers what nobody wants any more."""
        self.successors += 1
        before = self.cluster.experts[expert]
        address = self.cluster.succeed(expert)
        if expert in self.stopped:
            self.stopped.discard(expert)
            before.poll()
        self.tell(lambda node: node.attach(node.dial(expert, address, 1.0)))

    def switch(self, placement):
        for fill in fills(self.cluster.placement, placement):
            self.cluster.banks[fill.node].fill(fill.layer, fill.slot, fill.expert)
        self.old.append(self.cluster.placement.epoch)
        self.cluster.accept(placement)
        self.tell(lambda node: node.adopt(placement))
        self.epochs += 1

    def migrate(self):
        if self.old and not any(self.told) and all(node.settled for node in self.cluster.attention):
            self.cluster.retire(self.old.pop())
        if not self.old and not self.migrating and self.dice.random() < 0.05:
            here = self.cluster.placement
            self.migrating = list(stages(here, shuffled(self.dice, self.start, self.slots), self.slots))
        if not self.old and self.migrating and not any(self.told):
            self.switch(self.migrating.pop(0))


def play(seed, tokens, tiny_checkpoint, expected, name=""):
    name = name or FAMILIES[seed % len(FAMILIES)]
    source = ModelSource(str(tiny_checkpoint(name)), name)
    world = World(
        seed,
        source,
        tokens,
        micro_batches=1 + seed // 2 % 4,
        replicas=bool(seed // 8 % 2),
        delay=seed % 3 * (seed % 2),
    )
    assert collect(world.run()) == [said[:tokens] for said in expected(name)]
    for node in world.cluster.attention:
        node.check()
        assert isinstance(node._link, ExpertLink)
        assert node.stats().kv_blocks_used == 0 and not node._link._under_way and not node.owing()
    return world


DAY = (0, 1, 2, 5, 6, 9, 10, 12, 13, 15)  # each number of micro-batches, with and without replicas


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", DAY)
def test_nobody_notices(seed, tiny_checkpoint, expected):
    assert play(seed, 16, tiny_checkpoint, expected).losses


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 5, 9])
def test_nobody_notices_while_sums_are_late(seed, tiny_checkpoint, expected):
    assert play(seed, 24, tiny_checkpoint, expected, "late").losses


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_nobody_notices_while_a_layer_drafts(seed):
    """Its rows are on their way between the tokens of a step and the next one; then nodes are lost, too."""
    source = ModelSource("configs/nano", "nano", dtype="float32")
    wanted = collect(drive(colocated(source, config()), requests(prompts(), replace(GREEDY, max_tokens=24))))
    world = World(
        seed, source, 24, micro_batches=1 + seed // 2, replicas=bool(seed % 2), delay=0, draft="mtp:2"
    )
    assert collect(world.run()) == wanted and world.losses
    assert sum(node.stats().drafts.accepted for node in world.cluster.attention) > 0
    for node in world.cluster.attention:
        node.check()
        assert node.stats().kv_blocks_used == 0 and not node.owing()


@pytest.mark.long
@pytest.mark.parametrize("seed", [seed for seed in range(660) if seed not in DAY])
def test_nobody_notices_long(seed, tiny_checkpoint, expected):
    world = play(seed, NEW, tiny_checkpoint, expected)
    assert world.losses and world.successors


@pytest.fixture
def stuck(tiny_checkpoint):
    """Two requests on two expert nodes without replicas, of which one is lost after some turns; and the clock."""
    source, clock = ModelSource(str(tiny_checkpoint("v3")), "v3"), FakeClock()
    cluster = LocalCluster.build(source, config(), experts=2, clock=clock)
    for request in requests(prompts()[:2]):
        cluster.submit(request)
    for _ in range(12):
        cluster.step()
    cluster.lose(1)
    return cluster, clock


def turns(cluster, count):
    events = []
    for _ in range(count):
        events += cluster.step()
        for node in cluster.attention:
            if node.stalled:
                node.wait(0.0)
    return events


def test_requests_that_wait_too_long_end_with_the_layer_the_expert_and_the_node(stuck):
    cluster, clock = stuck
    (node,) = cluster.attention
    turns(cluster, 20)
    assert turns(cluster, 20) == [] and node.busy and node.owing() == {}
    clock.advance(29.0)
    assert turns(cluster, 20) == []
    clock.advance(1.5)
    ended = [event for event in turns(cluster, 500) if event.error]
    assert ended and not node.busy
    where = r"layer [12]: expert \d+ was on no node for 30 s \(expert-1: it has closed its transport\), "
    assert all(re.match(where + "so this request ends here", event.error) for event in ended)
    stats = node.recovery()
    assert stats.given_up_rows >= len(ended) and stats.stalled["homeless"] >= 30.0
    cluster.submit(requests(prompts())[2])  # nobody waits a second time for an expert that stays away
    assert any(event.error for event in turns(cluster, 500)) and not node.busy


@pytest.mark.slow
def test_who_comes_back_in_time_is_waited_for(stuck):
    cluster, clock = stuck
    (node,) = cluster.attention
    turns(cluster, 20)
    clock.advance(29.0)
    address = cluster.succeed(1)
    assert turns(cluster, 20) == []
    node.attach(node.dial(1, address, 1.0))
    events = turns(cluster, 2000)
    assert not node.busy and not any(event.error for event in events)
    assert node.recovery().stalled["homeless"] >= 29.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "experts"), [("v3", 12), ("late", 10)])
def test_only_requests_that_meet_the_expert_end(name, experts, tiny_checkpoint):
    """One of many requests' steps: whoever chose other experts has the tokens of the undisturbed run."""
    source = ModelSource(str(tiny_checkpoint(name)), name)
    asked = requests(prompts((1, 2, 3, 2, 1, 2)), replace(GREEDY, max_tokens=2))
    fine = collect(LocalCluster.build(source, config(), experts=experts).run(asked))
    seen = set()
    for expert in range(0, experts, 3):
        clock = FakeClock()
        cluster = LocalCluster.build(source, config(), experts=experts, clock=clock)
        for request in asked:
            cluster.submit(request)
        cluster.lose(expert)
        events = turns(cluster, 30)
        clock.advance(31.0)
        events += turns(cluster, 60)
        assert not cluster.attention[0].busy
        for request in asked:
            mine = [event for event in events if event.handle == request.handle]
            said = [token for event in mine for token in event.token_ids]
            errors = [event.error for event in mine if event.error]
            seen.add(bool(errors))
            assert said == fine[request.handle][: len(said)] and (len(said) == 2 or errors)
            assert all(f"expert-{expert}: it has closed its transport" in error for error in errors)
    assert seen == {True, False}
