"""NUMA nodes as the system names them, what is bound to which, and what `doctor` says. Machines are pretended."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.binding import Binding, seat
from afserve.config import ModelSource
from afserve.families.table import load_spec
from afserve.launch.plan import numa
from afserve.launch.plan.checkup_numa import numa as finding
from afserve.launch.plan.checkup_numa import numa_in_full
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.numa import NumaNode, cores_in_words, cores_of, numa_nodes, split
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.member import NodeId, Role
from tests.launch.pretended_machine import pretend, write
from tests.patching import patch_library

CORES = st.frozensets(st.integers(0, 300))
SPEC, SOURCE = load_spec(CONFIGS / "nano"), ModelSource(str(CONFIGS / "nano"), "nano")
WHERE = os.path.isdir("/sys/devices/system/node/node0")


@given(CORES)
def test_cores_are_written_as_the_kernel_does(cores):
    assert frozenset(cores_of(cores_in_words(cores))) == cores


def test_two_sockets(tmp_path):
    root = pretend(tmp_path, ("0-3,8-11", 64 << 20), ("4-7,12-15", 32 << 20))
    first, second = numa_nodes(root)
    assert first == NumaNode(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11}), 64 << 30, 32 << 30, {0: 10, 1: 21})
    assert (second.number, second.memory, second.distance) == (1, 32 << 30, {0: 21, 1: 10})
    assert split((first, second), range(16)) == (
        Binding((0, 1, 2, 3, 8, 9, 10, 11), 0),
        Binding((4, 5, 6, 7, 12, 13, 14, 15), 1),
    )
    assert split((first, second), {2, 5}) == (Binding((2,), 0), Binding((5,), 1)), "a cpuset"
    assert split((first, second), range(4)) == (Binding((0, 1, 2, 3), 0),), "of one socket"


def test_numbers_with_holes_have_the_distances_of_those_there_are(tmp_path):
    write(tmp_path, 0, "0", 4, "10 32")
    write(tmp_path, 8, "1", 4, "32 10")
    assert [node.distance for node in numa_nodes(tmp_path)] == [{0: 10, 8: 32}, {0: 32, 8: 10}]


def test_memory_without_cores_takes_no_node_and_cores_without_memory_go_to_the_nearest(tmp_path):
    write(tmp_path, 0, "0-1", 4, "10 20 14 40")
    write(tmp_path, 1, "2-3", 4, "20 10 24 12")
    write(tmp_path, 2, "", 4, "14 24 10 30")  # CXL
    write(tmp_path, 3, "4-5", 0, "40 12 11 10")
    assert split(numa_nodes(tmp_path), range(6)) == (Binding((0, 1), 0), Binding((2, 3, 4, 5), 1))


def test_a_system_that_says_nothing_has_none(tmp_path):
    assert numa_nodes(tmp_path / "absent") == () == split((), range(4))
    (tmp_path / "node0").mkdir()
    (only,) = numa_nodes(tmp_path)
    assert only == NumaNode(0, frozenset(), 0, 0, {})
    assert split((only,), range(4)) == ()


@st.composite
def machines(draw):
    owner = draw(st.lists(st.integers(0, 5), max_size=40))
    count = 1 + max(owner, default=0)
    nodes = []
    for number in range(count):
        cores = frozenset(core for core, at in enumerate(owner) if at == number)
        far = {other: 10 if other == number else draw(st.integers(11, 250)) for other in range(count)}
        nodes.append(NumaNode(number, cores, draw(st.sampled_from((0, 1 << 30))), 0, far))
    return tuple(nodes), len(owner)


@given(machines(), CORES)
def test_every_usable_core_is_in_one_part_of_a_node_with_memory(machine, usable):
    nodes, cores = machine
    found = split(nodes, usable)
    homes = {node.number for node in nodes if node.memory and node.cores}
    assert {each.memory for each in found} <= homes and all(each.cores for each in found)
    bound = [core for each in found for core in each.cores]
    assert sorted(bound) == (sorted(usable & frozenset(range(cores))) if homes else [])


@given(st.integers(1, 8), st.integers(0, 16), st.integers(0, 16))
def test_nodes_of_a_run_are_dealt_evenly_wherever_they_can_be(count, attention, experts):
    seats = [seat(NodeId(Role.ATTENTION, n), count) for n in range(attention)]
    seats += [seat(NodeId(Role.EXPERT, n), count) for n in range(experts)]
    each = [seats.count(number) for number in range(count)]
    assert max(each) - min(each) <= (0 if (attention + experts) % count == 0 else 2)


def test_doctor_draws_every_node_and_says_what_up_does(tmp_path, monkeypatch):
    monkeypatch.setattr(numa, "SYSFS", pretend(tmp_path, ("0", 4 << 20), ("1", 4 << 20), ("", 8 << 20)))
    patch_library(monkeypatch, numa, "os", sched_getaffinity=lambda pid: {0, 1})
    assert finding().found == "2 nodes; up binds to them (--numa off: not); doctor --numa measures"
    drawn = [one.found for one in numa_in_full(1 << 20) if one.found.startswith("node ")]
    assert drawn[0] == "node 0: cores 0; 2 GiB free of 4 GiB; distance 10 to 0, 21 to 1, 21 to 2"
    assert drawn[2] == "node 2: no cores; 4 GiB free of 8 GiB; distance 21 to 0, 21 to 1, 10 to 2"
    patch_library(monkeypatch, numa, "os", sched_getaffinity=lambda pid: {1})
    assert finding().found == "3 nodes, cores of this process are in one; nothing is bound"
    assert next(numa_in_full(1 << 20)).found.startswith("node 0: cores 0 (none usable); ")


@pytest.mark.skipif(not WHERE, reason="this system names no NUMA nodes")
def test_doctor_measures_and_names_what_it_could_not(tmp_path, monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(numa, "SYSFS", pretend(tmp_path, (str(min(before)), 4 << 20)))
    only, rate = list(numa_in_full(1 << 20))[1:]
    assert only.found.startswith("there is only one")
    assert rate.level == "ok" or rate.advice, "read, or a container's reason why not"
    assert os.sched_getaffinity(0) == before
    write(tmp_path, 1023, "", 4 << 20, "21 10")  # no machine here has so many
    refused = list(numa_in_full(1 << 20))[-1]
    assert refused.found == "cores of 0 read memory of 1023: not measured"
    assert refused.advice.startswith("memory of NUMA node 1023: ")


def sockets(count, cores):
    seats = tuple(Binding(tuple(range(n * cores, n * cores + cores)), n) for n in range(count))
    return Machine(count * cores, 64 << 30, 64 << 30, numa=seats)


def chosen(machine, **asked):
    return choose(SPEC, SOURCE, machine, Wishes(**asked))


@pytest.mark.parametrize(
    ("asked", "counts", "threads"),
    [
        ({}, (2, 2), 16),
        ({"attention": 1}, (1, 1), 32),
        ({"experts": 3}, (1, 3), 16),
        ({"attention": 3}, (3, 1), 16),
        ({"colocated": True}, (2, 0), 32),
        ({"prefill": 1, "decode": 3}, (4, 2), 10),
        ({"expert_copies": 2, "threads": 4}, (2, 2), 4),
    ],
)
def test_a_run_fills_both_sockets_evenly(asked, counts, threads):
    run = chosen(sockets(2, 32), **asked)
    deployment = run.deployment
    assert (deployment.count(Role.ATTENTION), deployment.count(Role.EXPERT)) == counts
    assert (deployment.engine.threads, deployment.engine.numa_nodes) == (threads, 2)
    used = [run.binding(node) for node in deployment.nodes]
    for one in run.seats:
        assert used.count(one) * threads <= len(one.cores)
    assert run.binding(NodeId(Role.GATEWAY, 0)) is None


def test_replicas_stand_on_different_sockets():
    placement = chosen(sockets(2, 32), attention=2, experts=4, expert_copies=2).deployment.placement
    for layer in placement.layers:
        for expert in range(placement.experts):
            holders = [n for n in range(4) if expert in layer.slots[n]]
            assert len({seat(NodeId(Role.EXPERT, n), 2) for n in holders}) == 2


@pytest.mark.parametrize(
    ("machine", "asked", "said"),
    [
        (sockets(2, 4), {"numa": "off"}, "off, as asked for"),
        (
            sockets(2, 4),
            {"attention": 2, "experts": 1},
            "not bound: 3 nodes cannot be dealt evenly to 2 NUMA nodes",
        ),
        (sockets(2, 4), {"threads": 5}, "not bound: --threads 5 are more than the 4 cores of a NUMA node"),
        (sockets(1, 4), {}, None),
    ],
)
def test_what_is_not_bound_says_why(machine, asked, said):
    run = chosen(machine, **asked)
    assert run.seats == () and run.deployment.engine.numa_nodes == 1
    assert not any(run.binding(node) for node in run.deployment.nodes)
    assert (run.picked.get("numa") or "").startswith(said or "") and ("numa" in run.picked) == bool(said)


def test_the_banner_names_who_is_where_and_once_what_is_refused():
    here = sockets(8, 4)
    here = replace(
        here, numa=tuple(replace(one, refused="memory: no") if one.memory else one for one in here.numa)
    )
    said = chosen(here).picked["numa"]
    assert said.startswith(
        "8 nodes; attention-0, expert-7 on cores 0-3; attention-1, expert-6 on cores 4-7; "
    )
    assert said.endswith("on cores 12-15; 4 more alike; cores only, memory: no")
