"""An attention node that reaches only some expert nodes, over real connections: nobody waits longer than the bound.

A proxy stands between attention node 1 and expert node 1, and stops passing bytes on, or closes everything. Expert node
1 itself is well, and tells the controller so. Time is a fake clock's.
"""

import contextlib
import socket
import threading
import time

import pytest
import torch

from afserve.control.membership.events import Dismiss, Said, Tell, Waited
from afserve.control.membership.recovery import OnLoss
from afserve.control.node.peers import ExpertPeers, Reached
from afserve.control.wire.placement_values import Adopted
from afserve.control.wire.values import ExpertPeer, Heartbeat, Peers, Stuck, Unheard
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import RendezvousError
from afserve.member import Role, attention_life, attention_node, expert_life, expert_node
from afserve.placement.placement import LayerPlacement, Placement
from tests.comm.conftest import Cluster, make_layout
from tests.control.test_membership import say
from tests.control.test_scaling import moved, served

ROWS = tuple(range(4))
EVERYWHERE = LayerPlacement((ROWS, ROWS), ((0.5,) * 4, (0.5,) * 4))
SECONDS = 60.0  # real ones, after which a test has failed


class Proxy:
    """Passes bytes on to `target` until it is `cut`; then it swallows them, or has closed everything."""

    def __init__(self, target):
        host, _, port = target.removeprefix("tcp:").rpartition(":")
        self.target = host, int(port)
        self.swallows = False
        self.open = [socket.create_server(("127.0.0.1", 0))]
        self.address = f"tcp:127.0.0.1:{self.open[0].getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.open[0].accept()
                far = socket.create_connection(self.target)
                self.open += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self.pump, args=ends, daemon=True).start()

    def pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.swallows:
                    sink.sendall(data)

    def cut(self, how):
        if how == "swallows":
            self.swallows = True
        else:
            self.close()

    def close(self):
        for end in self.open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _dialled(cluster, link, address):
    """Its place is free as soon as the expert node has seen it go."""
    end = time.monotonic() + SECONDS
    while True:
        cluster.turn(0.0)
        try:
            return link.dial(1, address, SECONDS)
        except RendezvousError:
            assert time.monotonic() < end, "its place is not given free"


@pytest.fixture
def world():
    """A cluster over tcp in which link 1 reaches expert node 1 through a proxy; the proxy's address by expert node."""
    placement = Placement(0, 2, 4, (EVERYWHERE,))
    layout = make_layout(placement)
    cluster = Cluster("tcp", 2, placement, layout)
    targets = cluster.addresses
    proxy = Proxy(targets[1])
    link = cluster.links[1]
    link.detach(1)
    link.attach(_dialled(cluster, link, proxy.address))
    yield cluster, proxy, [targets[0], proxy.address]
    proxy.close()
    cluster.close()


