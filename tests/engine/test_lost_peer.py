"""Expert nodes are lost at any moment, one or several: the tokens are those of the undisturbed run.

A schedule is drawn from a seed: who is killed or stopped and when, in which order attention nodes hear of it, whether a
successor comes or the experts are placed elsewhere, and which migrations are under way meanwhile.
"""

import random

import pytest

from afserve.clock import FakeClock
from afserve.comm.faults import Faults, FaultyTransport
from afserve.config import ModelSource
from afserve.engine.local import LocalCluster
from afserve.engine.migrate import fills, stages
from afserve.placement.placement import FREE, LayerPlacement, Placement
from tests.engine.driving import FAMILIES, collect, config, prompts, requests
from tests.engine.test_live_migration import shuffled, with_spare

NODES = 3
ATTENTION = 2


def even(slots):
    """Equal shares for all replicas of an expert."""
    count = {}
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

    def __init__(self, seed, source, micro_batches, replicas, delay):
        self.dice = random.Random(seed)
        plain = LocalCluster.build(source, config(), experts=NODES)
        self.start = plain.placement
        plain.close()
        self.slots = self.start.experts  # one node alone could hold everything
        placement = doubled(self.start, self.slots) if replicas else with_spare(self.start, self.slots)
        wrap = lambda end: FaultyTransport(end, Faults(seed, delay=delay, repeat=0.2))  # noqa: E731
        self.cluster = LocalCluster.build(
            source,
            config(micro_batches=micro_batches, max_batch_tokens=12),
            attention=ATTENTION,
            experts=NODES,
            placement=placement,
            clock=FakeClock(),
            **({"wrap": wrap} if delay else {}),
        )
        self.told = [[] for _ in range(ATTENTION)]
        self.stopped, self.remedies, self.migrating, self.old = set(), [], [], []
        self.losses = self.successors = self.recoveries = self.epochs = 0

    def run(self):
        for request in requests(prompts()):
            self.cluster.submit(request)
        events = []
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
        if len(gone) < NODES and self.dice.random() < 0.04:
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


def play(seed, tiny_checkpoint, expected):
    name = FAMILIES[seed % len(FAMILIES)]
    source = ModelSource(str(tiny_checkpoint(name)), name)
    world = World(
        seed,
        source,
        micro_batches=1 + seed // 2 % 4,
        replicas=bool(seed // 8 % 2),
        delay=seed % 3 * (seed % 2),
    )
    assert collect(world.run()) == expected(name)
    for node in world.cluster.attention:
        node.check()
        assert node.stats().kv_blocks_used == 0 and not node._link._under_way and not node.owing()
    return world


@pytest.mark.parametrize("seed", range(60))
def test_nobody_notices(seed, tiny_checkpoint, expected):
    assert play(seed, tiny_checkpoint, expected).losses
