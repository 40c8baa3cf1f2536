"""Copies of experts and spare slots, from flags to slots, the first placement, the banner and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from afserve.config import ModelSource
from afserve.control.membership.balancing import BalanceRules
from afserve.control.pilot.settings import PilotSettings
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.cluster import read_cluster
from afserve.launch.plan.hosts import assign
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Share, Wishes
from afserve.launch.run.banner import StartedModel, banner
from afserve.launch.run.piloted import pilot_plan
from afserve.member import Role
from afserve.placement.node_room import NODE_OVERHEAD
from afserve.placement.placement import FREE

GIB = 1 << 30
NANO = load_spec(CONFIGS / "nano")
SOURCE = ModelSource(str(CONFIGS / "nano"), "nano")


def chosen(memory=8.0, **wishes):
    machine = Machine(2, int(memory * GIB), int(2 * memory * GIB))
    return choose(NANO, SOURCE, machine, Wishes(attention=1, **wishes))


def drawn(topology) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(banner([StartedModel(topology, "nano")], "http://127.0.0.1:8000", 1.5))
    return console.export_text()


def holders(placement, expert):
    return {node for node, _, _ in placement.layers[0].replicas(expert)}


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_two_copies_of_every_expert_on_different_nodes(nodes):
    topology = chosen(experts=nodes, expert_copies=2)
    placement = topology.deployment.placement
    assert all(len(holders(placement, e)) == 2 for e in range(NANO.experts))
    held = [sum(e != FREE for e in row) for row in placement.layers[-1].slots]
    assert max(held) == -(-2 * NANO.experts // nodes) == topology.slots.used and max(held) - min(held) <= 1
    assert placement.slots_per_node() == topology.slots.total
    assert "every expert has 2 copies" in drawn(topology)


def test_one_copy_is_counted_in_the_banner():
    topology = chosen(experts=3, redundant_experts=6)
    assert "32 of 32 experts of a layer have one copy only" in drawn(topology)
    assert topology.slots.used == 13
    assert "copies" not in drawn(chosen(colocated=True))


def test_copies_stand_on_different_hosts_and_slots_grow_as_that_needs():
    hosts = {"hosts": (Share(1, 2), Share(0, 1, here=False))}
    lopsided = chosen(experts=3, expert_copies=2, expert_hosts=(0, 0, 1), **hosts)
    placement = lopsided.deployment.placement
    assert lopsided.slots.used == NANO.experts  # the second host's only node holds all of them
    assert all(2 in holders(placement, e) for e in range(NANO.experts))
    assert "every expert has 2 copies, on different hosts" in drawn(lopsided)
    one_host = chosen(experts=3, expert_copies=2, expert_hosts=(0, 0, 0))
    assert one_host.slots.used == 22


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (
            {"experts": 1, "expert_copies": 2},
            "--expert-copies: 2 copies of every expert need 2 expert nodes, here",
        ),
        ({"experts": 2, "expert_copies": 0}, "--expert-copies: 0 is less than 1"),
        (
            {"experts": 2, "expert_copies": 2, "redundant_experts": 1},
            "--redundant-experts: 1 is outside [0, 0]",
        ),
        (
            {"experts": 1, "redundant_experts": 8},
            "--redundant-experts: 8 is outside [0, 0]: a node holds each of the 32 experts at most once",
        ),
        ({"redundant_experts": 40_000}, "is outside [0, 992]"),
        ({"experts": 2, "spare_slots": 17}, "--spare-slots: 17 is outside [0, 16]"),
        ({"experts": 2, "spare_slots": -1}, "--spare-slots: -1 is outside [0, 16]"),
        ({"colocated": True, "expert_copies": 2}, "--expert-copies 2: a colocated run has all experts"),
        (
            {"colocated": True, "spare_slots": 1},
            "--spare-slots 1: a colocated run has no expert nodes to lose",
        ),
    ],
)
def test_what_nodes_or_slots_cannot_hold_is_refused_by_name(wishes, said):
    with pytest.raises(ConfigError) as refused:
        chosen(**wishes)
    assert said in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("wishes", "nodes"),
    [
        ({}, 1),
        ({"redundant_experts": 8}, 2),
        ({"redundant_experts": 33}, 3),
        ({"expert_copies": 3}, 3),
        ({"expert_copies": 2, "redundant_experts": 32}, 3),
    ],
)
def test_as_many_expert_nodes_are_picked_as_the_copies_need(wishes, nodes):
    """`afserve up --redundant-experts 8` is a command of the README, which has to work on two cores too."""
    topology = chosen(**wishes)
    assert topology.deployment.count(Role.EXPERT) == nodes
    assert topology.picked["experts"] == f"{nodes}, " + (
        "for the copies" if wishes else "one per 4 of 2 cores"
    )


def test_too_many_nodes_are_not_blamed_on_the_model():
    with pytest.raises(
        DoesNotFitError, match=r"602 nodes on this machine: each takes .* at most 28 fit"
    ) as refused:
        choose(NANO, SOURCE, Machine(2, 8 * GIB, 16 * GIB), Wishes(attention=600, experts=2))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("wishes", "spare"),
    [
        ({"experts": 1}, 0),  # nobody is left to recover on
        ({"experts": 2}, 16),
        ({"experts": 3}, 5),
        ({"experts": 3, "redundant_experts": 6}, 3),  # 13 slots are used, 16 are needed
        ({"experts": 2, "expert_copies": 2}, 0),
        ({"experts": 3, "expert_copies": 2}, 10),
        ({"experts": 3, "spare_slots": 1}, 1),
        ({"experts": 3, "spare_slots": 0}, 0),
        ({"colocated": True}, 0),
    ],
)
def test_spare_slots_are_what_the_others_need_for_a_lost_nodes_experts(wishes, spare):
    topology = chosen(**wishes)
    assert topology.slots.spare == spare
    assert ("spare slots" in topology.picked) == bool(spare and "spare_slots" not in wishes)
    if not topology.deployment.colocated:
        assert topology.deployment.placement.slots_per_node() == topology.slots.total


def test_spare_slots_never_keep_a_run_from_starting():
    for extra in (0.02, 0.03, 0.05):
        tight = (3 * NODE_OVERHEAD / GIB + extra) / 0.9
        try:
            without = chosen(memory=tight, experts=2, spare_slots=0)
        except DoesNotFitError:
            with pytest.raises(DoesNotFitError):
                chosen(memory=tight, experts=2)
            continue
        assert chosen(memory=tight, experts=2).slots.spare <= 16
        assert without.slots.spare == 0
    fixed = chosen(memory=tight, experts=2, kv_tokens=without.kv_tokens_of_node)
    assert fixed.kv_tokens_of_node == without.kv_tokens_of_node and fixed.slots.spare < 16


def test_the_balancer_is_told_of_copies_hosts_and_spare_slots():
    topology = chosen(experts=4, expert_copies=2, expert_hosts=(0, 0, 1, 1), spare_slots=2, rebalance=True)
    rules = topology.keeping(BalanceRules(act=True))
    assert rules == BalanceRules(act=True, copies=2, spare=2, hosts=(0, 0, 1, 1))
    assert rules.nodes(5, 7).host == (0, 0, 1, 1, 2)  # one that came later
    assert replace(rules, hosts=()).nodes(5, 7).host == ()


@pytest.mark.parametrize(
    ("wishes", "least"),
    [
        ({"experts": 3}, 2),
        (
            {"experts": 3, "expert_copies": 2},
            2,
        ),  # one node has slots for all experts, and would be their only copy
        ({"experts": 3, "expert_copies": 3}, 3),
        (
            {"experts": 4, "expert_copies": 2, "spare_slots": 0, "rebalance": True},
            4,
        ),  # one slot is to move through
        ({"colocated": True}, 0),
    ],
)
def test_a_pilot_leaves_as_many_expert_nodes_as_the_copies_need(wishes, least):
    plan = pilot_plan(PilotSettings(pilot="advise"), chosen(**wishes), 1.0, 0.1)
    assert plan is not None and plan.limits.least.experts == least


def test_hosts_of_expert_nodes_come_from_the_cluster_file(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    hosts = [("10.0.0.2", "experts", 2), ("10.0.0.1", "attention", 1), ("10.0.0.1", "experts", 1)]
    tables = "".join(
        f'[[host]]\naddress = "{a}"\nrole = "{r}"\nhardware = "cpu"\ndevices = {d}\n' for a, r, d in hosts
    )
    file.write_text(
        f'micro_batches = 2\n[model]\nname = "nano"\n[attention]\nnodes = 1\ntensor_parallel = 1\nbatch = 4\n'
        f"[experts]\nnodes = 3\n{tables}"
    )
    found = assign(read_cluster(file), None, lambda name: frozenset([name]), ["10.0.0.1"])
    assert found.expert_hosts() == (0, 0, 1)