def until(holds, turn):
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        turn()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["swallows", "closes"])
def test_what_only_one_attention_node_cannot_reach(world, how):
    """A connection that passes nothing on is left after the bound. One that is closed is no loss: replicas answer."""
    cluster, proxy, addresses = world
    membership, members = served(attention=2, experts=2, on_loss=OnLoss.RECOVER, patience=1e6)
    on_these(membership, members, [0, 1])
    known = Peers(
        tuple(ExpertPeer(expert_life(index, 0), address) for index, address in enumerate(addresses))
    )
    inbox: list[Reached] = []
    said: list[Stuck] = []
    told, waited = [], []
    link = cluster.links[1]
    peers = ExpertPeers(link, known, 1.0, inbox.append, said.append, cluster.clock)
    batch = cluster.rows(8, 1)
    ticket = link.dispatch(*batch, layer=0, micro_batch=0)
    until(lambda: link.ready(ticket), lambda: cluster.turn(0.0))
    assert torch.equal(link.combine(ticket), cluster.expected(0, *batch)), "through the proxy"

    proxy.cut(how)
    ticket = link.dispatch(*batch, layer=0, micro_batch=0)

    def turn():
        cluster.turn(0.01)
        link.wait([ticket], 0.0)
        peers.look()
        while inbox:
            peers.reached(inbox.pop(0))
        now = cluster.clock.now()
        membership.on(Said(members[expert_node(1)], Heartbeat(1, ExpertStats())), now)
        while said:
            value = said.pop(0)
            assert isinstance(value, Stuck) and value.life.index == 1
            waited.append(value.seconds)
            told.extend(membership.on(Said(members[attention_node(1)], value), now))

    if how == "closes":
        until(lambda: waited and waited[-1] > 12.0, turn)
        assert not any(isinstance(effect, Dismiss) for effect in told)
        until(lambda: link.ready(ticket), lambda: cluster.turn(0.0))
        assert torch.equal(link.combine(ticket), cluster.expected(0, *batch)), "a replica has answered"
        return
    until(lambda: any(isinstance(effect, Dismiss) for effect in told), turn)
    assert 9.9 < waited[-1] < 12.0, "since it was noticed, which takes the sockets as long as it takes"
    (gone,) = [effect for effect in told if isinstance(effect, Dismiss)]
    assert gone.member == members[expert_node(1)] and "although it still speaks" in gone.error.message
    heard = {effect.member.node: effect.value for effect in told if isinstance(effect, Tell)}
    attention = {node for node in heard if node.role is Role.ATTENTION}
    assert attention == {attention_node(0), attention_node(1)}, "both leave it"
    left = heard[attention_node(1)]
    assert isinstance(left, Peers) and [peer.life.index for peer in left.experts] == [0]
    peers.update(Peers(known.experts[:1]))
    until(lambda: link.ready(ticket), lambda: cluster.turn(0.0))
    assert torch.equal(link.combine(ticket), cluster.expected(0, *batch)), "a replica has answered"


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_an_attention_node_that_does_not_know_what_it_has_is_left_after_the_silence(on_loss):
    """Its network is cut: requests are on their way to it, and its last word was that it has none."""
    membership, members = served(attention=2, experts=1, on_loss=on_loss)
    node = members[attention_node(1)]
    membership.on(Said(node, Heartbeat(1, AttentionStats(running=0))), 50.0)
    late = [
        Waited(Unheard(attention_life(1, 0), 0.9)),
        Waited(Unheard(attention_life(1, 7), 5.0)),
        Waited(Unheard(attention_life(5, 0), 5.0)),
    ]
    assert [membership.on(event, 51.5) for event in late] == [[], [], []], "too early, and of nobody"
    assert membership.on(Waited(Unheard(attention_life(1, 0), 5.0)), 50.9) == [], (
        "it speaks: it works on a long prompt"
    )
    told = membership.on(Waited(Unheard(attention_life(1, 0), 1.5)), 51.5)
    if on_loss is OnLoss.END:
        assert told == []
    else:
        (gone,) = [effect for effect in told if isinstance(effect, Dismiss)]
        assert gone.member == node and "the gateway has requests there" in gone.error.message


def on_these(membership, members, holders):
    """All experts are on these nodes from now on."""
    moved(membership, members, holders)
    say(membership, members[attention_node(1)], Adopted(1))
    assert membership.migration.placement.epoch == 1


def reports(membership, members, missed):
    """Attention nodes say twice of these expert nodes that they miss them, while all speak. Who is sent away."""
    for member in members.values():
        membership.on(Said(member, Heartbeat(1, None)), 6.9)
    said = [
        Said(members[attention_node(asker)], Stuck(expert_life(expert, 0), seconds, unreachable=True))
        for seconds in (1.5, 2.1)
        for asker, expert in missed
    ]
    return [e.member.node for event in said for e in membership.on(event, 7.0) if isinstance(e, Dismiss)]


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_who_goes_where_the_network_is_cut_between_nodes_that_all_speak(on_loss):
    def left(missed, holders=None):
        membership, members = served(attention=2, experts=2, on_loss=on_loss)
        if holders is not None:
            on_these(membership, members, holders)
        return reports(membership, members, missed)

    ends = on_loss is OnLoss.END
    assert left([(0, 1), (1, 1)]) == ([] if ends else [expert_node(1)]), "nobody reaches it"
    assert left([(0, 1)]) == ([] if ends else [attention_node(0)]), "it lacks what expert node 1 alone holds"
    assert left([(0, 1)], holders=[0, 1]) == [], "what it reaches holds all experts"
