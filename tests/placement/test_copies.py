"""Every expert on several nodes: apart where there is room for it, kept by the rebalancer, refused by name."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ConfigError
from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.domains import apart
from afserve.placement.optimizer.problem import Nodes, Problem, scenarios
from afserve.placement.placement import FREE, Placement


def loads(seed, layers=3, experts=20, count=1):
    rng = np.random.default_rng(seed)
    return scenarios(rng.lognormal(0, 1, (count, layers, experts)) * 1000)


def spans(placement, domain_N):
    """Per layer and expert: in how many domains it stands."""
    return [
        [len({int(domain_N[n]) for n, _, _ in layer.replicas(e)}) for e in range(placement.experts)]
        for layer in placement.layers
    ]


@st.composite
def pools(draw):
    """(nodes, experts, copies) that have room for all copies on different nodes, often tightly."""
    count, experts = draw(st.integers(2, 7)), draw(st.integers(1, 14))
    copies = draw(st.integers(2, min(3, count)))
    slots = draw(st.lists(st.integers(0, experts), min_size=count, max_size=count))
    per_host, racks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    host = tuple(n // per_host for n in range(count))
    rack = tuple(h % racks for h in host)
    while sum(slots) < copies * experts:
        slots[int(np.argmin(slots))] += 1
    return Nodes(tuple(slots), group=rack, host=host), experts, copies


@pytest.mark.slow
@given(pools(), st.integers(0, 2**31), st.integers(1, 2), st.data())
@settings(max_examples=150, deadline=None)
def test_copies_stand_apart_from_nothing_and_from_any_placement(pool, seed, count, data):
    nodes, experts, copies = pool
    domain_N = nodes.domains(experts, copies)
    load_CLE = loads(seed, 2, experts, count)
    found = balance(Problem(load_CLE, nodes, copies=copies)).placement()
    assert min(map(min, spans(found, domain_N))) >= copies
    moves = data.draw(st.sampled_from([None, 0, 3, 20]))
    asked = Problem(loads(seed + 1, 2, experts), nodes, current=found, moves=moves, copies=copies)
    answer = balance(asked)
    assert min(map(min, spans(answer.placement(), domain_N))) >= copies
    assert moves is None or found.diff(answer.placement(1)).moves <= moves  # nothing was forced
    single = balance(Problem(load_CLE, nodes)).placement()
    grown = balance(Problem(load_CLE, nodes, current=single, moves=5, copies=copies)).placement()
    assert min(map(min, spans(grown, domain_N))) >= copies


@given(pools(), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_what_already_stands_apart_is_not_touched(pool, seed):
    nodes, experts, copies = pool
    domain_N = nodes.domains(experts, copies)
    load_LE = loads(seed, 2, experts)[0]
    slot_LNS = balance(Problem(load_LE[None], nodes, copies=copies)).slot_LNS
    room_N = nodes.usable_slots().clip(max=experts)
    assert (apart(slot_LNS, load_LE, copies, domain_N, room_N) == slot_LNS).all()


def test_the_widest_domains_with_room_for_all_copies_are_kept_apart():
    even = {"group": (0, 0, 0, 0, 1, 1, 1, 1), "host": (0, 0, 1, 1, 2, 2, 3, 3)}
    assert Nodes((2,) * 8, **even).domains(8, 2).tolist() == list(even["group"])
    assert Nodes((3,) * 8, **even).domains(8, 3).tolist() == list(even["host"])  # three copies, two racks
    lopsided = {"group": (0, 0, 0, 0, 0, 0, 1, 1), "host": even["host"]}
    assert Nodes((2,) * 8, **lopsided).domains(8, 2).tolist() == list(even["host"])
    assert Nodes((4, 4), host=(0, 0)).domains(4, 2).tolist() == [0, 1]


def test_racks_are_used_on_the_way_to_hosts():
    nodes = Nodes.even(16, 64, groups=2, per_host=4)
    assert nodes.host == tuple(n // 4 for n in range(16)) and nodes.group == tuple(n // 8 for n in range(16))
    found = balance(Problem(loads(0, 2, 32), nodes, copies=2)).placement()
    assert min(map(min, spans(found, nodes.racks()))) == 2


def test_copies_of_all_experts_balance_almost_any_load():
    load_LE = np.random.default_rng(3).zipf(1.6, (4, 64)).clip(max=200) * 1.0
    found = balance(Problem(load_LE[None], Nodes.even(8, 128, per_host=2), copies=2))
    assert found.certificate.gap < 0.02


def test_a_lost_node_costs_copies_only_where_it_held_one():
    nodes = Nodes.even(6, 66)
    found = balance(Problem(loads(5, 2, 30), nodes, copies=2)).placement()
    fewer = Nodes.even(6, 66, dead=frozenset({2}))
    with pytest.raises(ConfigError, match="2 copies of 30 experts need 60 slots per layer, not 55 on 5 live"):
        Problem(loads(5, 2, 30), fewer, current=found, moves=0, copies=2)
    wider = Nodes((12, 12, 0, 12, 12, 12), dead=frozenset({2}))
    answer = balance(Problem(loads(5, 2, 30), wider, current=found, moves=0, copies=2))
    assert min(map(min, spans(answer.placement(), np.arange(6)))) == 2
    held = sum(e != FREE for layer in found.layers for e in layer.slots[2])
    assert answer.certificate.moves <= held


@pytest.mark.parametrize(
    ("nodes", "copies", "said"),
    [
        (Nodes.even(1, 20), 2, "2 copies of every expert need 2 live nodes, not 1: give more nodes"),
        (Nodes.even(3, 60, dead=frozenset({0})), 3, "3 copies of every expert need 3 live nodes, not 2"),
        (Nodes.even(4, 39), 2, "2 copies of 20 experts need 40 slots per layer, not 39 on 4 live nodes"),
        (Nodes((39, 2)), 2, "need 40 slots per layer, not 22"),  # a node holds an expert once
        (Nodes.even(4, 40), 0, "0 copies of every expert: give 1 or more"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(nodes, copies, said):
    with pytest.raises(ConfigError) as refused:
        Problem(loads(0), nodes, copies=copies)
    assert said in refused.value.message


def test_a_host_in_two_racks_is_refused():
    with pytest.raises(ConfigError, match="a host stands in two racks"):
        Nodes((1, 1), group=(0, 1), host=(0, 0))
    with pytest.raises(ConfigError, match="2 hosts of 4 nodes cannot stand in 3 groups"):
        Nodes.even(8, 8, groups=3, per_host=4)


def test_a_memory_budget_pays_for_copies():
    found = balance(Problem(loads(0), Nodes.even(4, 80), memory=36, copies=2)).placement()
    assert min(map(min, spans(found, np.arange(4)))) == 2
    with pytest.raises(ConfigError, match="a memory budget of 29 slots per node is too small"):
        balance(Problem(loads(0), Nodes.even(4, 80), memory=29, copies=2))


def test_one_copy_is_what_it_was():
    """`copies` of 1 asks for nothing: the same answers as without it, hosts or not."""
    plain, hosts = Nodes.even(6, 30), Nodes.even(6, 30, per_host=2)
    assert (
        balance(Problem(loads(1), plain)).placement()
        == balance(Problem(loads(1), hosts, copies=1)).placement()
    )
    assert isinstance(balance(Problem(loads(1), plain)).placement(), Placement)
