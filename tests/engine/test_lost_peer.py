"""An expert node is lost under way: micro-batches only wait, their node is told, and a successor lets them go on."""

import inspect
import random

import pytest

from afserve.comm import connect
from afserve.comm.faults import Faults, FaultyTransport
from afserve.comm.m2n.port import ExpertPort
from afserve.config import ModelSource
from afserve.engine.expert_node import ExpertNode
from afserve.engine.local import LocalCluster
from afserve.errors import PeerLost
from afserve.member import expert_node
from tests.engine.driving import collect, config, prompts, requests


def succeed(cluster, expert):
    """Another node with the same experts in the lost one's place."""
    layout = cluster.attention[0]._link._layout
    attention = len(cluster.attention)
    end, address = connect.listen("local", expert=expert, attention_nodes=attention, layout=layout)
    epoch = cluster.placement.epoch
    cluster.experts[expert] = ExpertNode(ExpertPort(end), cluster.banks[expert], epoch=epoch)
    for node in cluster.attention:
        node._link.attach(expert, address, 1.0)


def waiting(cluster):
    """Every micro-batch is where it was: in its loop, or not begun."""
    states = {inspect.getgeneratorstate(loop) for node in cluster.attention for loop in node._loops}
    return states <= {inspect.GEN_SUSPENDED, inspect.GEN_CREATED}


def told(cluster, lost):
    """Turns without the lost node, until each attention node that is busy says who is lost, in `step` or in `wait`."""
    events = []
    for node in cluster.attention:
        for _ in range(200):
            try:
                events += node.step()
                if node.stalled:
                    node.wait(0.0)
            except PeerLost as error:
                assert error.peer == expert_node(lost) and node._link.lost is error
                with pytest.raises(PeerLost, match=f"expert-{lost}"):
                    node.step()
                break
            finally:
                assert waiting(cluster)
            cluster.experts[1 - lost].poll()
        else:
            assert not node.busy
    return events


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_micro_batches_outlive_a_lost_expert_node(seed, wrapped, tiny_checkpoint, expected):
    """Lost again and again at any turn: with its answer under way, there and not taken, or before it was asked."""
    dice, name = random.Random(seed), ("v3", "mixtral-window")[seed % 2]
    source = ModelSource(str(tiny_checkpoint(name)), name)
    engine = config(micro_batches=2, max_batch_tokens=12)
    cluster = LocalCluster.build(source, engine, attention=2, experts=2)
    for node in cluster.attention if wrapped else ():
        link = node._link
        link._transport, link._sender = FaultyTransport(link._transport, Faults(seed, repeat=0.2)), None
    for request in requests(prompts()):
        cluster.submit(request)
    events, losses = [], 0
    while any(node.busy for node in cluster.attention):
        for node in cluster.attention:
            events += node.step()
        for number, expert in enumerate(cluster.experts):
            if dice.random() < 0.05:
                expert.close()
                events += told(cluster, number)
                succeed(cluster, number)
                assert all(node._link.lost is None for node in cluster.attention)
                losses += 1
            elif dice.random() < 0.7:
                cluster.experts[number].poll()
    assert losses > 10
    assert collect(events) == expected(name)
    for node in cluster.attention:
        node.check()
        assert node.stats().kv_blocks_used == 0 and not node._link._under_way


def test_a_ticket_stays_unready_until_its_rows_are_sent_again(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    cluster = LocalCluster.build(source, config(), experts=2)
    (node,) = cluster.attention
    cluster.experts[1].close()
    node.submit(requests(prompts())[0])
    assert node.step() == [] and waiting(cluster)
    (ticket,) = node._tickets
    for _ in range(3):
        cluster.experts[0].poll()
        assert not node._link.ready(ticket)
    assert [box.expert for box in ticket.missing] == [1]
    for act in (node.step, lambda: node.wait(0.0)):
        with pytest.raises(PeerLost, match="expert-1: it has closed its transport"):
            act()
    assert waiting(cluster)
    succeed(cluster, 1)
    cluster.experts[1].poll()
    assert node._link.ready(ticket)
    while node.busy:
        cluster.step()
    assert node.stats().generated_tokens > 0
