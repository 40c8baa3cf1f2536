"""Nodes of the simulated world: each is the loop of a real process, over streams whose ends are queues.

A process can be killed, and be stopped and go on. Whatever it wants of the outside passes its `Control`, its gateways'
streams and the in-process transport; it never blocks.
"""

from collections import deque

from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transports import connect
from afserve.control.node.attention import AttentionLoop
from afserve.control.node.expert import ExpertLoop
from afserve.control.node.gateways import GatewayStreams
from afserve.control.node.kept import KeptRequests
from afserve.control.node.peers import ExpertPeers
from afserve.control.wire.request_values import Attend
from afserve.control.wire.values import (
    Assigned,
    Endpoint,
    Heartbeat,
    Peers,
    Ready,
)
from afserve.engine.expert_node import ExpertNode
from afserve.engine.filler import Filler
from afserve.errors import AfserveError, PeerLost
from afserve.member import Life, NodeId
from tests.comm.faults import FaultyTransport
from tests.engine.scripted_kv import NoKv

ORPHAN = 5.0


class Control:
    """As `ControlStream`: what is on its way to the controller, and what has arrived from there."""

    def __init__(self) -> None:
        self.up: deque[object] = deque()
        self.down: deque[object] = deque()  # on its way
        self.inbox: list[object] = []
        self.ended = False

    def send(self, value: object) -> None:
        self.up.append(value)

    def deliver(self, value: object) -> None:
        self.inbox.append(value)

    def receive(self, timeout: float) -> list[object]:
        if not self.inbox and self.ended:
            raise PeerLost("the controller", "ended the stream")
        arrived, self.inbox = self.inbox, []
        return arrived


class Process:
    """One life of a node. `member` once it is admitted; it dies by itself when its stream has ended."""

    def __init__(self, world, node: NodeId, connection: int) -> None:
        self.world, self.node, self.connection = world, node, connection
        self.control = Control()
        self.member: Life | None = None
        self.alive, self.frozen = True, False
        self.loop = None

    def admitted(self, member: Life, assigned: Assigned) -> None:
        """It may have ended, without the controller's having noticed."""
        self.member, self.node, self.assigned = member, member.node, assigned
        if self.alive:
            self.begin()

    def turn(self) -> None:
        """One turn of its loop. What ends a process is the end of its stream, or what it cannot go on after."""
        if not self.alive or self.frozen:
            return
        try:
            if self.loop is None:
                self.load()
            else:
                self.loop.turn()
                if not self.loop._running:
                    self.world.exited(self)
        except PeerLost as error:
            assert self.control.ended, error
            self.world.exited(self)

    def beat(self) -> None:
        if self.alive and not self.frozen and self.member is not None:
            self.control.send(Heartbeat(1, self.engine.stats() if self.loop is not None else None))

    def begin(self) -> None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """As the kernel does for a process that has ended."""
        raise NotImplementedError


class ExpertProcess(Process):
    end = None

    def begin(self) -> None:
        world, index = self.world, self.node.index
        self.end, address = connect.listen(
            "local", expert=index, attention_nodes=world.most_attention, layout=world.layout
        )
        self.control.send(Endpoint(address, {}))

    def load(self) -> None:
        if self.member is None or self.world.dice.random() < 0.6:
            self.control.receive(0.0)
            return
        placement, index = self.assigned.deployment.placement, self.node.index
        held = placement.held(index) if index < placement.nodes else ()
        bank = self.world.model.bank(held, self.world.layout.slots)
        self.filler = Filler(bank)
        self.engine = ExpertNode(
            ExpertPort(FaultyTransport(self.end, self.world.faults())),
            bank,
            epoch=placement.epoch,
            clock=self.world.clock,
        )
        self.loop = ExpertLoop(self.engine, self.filler, placement, index, self.control)
        self.control.send(Ready(1))

    def turn(self) -> None:
        super().turn()
        if self.alive and not self.frozen and self.loop is not None and self.world.dice.random() < 0.7:
            self.filler.work()

    def close(self) -> None:
        if self.end is not None:
            self.end.close()


class AttentionProcess(Process):
    def begin(self) -> None:
        self.life = self.member
        self.control.send(Endpoint("", {}))

    def load(self) -> None:
        """It connects to the expert nodes that it is told of first; one that is away by then is not there for it."""
        arrived = self.control.receive(0.0)
        first = next((value for value in arrived if isinstance(value, Peers)), None)
        if first is None:
            self.control.inbox = arrived
            return
        self.control.inbox = [value for value in arrived if value is not first]
        try:
            self.connect(first)
        except AfserveError:
            self.world.exited(self)

    def connect(self, first: Peers) -> None:
        world, clock = self.world, self.world.clock
        addresses = {peer.life.index: peer.address for peer in first.experts}
        end = connect.connect(addresses, attention=self.node.index, layout=world.layout, timeout=60.0)
        self.link = ExpertLink(
            FaultyTransport(end, world.faults()),
            attention=self.node.index,
            layout=world.layout,
            placement=self.assigned.deployment.placement,
            clock=clock,
        )
        self.engine = world.model.attention(self.link)
        self.kept = KeptRequests(ORPHAN, clock)
        streams = GatewayStreams(self.attend, "nowhere", self, self.control.deliver, clock)  # type: ignore[arg-type]
        experts = ExpertPeers(
            self.engine,
            first,
            world.rules.silence,
            self.control.deliver,
            self.control.send,
            clock,
            spawn=lambda dial: dial(),
        )
        self.loop = AttentionLoop(self.engine, self.control, streams, experts, self.kept, NoKv(), clock=clock)  # type: ignore[arg-type]
        self.control.send(Ready(1))

    def attend(self, gateway: int) -> Attend:
        return Attend(self.life, self.kept.held(gateway))

    def close(self) -> None:
        for wire in self.world.wires:
            if wire.node is self:
                wire.cut = wire.node_knows = True
        if self.loop is not None:
            self.link.close()
