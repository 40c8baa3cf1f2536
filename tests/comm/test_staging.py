"""Nodes whose rows are on a device, over mailboxes in host memory: nothing is used before its copy is done.

The device is a pretended one: what comes down is garbage until the copy is asked and says that it is done, and a buffer
that is used again while somebody may still read it is caught by its contents.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.m2n.staging import stage_for
from afserve.comm.transport import HOST, WireType
from tests.comm.faults import Faults, FaultyTransport
from tests.comm.test_m2n import LAYERS, placements

GARBAGE = {torch.float32: float("nan"), torch.int32: -(1 << 20), torch.int64: 1 << 40}


class LateCopy:
    def __init__(self, hosts, sources, polls):
        self._hosts, self._sources, self._polls = hosts, sources, polls

    @property
    def tensors(self):
        return self._hosts

    def copied(self):
        self._polls -= 1
        if self._polls < 0:
            self.wait()
        return self._polls < 0

    def wait(self):
        self._polls = -1
        for host, source in zip(self._hosts, self._sources):
            host.copy_(source)


class LateStage:
    """Copies down take a random number of polls; buffers are one per key, as pinned ones are."""

    device = HOST

    def __init__(self, seed=0, slowest=5):
        self._random, self._slowest = random.Random(seed), slowest
        self._buffers = {}

    def to_host(self, key, *tensors):
        hosts = tuple(self._buffer((key, i), tensor) for i, tensor in enumerate(tensors))
        for host in hosts:
            host.fill_(GARBAGE.get(host.dtype, 0))
        return LateCopy(hosts, [t.clone() for t in tensors], self._random.randint(0, self._slowest))

    def to_device(self, key, *tensors):
        return tuple(tensor.clone() for tensor in tensors)

    def _buffer(self, key, like):
        return self._buffers.setdefault((key, tuple(like.shape), like.dtype), torch.empty_like(like))


@given(placement=placements(), attention=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_sums_are_the_oracles(open_cluster, placement, attention, seed, data):
    seeds = itertools.count(seed)
    stage = lambda: LateStage(next(seeds))  # noqa: E731
    cluster = open_cluster("local", attention, placement, options={"stage": stage})
    for turn in range(3):
        flying = []
        for a, m in itertools.product(range(attention), range(2)):
            layer, rows = data.draw(st.integers(0, LAYERS - 1)), data.draw(st.integers(0, 8))
            batch = cluster.rows(rows, seed + 10 * a + m + 100 * turn)
            flying.append((a, layer, batch, cluster.links[a].dispatch(*batch, layer=layer, micro_batch=m)))
        for a, layer, batch, ticket in data.draw(st.permutations(flying)):
            y_TH = cluster.finish(cluster.links[a], ticket)
            assert torch.equal(y_TH, cluster.expected(layer, *batch))
    cluster.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("wire", [WireType.FLOAT32, WireType.BFLOAT16])
def test_between_processes_transports(build_cluster, kind, wire):
    cluster = build_cluster(kind, 2, wire=wire, options={"stage": LateStage})
    for layer, a in itertools.product(range(2), range(2)):
        batch = cluster.rows(5, a)
        ticket = cluster.links[a].dispatch(*batch, layer=layer, micro_batch=0)
        assert torch.equal(cluster.finish(cluster.links[a], ticket), cluster.expected(layer, *batch))


def test_only_one_side_has_a_device(build_cluster):
    """Attention on a GPU with experts on CPUs, and the reverse."""
    for turn in range(2):
        ends = itertools.cycle([None, None, LateStage()] if turn else [LateStage(), LateStage(), None])
        cluster = build_cluster(options={"stage": lambda ends=ends: next(ends)})
        batch = cluster.rows(6, turn)
        ticket = cluster.links[0].dispatch(*batch, layer=0, micro_batch=0)
        assert torch.equal(cluster.finish(cluster.links[0], ticket), cluster.expected(0, *batch))


def test_an_epoch_that_is_adopted_while_rows_come_down_does_not_touch_them(build_cluster):
    cluster = build_cluster(options={"stage": lambda: LateStage(slowest=50)})
    link, batch = cluster.links[0], cluster.rows(6, 3)
    ticket = link.dispatch(*batch, layer=0, micro_batch=0)
    for node in cluster.nodes:
        node.accept(1)
    link.adopt(cluster.placement.with_epoch(1))
    assert torch.equal(cluster.finish(link, ticket), cluster.expected(0, *batch))
    assert {part.header.epoch for part in ticket.parts} == {0}


@pytest.mark.slow
def test_an_answer_that_was_given_up_is_not_posted(build_cluster):
    """The attention node dispatches again before the first answer has come down from the expert node's device."""
    cluster = build_cluster(options={"stage": lambda: LateStage(seed=4, slowest=3)})
    link = cluster.links[0]
    for turn in range(30):
        given_up = link.dispatch(*cluster.rows(4, turn), layer=0, micro_batch=0)
        while given_up.leaving is not None:
            link.ready(given_up)
        cluster.turn()
        batch = cluster.rows(5, 100 + turn)
        ticket = link.dispatch(*batch, layer=1, micro_batch=0)
        assert torch.equal(cluster.finish(link, ticket), cluster.expected(1, *batch))


def test_delayed_messages_and_late_copies(build_cluster):
    wrap = lambda end: FaultyTransport(end, Faults(seed=2, delay=3))  # noqa: E731
    cluster = build_cluster(attention=2, options={"wrap": wrap, "stage": LateStage})
    for turn in range(20):
        batch = cluster.rows(6, turn)
        link = cluster.links[turn % 2]
        ticket = link.dispatch(*batch, layer=turn % 2, micro_batch=turn // 2 % 2)
        assert torch.equal(cluster.finish(link, ticket), cluster.expected(turn % 2, *batch))


def test_a_stage_stands_between_different_memories_only():
    assert stage_for(torch.device("cpu"), HOST) is None
    assert stage_for(torch.device("cuda:1"), torch.device("cuda:1")) is None
    assert stage_for(torch.device("cuda:0"), HOST).device == torch.device("cuda:0")
