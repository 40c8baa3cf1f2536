"""Migration as a state machine, and live placement fed by heartbeats: no processes, times are numbers."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.control.membership.balancing import BalanceRules, Balancing, compact
from afserve.control.membership.migration import Migration, Phase
from afserve.control.wire.placement_values import Adopt, FillSlots, Retire
from afserve.errors import ConfigError, DeadlineError, ProtocolError
from afserve.member import NodeId, Role, attention_node, expert_node
from afserve.placement.migrate import fills
from afserve.placement.optimizer.problem import Nodes
from afserve.placement.placement import FREE, LayerPlacement, Placement
from afserve.placement.rebalance.copies import copied
from afserve.placement.rebalance.record import decode
from afserve.placement.rebalance.stats import RoutedRows
from afserve.placement.recovery import homeless


def layered(*rows_per_layer, experts, width, epoch=0):
    layers = []
    for rows in rows_per_layer:
        count = {e: sum(e in row for row in rows) for e in range(experts)}
        slots = tuple(tuple(row) + (FREE,) * (width - len(row)) for row in rows)
        share = tuple(tuple(0.0 if e == FREE else 1 / count[e] for e in row) for row in slots)
        layers.append(LayerPlacement(slots, share))
    return Placement(epoch, len(rows_per_layer[0]), experts, tuple(layers))


START = layered([[0, 1], [2, 3]], experts=4, width=4)
TARGET = layered([[0, 2, 1], [3, 1]], experts=4, width=4)


def crew(attention, experts):
    """So many nodes of each role serve, all the time."""
    counts = {Role.ATTENTION: attention, Role.EXPERT: experts}
    return lambda role: [NodeId(role, index) for index in range(counts[role])]


def epoch(value):
    return value.epoch if isinstance(value, Retire) else value.placement.epoch


def values(outgoing):
    return [(node.role, node.index, type(value).__name__, epoch(value)) for node, value in outgoing]


def test_fill_adopt_retire():
    migration = Migration(START, crew(2, 2))
    assert values(migration.begin_move(TARGET, 0.0)) == [
        ("expert", 0, "FillSlots", 1),
        ("expert", 1, "FillSlots", 1),
    ]
    assert migration.filled(expert_node(1), 1, 0.0) == []
    assert values(migration.filled(expert_node(0), 1, 0.0)) == [
        ("attention", 0, "Adopt", 1),
        ("attention", 1, "Adopt", 1),
    ]
    assert migration.placement is START
    assert migration.adopted(attention_node(0), 1, 1.0) == []
    assert values(migration.adopted(attention_node(1), 1, 1.0)) == [
        ("expert", 0, "Retire", 0),
        ("expert", 1, "Retire", 0),
    ]
    assert migration.steady
    assert migration.placement.epoch == 1
    assert {frozenset(r) - {FREE} for r in migration.placement.layers[0].slots} == {
        frozenset({0, 1, 2}), frozenset({1, 3})
    }  # fmt: skip


def test_a_route_thought_out_ahead_is_taken_unless_things_have_moved():
    ahead, plain = Migration(START, crew(1, 2)), Migration(START, crew(1, 2))
    route = ahead.plan_route(TARGET)
    assert ahead.begin_move(TARGET, 0.0, route) == plain.begin_move(TARGET, 0.0)
    for node in (0, 1):
        ahead.filled(expert_node(node), 1, 0.0)
    ahead.adopted(attention_node(0), 1, 0.0)
    first = ahead.plan_route(START).stages[0]
    back = ahead.begin_move(START, 0.0, route)
    _, value = back[0]
    assert isinstance(value, FillSlots) and value.placement == first.with_epoch(2)


def test_late_and_wrong_answers_are_named():
    migration = Migration(START, crew(1, 2))
    migration.begin_move(TARGET, 0.0)
    with pytest.raises(ProtocolError, match="expert-0 answered for epoch 7"):
        migration.filled(expert_node(0), 7, 0.0)
    migration.filled(expert_node(0), 1, 0.0)
    with pytest.raises(ProtocolError, match="expert-0"):
        migration.filled(expert_node(0), 1, 0.0)
    with pytest.raises(DeadlineError, match="expert-1: epoch 1 was not filled in time"):
        migration.check_deadline(1e6)
    migration.filled(expert_node(1), 1, 0.0)
    with pytest.raises(DeadlineError, match="attention-0: epoch 1 was not adopted"):
        migration.check_deadline(1e6)


class Cluster:
    """Nodes that obey: slots are overwritten only when free in every epoch an attention node may still use."""

    def __init__(self, start, attention, experts):
        self.held: list[dict[tuple[int, int], int]] = [{} for _ in range(experts)]
        self.routing = [start] * attention
        self.newest = self._before = start
        for node, layer_slot in enumerate(self.held):
            for layer, slot, expert in start.held(node):
                layer_slot[layer, slot] = expert

    def obey(self, node, value):
        index = node.index
        if isinstance(value, FillSlots):
            placement = value.placement
            for fill in fills(self.newest if index == 0 else self._before, placement):
                if fill.node == index:
                    for used in self.routing:
                        row = used.layers[fill.layer].slots[index]
                        assert fill.slot >= len(row) or row[fill.slot] == FREE, (
                            "a slot in use was overwritten"
                        )
                    self.held[index][fill.layer, fill.slot] = fill.expert
            if index == 0:
                self._before, self.newest = self.newest, placement
        elif isinstance(value, Adopt):
            self.routing[index] = value.placement
            for node, held in enumerate(self.held):
                for layer, slot, expert in self.routing[index].held(node):
                    assert held[layer, slot] == expert, "routed to an expert that is not there"
        else:
            assert isinstance(value, Retire)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_any_interleaving_of_plans_and_answers_is_valid(seed):
    """Targets arrive at any time, answers in any order, and it may stop anywhere: what is in force is complete."""
    rng = random.Random(seed)
    experts, nodes, width = 5, 3, 4

    def target():
        rows: list[list[int]] = [[] for _ in range(nodes)]
        for expert in range(experts):
            rng.choice([r for r in rows if len(r) < width - 1]).append(expert)
        for row in rows:
            extra = rng.randrange(experts)
            if extra not in row and len(row) < width - 1:
                row.append(extra)
        return layered(rows, experts=experts, width=width)

    start = target()
    migration, cluster = Migration(start, crew(2, nodes)), Cluster(start, 2, nodes)
    pending = migration.begin_move(target(), 0.0)
    for _ in range(rng.randrange(60)):
        if rng.random() < 0.1:
            pending += migration.begin_move(target(), 0.0)
        if not pending:
            continue
        fill_first = [i for i, p in enumerate(pending) if isinstance(p[1], FillSlots)]
        node, value = pending.pop(fill_first[0] if fill_first else rng.randrange(len(pending)))
        cluster.obey(node, value)
        if isinstance(value, FillSlots):
            pending += migration.filled(node, value.placement.epoch, 0.0)
        elif isinstance(value, Adopt):
            pending += migration.adopted(node, value.placement.epoch, 0.0)
        for placement in {id(p): p for p in (*cluster.routing, migration.placement)}.values():
            for index in range(nodes):
                for layer, slot, expert in placement.held(index):
                    assert cluster.held[index][layer, slot] == expert


def routed(decode, prefill=None):
    rows = np.array(decode).astype(np.int64)
    return RoutedRows(np.zeros_like(rows) if prefill is None else np.array(prefill), rows)


def skewed(hot, layers, experts, rows=4000):
    load = np.ones((layers, experts)) * rows / experts / 3
    load[:, hot] += rows / len(hot)
    return load


def drive(balancing, load, seconds, now):
    """Two attention nodes under a steady load; every message is obeyed at once. Returns (time, epochs begun)."""
    begun = 0
    for _ in range(int(seconds / 0.5)):
        now += 0.5
        for _ in range(2):
            balancing.count_rows(routed(load * 0.25), now)
        stats, migration = balancing.age(now), balancing._migration
        place = None if stats is None else balancing.decided(balancing.think(stats, now))
        todo = [] if place is None else migration.begin_move(place.placement, now, place.route)
        while todo:
            node, value = todo.pop(0)
            if isinstance(value, FillSlots):
                begun += node.index == 0
                todo += migration.filled(node, value.placement.epoch, now)
            elif isinstance(value, Adopt):
                todo += migration.adopted(node, value.placement.epoch, now)
    return now, begun


@pytest.mark.slow
def test_a_domain_switch_is_followed_within_seconds_and_then_there_is_rest():
    layers, experts, nodes = 3, 16, 4
    start = Placement.contiguous(layers=layers, experts=experts, nodes=nodes, slots_per_node=6)
    balancing = Balancing("m", Migration(start, crew(2, nodes)), BalanceRules(act=True))
    now, _ = drive(balancing, skewed([0, 1], layers, experts), 10, 0.0)
    assert max(balancing.imbalance()) < 1.15
    now, begun = drive(balancing, skewed([0, 1], layers, experts), 20, now)
    assert begun == 0, "a steady load moved something"
    now, begun = drive(balancing, skewed([14, 15], layers, experts), 5, now)
    assert begun >= 1
    assert max(balancing.imbalance()) < 1.25
    assert any("moves" in d.reason or "shares" in d.reason for d in balancing.decisions)
    assert balancing.moves > 0


@pytest.mark.slow
def test_every_so_many_seconds_acts_without_being_asked():
    start = Placement.contiguous(layers=1, experts=8, nodes=2, slots_per_node=6)
    balancing = Balancing("m", Migration(start, crew(2, 2)), BalanceRules(act=True, every=1.0))
    _, begun = drive(balancing, skewed([0], 1, 8), 6, 0.0)
    assert begun >= 1


def test_off_only_counts():
    start = Placement.contiguous(layers=1, experts=8, nodes=2)
    balancing = Balancing("m", Migration(start, crew(2, 2)), BalanceRules())
    _, begun = drive(balancing, skewed([0], 1, 8), 6, 0.0)
    assert begun == 0
    assert balancing.imbalance()[0] > 1.2


def test_recording_is_what_the_nodes_counted():
    start = Placement.contiguous(layers=2, experts=4, nodes=2)
    balancing = Balancing("m", Migration(start, crew(1, 2)), BalanceRules())
    balancing.count_rows(routed([[1, 2, 3, 4], [4, 3, 2, 1]]), 0.0)
    balancing.recorder.start_recording(1.0)
    balancing.count_rows(routed([[0, 0, 0, 0], [0, 2, 0, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]]), 2.5)
    assert balancing.routed() == ((2, 2, 3, 4), (4, 5, 2, 1))
    recording = decode(balancing.recorder.stop_recording())
    assert (recording.model, recording.layers, recording.experts) == ("m", 2, 4)
    assert recording.total_load().tolist() == [[1, 0, 0, 0], [0, 2, 0, 0]]
    assert recording.total_load(0).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert {record.seconds for record in recording.records} == {1.5}
    assert not balancing.recorder.running


def test_a_placement_that_does_not_fit_is_refused():
    start = Placement.contiguous(layers=1, experts=4, nodes=2, slots_per_node=3)
    balancing = Balancing("m", Migration(start, crew(1, 2)), BalanceRules(act=True))
    with pytest.raises(ConfigError, match="of another model"):
        balancing.asked(Placement.contiguous(layers=2, experts=4, nodes=2))
    with pytest.raises(ConfigError, match="there is room for 2"):
        balancing.asked(layered([[0, 1, 2], [3]], experts=4, width=3))
    assert compact(start, 2).slots_per_node() == 2
    assert balancing._migration.phase is Phase.STEADY


@pytest.mark.slow
def test_what_was_thought_while_something_else_began_is_dropped():
    start = Placement.contiguous(layers=1, experts=8, nodes=2, slots_per_node=6)
    balancing = Balancing("m", Migration(start, crew(2, 2)), BalanceRules(act=True, every=1.0))
    total = skewed([0], 1, 8)
    balancing.count_rows(routed(total), 1.0)
    stats = balancing.age(1.0)
    assert stats is not None
    decision = balancing.think(stats, 1.0)
    assert decision is not None and decision.placement is not None
    asked = layered([[0, 1, 2, 3, 4], [4, 5, 6, 7]], experts=8, width=6)
    assert balancing._migration.begin_move(balancing.asked(asked).placement, 1.1)
    assert balancing.decided(decision) is None
    for node in range(2):
        balancing._migration.filled(expert_node(node), 1, 1.3)
    for node in range(2):
        balancing._migration.adopted(attention_node(node), 1, 1.4)
    drive(balancing, total, 4, 2.0)
    assert balancing._migration.placement.epoch > 1, "no longer decides"


def hosts_of(placement, expert, hosts):
    return [{hosts[n] for n, _, _ in layer.replicas(expert)} for layer in placement.layers]


def two_copies(hosts=(0, 0, 1, 1), spare=0, experts=16):
    pool = Nodes((9,) * 4, host=hosts)
    start = copied(layers=2, experts=experts, copies=2, nodes=pool, slots_per_node=10 + spare)
    rules = BalanceRules(act=True, every=1.0, copies=2, spare=spare, hosts=hosts)
    return Balancing("m", Migration(start, crew(1, 4)), rules)


@pytest.mark.slow
def test_rebalancing_keeps_copies_apart_and_spare_slots_empty():
    hosts = (0, 0, 1, 1)
    balancing = two_copies(hosts, spare=3)
    now, begun = drive(balancing, skewed([0], 2, 16), 6, 0.0)
    _, more = drive(balancing, skewed([5, 14], 2, 16), 6, now)
    assert begun and more
    placement = balancing._migration.placement
    assert all(found == {0, 1} for e in range(16) for found in hosts_of(placement, e, hosts))
    assert max(sum(e != FREE for e in row) for layer in placement.layers for row in layer.slots) <= 9


def test_spare_slots_hold_a_lost_nodes_experts_and_are_empty_again_when_it_is_back():
    start = Placement.contiguous(layers=1, experts=12, nodes=3, slots_per_node=6)
    balancing = Balancing("m", Migration(start, crew(1, 3)), BalanceRules(spare=2))
    balancing.count_rows(routed([[1] * 12]), 1.0)
    with pytest.raises(ConfigError, match="there is room for 4"):
        balancing.asked(layered([[0, 1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]], experts=12, width=6))
    survivors = balancing.plan_over(frozenset({0, 2}), 2.0).placement
    assert [sum(e != FREE for e in row) for row in survivors.layers[0].slots] == [6, 0, 6]
    balancing._migration.placement = survivors
    everyone = balancing.plan_over(frozenset({0, 1, 2}), 3.0).placement
    assert [sum(e != FREE for e in row) for row in everyone.layers[0].slots] == [4, 4, 4]
    with pytest.raises(ConfigError, match=r"\[1\] have no room for all experts"):
        balancing.plan_over(frozenset({1}), 4.0)


def test_copies_come_back_as_far_as_the_others_have_room():
    balancing = two_copies()
    balancing.count_rows(routed(skewed([3, 5], 2, 16)), 1.0)
    three = balancing.plan_over(frozenset({0, 1, 2}), 2.0).placement
    copies = [len(layer.replicas(e)) for layer in three.layers for e in range(16)]
    assert min(copies) == 1 and sum(copies) == 2 * 27  # 27 of 32: every slot is used, nothing is refused
    assert all(len(layer.replicas(e)) == 2 for layer in three.layers for e in (3, 5))
    balancing._migration.placement = three
    four = balancing.plan_over(frozenset({0, 1, 2, 3}), 3.0).placement
    assert all(len(layer.replicas(e)) >= 2 for layer in four.layers for e in range(16))


def test_what_a_lost_node_held_goes_to_holders_only():
    """Not to a node that left long ago, though the placement still counts it; to one that came later, it may."""
    rows = ((0, 1, 2, FREE, FREE), (3, 4, 5, FREE, FREE), (FREE,) * 5)
    share = tuple(tuple(0.0 if e == FREE else 1.0 for e in row) for row in rows)
    placement = Placement(0, 3, 6, (LayerPlacement(rows, share),))
    for holders in (frozenset({0}), frozenset({0, 3})):
        migration = Migration(placement, lambda role: [])
        place = Balancing("m", migration, BalanceRules()).plan_without(frozenset({1}), holders, 0.0)
        assert place is not None
        assert {node for node, *_ in place.placement.layers[0].replicas(3)} <= holders | {1}
        held = {e for n in holders for e in place.placement.layers[0].slots[n]} - {FREE}
        assert held == (set(range(6)) if 3 in holders else held) and len(held) >= 5


@pytest.mark.parametrize(
    ("counts", "order"), [((1, 1, 1, 1, 5, 9, 7, 3), [5, 6, 4, 7]), ((0,) * 8, [4, 5, 6, 7])]
)
def test_what_nobody_holds_is_loaded_and_adopted_in_parts_biggest_load_first(counts, order):
    """By what attention nodes have routed, or all alike where they have routed nothing yet."""
    migration = Migration(layered([[0, 1, 2, 3], [4, 5, 6, 7]], experts=8, width=8), crew(1, 1))
    balancing = Balancing("m", migration, BalanceRules(at_once=1))
    rows_LE = np.array([counts])
    balancing.count_rows(RoutedRows(np.zeros_like(rows_LE), rows_LE), 0.0)
    balancing.age(1.0)
    place = balancing.plan_without(frozenset({1}), frozenset({0}), 2.0)
    assert place is not None
    outgoing = migration.begin_move(place.placement, 2.0, place.route, urgent=place.urgent)
    served, survivor = [], frozenset({0})
    while not migration.steady:
        assert migration._following is not None
        number = migration._following.epoch
        assert [value.urgent for _, value in outgoing if isinstance(value, FillSlots)] == [True]
        before = homeless(migration.placement, survivor)
        migration.filled(expert_node(0), number, 2.0)
        outgoing = migration.adopted(attention_node(0), number, 2.0)
        served += sorted(set(before) - set(homeless(migration.placement, survivor)))
    assert [expert for _, expert in served] == order and not homeless(migration.placement, survivor)
