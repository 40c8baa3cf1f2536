"""Placements change while tokens are made: nothing waits, no token changes, slots come free when all have switched."""

import random

import pytest

from afserve.config import ModelSource
from afserve.engine.filler import Filler, Loaded
from afserve.errors import CheckpointError
from afserve.launch.plan.models import CONFIGS
from afserve.placement.migrate import SlotUse, fills, stages
from afserve.placement.placement import FREE, Fill, LayerPlacement, Placement
from tests.engine.driving import FAMILIES, collect, config, prompts, requests
from tests.engine.local_cluster import LocalCluster


def with_spare(placement, slots):
    """The same placement on nodes with `slots` physical slots."""
    layers = tuple(
        LayerPlacement(
            tuple(row + (FREE,) * (slots - len(row)) for row in layer.slots),
            tuple(row + (0.0,) * (slots - len(row)) for row in layer.share),
        )
        for layer in placement.layers
    )
    return Placement(placement.epoch, placement.nodes, placement.experts, layers)


def shuffled(rng, placement, slots):
    """Another valid placement with some replicas, at most slots - 1 experts a node."""

    def layer():
        rows: list[list[int]] = [[] for _ in range(placement.nodes)]
        for expert in rng.sample(range(placement.experts), placement.experts):
            rng.choice([r for r in rows if len(r) < slots - 1]).append(expert)
        for row in rows:
            extra = rng.randrange(placement.experts)
            if extra not in row and len(row) < slots - 1:
                row.append(extra)
        count = {e: sum(e in row for row in rows) for e in range(placement.experts)}
        return LayerPlacement(
            tuple(tuple(row) for row in rows), tuple(tuple(1 / count[e] for e in row) for row in rows)
        )

    return Placement(0, placement.nodes, placement.experts, tuple(layer() for _ in placement.layers))


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_do_not_notice(name, tiny_checkpoint, expected):
    rng = random.Random(name)
    nodes = 2
    source = ModelSource(str(tiny_checkpoint(name)), name)
    plain = LocalCluster.build(source, config(), experts=nodes)
    start = plain.placement
    plain.close()
    slots = start.slots_per_node() + 2
    current = with_spare(start, slots)
    cluster = LocalCluster.build(
        source, config(micro_batches=2, max_batch_tokens=16), attention=2, experts=nodes, placement=current
    )
    for request in requests(prompts()):
        cluster.submit(request)
    events, epochs = [], 0
    pending: list[Placement] = []
    old: list[int] = []
    while any(node.busy for node in cluster.attention):
        events += cluster.step()
        if old and all(node.settled for node in cluster.attention):
            cluster.retire(old.pop())
        if not old and not pending and rng.random() < 0.1:
            pending = list(stages(current, shuffled(rng, start, slots), slots))
        if not old and pending:
            following = pending.pop(0)
            for fill in fills(current, following):
                cluster.banks[fill.node].fill(fill.layer, fill.slot, fill.expert)
            cluster.switch(following)
            old.append(current.epoch)
            current = following
            epochs += 1
    assert collect(events) == expected(name)
    assert epochs > 5


@pytest.mark.slow
def test_bfloat16_tokens_do_not_depend_on_the_placement():
    """Parts of experts are rounded before they are added, so sums over nodes are exact however they are grouped."""
    source, rng = ModelSource(str(CONFIGS / "nano"), "nano"), random.Random(5)
    texts = [tuple(rng.randrange(16, 2000) for _ in range(20)) for _ in range(24)]
    start = Placement.contiguous(layers=4, experts=32, nodes=3)
    said = []
    for placement in (start, shuffled(rng, start, 14), shuffled(rng, start, 14)):
        cluster = LocalCluster.build(source, config(kv_blocks=400), experts=3, placement=placement)
        said.append(collect(cluster.run(requests(texts))))
        cluster.close()
    assert said[0] == said[1] == said[2]


class Bank:
    expert_bytes = 100

    def __init__(self, fail=None, why=None):
        self.filled, self.fail = [], fail
        self.why = why or CheckpointError("expert 7 cannot be read")

    def fill(self, layer, slot, expert):
        if expert == self.fail:
            raise self.why
        self.filled.append((layer, slot, expert))


def wait_for(filler, epoch):
    found: list[Loaded] = []
    wait_loaded(filler, epoch, found)
    return found


def wait_loaded(filler, epoch, found=None):
    found = [] if found is None else found
    for _ in range(2000):
        for loaded in filler.finished():
            found.append(loaded.epoch)
            if loaded.epoch == epoch:
                return loaded
        with filler._changed:
            filler._changed.wait(0.005)
    raise AssertionError(f"epoch {epoch} never finished")


def test_filler_loads_in_order_and_reports():
    bank = Bank()
    filler = Filler(bank, bytes_per_second=1e9)
    filler.start()
    filler.submit(1, [Fill(layer=layer, node=0, slot=1, expert=5 + layer) for layer in (0, 1)])
    filler.submit(2, [])
    assert wait_for(filler, 2) == [1, 2]
    assert bank.filled == [(0, 1, 5), (1, 1, 6)]
    filler.close()
    assert not filler._thread.is_alive()


@pytest.mark.parametrize("why", [CheckpointError("expert 7 cannot be read"), OSError("disk"), MemoryError()])
def test_an_expert_that_cannot_be_read_costs_its_own_fill(why):
    """The others are loaded, the thread lives, and the next set is as good as any."""
    bank = Bank(fail=7, why=why)
    filler = Filler(bank)
    filler.start()
    filler.submit(
        1,
        [
            Fill(layer=0, node=0, slot=slot, expert=expert, replaced=3)
            for slot, expert in enumerate((6, 7, 8))
        ],
    )
    loaded = wait_loaded(filler, 1)
    assert (loaded.experts, [fill.expert for fill in loaded.unread]) == (2, [7])
    assert loaded.unread[0].replaced == FREE, "what its slot holds is not known"
    assert loaded.why == (
        why.message if isinstance(why, CheckpointError) else f"{type(why).__name__} while it was loaded"
    )
    bank.fail = None
    filler.submit(2, loaded.unread)
    assert wait_loaded(filler, 2).unread == () and bank.filled == [(0, 0, 6), (0, 2, 8), (0, 1, 7)]
    filler.close()


def test_of_an_epoch_that_is_given_up_nothing_is_taken_for_loaded():
    """Neither what had failed nor what was begun: only what was not begun holds what it held."""
    filler, slots = Filler(Bank(fail=7)), SlotUse(0, beside_all(0, (0, 1, 2, 3, FREE)))
    target = beside_all(1, (0, 7, 8, 6, 5))
    slots.retire(0)
    filler.submit(1, slots.fills(target))
    filler.work()
    following = filler._next()
    assert following is not None
    job, begun = following
    assert (job.epoch, begun.expert) == (1, 8)
    slots.forget(filler.abandon(1))
    slots.retire(1)
    again = {fill.expert: fill.replaced for fill in slots.fills(target)}
    assert again == {7: FREE, 8: FREE, 6: 3, 5: FREE}


def beside_all(epoch, experts):
    """One layer: these on node 0, and all of nine experts on node 1."""
    everything = tuple(range(9))
    share = (
        tuple(0.5 if expert != FREE else 0.0 for expert in experts),
        tuple(0.5 if e in experts else 1.0 for e in everything),
    )
    return Placement(epoch, 2, 9, (LayerPlacement((experts, everything), share),))
