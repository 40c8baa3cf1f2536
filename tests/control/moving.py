"""A small world for seeded schedules: real gateways' homes, real attention loops, scripted engines, a fake clock.

What travels between them is encoded and decoded, arrives late or not at all when a stream is cut, and each end notices
the cut when the dice say so. Nothing here sleeps.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from afserve.clock import FakeClock
from afserve.control.homes import HomeRules, Homes
from afserve.control.node.attention import AttentionLoop
from afserve.control.node.gateways import GatewayStreams
from afserve.control.node.kept import KeptRequests
from afserve.control.requests import Request, Requests
from afserve.control.wire import messages
from afserve.control.wire.request_values import Attend
from afserve.control.wire.values import (
    AttentionNodes,
    AttentionPeer,
    Gateways,
)
from afserve.engine.scheduling.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from afserve.errors import AfserveError, OverloadedError, RendezvousError, RequestError
from afserve.member import Life, attention_life
from tests.engine.scripted_kv import NoKv

BAD = 7  # a prompt that the engine refuses
SPOILED = 11  # one whose answer ends with an error
FULL = 6  # requests that an engine takes
RULES = HomeRules(block_size=4, grace=1.0, deadline=30.0)
ORPHAN = 5.0


def expected(request: GenerationRequest) -> list[int]:
    """The tokens of an answer, whoever computes it."""
    return [(sum(request.prompt_ids) * 31 + i * 7) % 1000 for i in range(request.params.max_tokens)]


class Engine:
    """As `AttentionNode`: a token or two for some requests per step; a cancelled one may still say so later."""

    held = False
    rests = 0.0

    def note_line(self, waiting: int, *, moving: bool) -> None:
        pass

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.stalled, self.settled = dice, False, True
        self.running: dict[int, tuple[GenerationRequest, int]] = {}
        self.late: list[TokenEvent] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.late)

    def submit(self, request: GenerationRequest) -> None:
        assert request.handle not in self.running, "a number is given out once"
        if sum(request.prompt_ids) == BAD:
            raise RequestError("a bad prompt")
        if len(self.running) >= FULL:
            raise OverloadedError("full", retry_after=1.0)
        answer = expected(request)
        assert request.generated == tuple(answer[: len(request.generated)])
        assert len(request.generated) < len(answer)
        self.running[request.handle] = request, len(request.generated)

    def cancel(self, handle: int) -> None:
        if self.running.pop(handle, None) is not None and self.dice.random() < 0.5:
            self.late.append(TokenEvent(handle, (), "cancelled"))

    def step(self) -> list[TokenEvent]:
        events, self.late = self.late, []
        for handle in list(self.running):
            if self.dice.random() < 0.5:
                events.append(self.extend(handle, self.dice.randint(1, 2)))
        self.stalled = self.dice.random() < 0.5
        return events

    def extend(self, handle: int, most: int) -> TokenEvent:
        request, at = self.running[handle]
        answer = expected(request)
        spoils = sum(request.prompt_ids) == SPOILED
        spoiled = spoils and at >= len(answer) // 2
        most = 1 if spoils else most
        run = () if spoiled else tuple(answer[at : at + most])
        end: FinishReason | None = "error" if spoiled else "length" if at + len(run) == len(answer) else None
        self.running[handle] = request, at + len(run)
        if end is not None:
            del self.running[handle]
        return TokenEvent(
            handle,
            run,
            end,
            logprobs=tuple(TokenLogprob(token, -0.5, 1) for token in run),
            prompt_logprobs=() if at else (None,),
            cached_tokens=0 if at else 1,
            error="spoiled" if spoiled else None,
        )

    def wait(self, timeout: float) -> None:
        return


class Wire:
    """One stream. Each end has what is on its way to it, and may not know yet that it was cut."""

    def __init__(self, node: "Node", gateway: "GatewaySide", arrived, ended) -> None:
        self.node, self.gateway = node, gateway
        self.arrived, self.ended = arrived, ended
        self.life, self.number = node.life, 0
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.entered = self.cut = self.gateway_knows = self.node_knows = False

    @property
    def open(self) -> bool:
        """Whether anything may come of it yet."""
        return not (self.gateway_knows and self.node_knows)

    def send(self, value) -> None:
        """By the gateway."""
        if not self.cut:
            self.down.append(messages.encode_to_attention(value))

    def to_gateway(self) -> None:
        if self.gateway_knows or not self.up or not self.gateway.alive:
            return
        value = messages.decode_from_attention(self.up.popleft())
        if self.entered:
            self.gateway.homes.heard(self, value)
            return
        assert isinstance(value, Attend)
        self.number = value.stream
        try:
            self.gateway.homes.entered(self, value.held)
            self.entered = True
        except RendezvousError:
            self.cut = self.gateway_knows = True

    def to_node(self) -> None:
        if not self.node_knows and self.down:
            self.arrived(messages.decode_to_attention(self.down.popleft()))

    def tell_gateway(self) -> None:
        if self.cut and not self.gateway_knows:
            self.gateway_knows = True
            if self.entered:
                self.gateway.homes.left(self)

    def tell_node(self) -> None:
        if self.cut and not self.node_knows:
            self.node_knows = True
            self.ended(None)


class NoExperts:
    """This node's experts are always there."""

    def look(self) -> None:
        """There is nothing to report."""


class NodeEnd:
    """As `node.stream.Stream`, for an attention node's stream to a gateway. `token` is the node."""

    def __init__(self, address, token, wire, on_value, on_end, certificates=None, role=None) -> None:
        world = token.world
        gateway = next((g for g in world.gateways if g.address == address and g.alive), None)
        self.wire = None if gateway is None else Wire(token, gateway, on_value, on_end)
        self.on_end = on_end
        self.world = world

    def start(self) -> None:
        if self.wire is None:
            self.on_end(None)
        else:
            self.world.wires.append(self.wire)

    def send(self, value) -> None:
        if self.wire is not None and not self.wire.cut:
            self.wire.up.append(messages.encode_from_attention(value))

    def drop(self) -> None:
        if self.wire is not None:
            self.wire.cut = True


class Inbox:
    """As `ControlStream`."""

    def __init__(self) -> None:
        self.commands: list[object] = []

    def deliver(self, value: object) -> None:
        self.commands.append(value)

    def receive(self, timeout: float) -> list[object]:
        arrived, self.commands = self.commands, []
        return arrived

    def send(self, value: object) -> None:
        return


class Node:
    """One life of an attention node. `frozen` ones take no turn."""

    def __init__(self, world: "World", life: Life) -> None:
        self.world, self.life = world, life
        self.engine, self.inbox = Engine(world.dice), Inbox()
        self.kept = KeptRequests(ORPHAN, world.clock)
        self.alive, self.frozen, self.accepting = True, False, True
        streams = GatewayStreams(
            lambda gateway: Attend(life, self.kept.held(gateway)),
            "nowhere",
            self,  # type: ignore[arg-type]
            self.inbox.deliver,
            world.clock,
        )
        parts = (self.engine, self.inbox, streams, NoExperts(), self.kept, NoKv())
        opened: Any = AttentionLoop
        self.loop: AttentionLoop = opened(*parts, clock=world.clock)

    def turn(self) -> None:
        if self.alive and not self.frozen:
            self.loop.turn()


@dataclass(eq=False)
class Client:
    """`answer` is what the undisturbed run says."""

    request: Request
    asked: GenerationRequest
    answer: list[int]
    left: bool = False
    events: list[TokenEvent] = field(default_factory=list)
    error: AfserveError | None = None
    ended: int = 0

    def read(self) -> None:
        while self.request._items:
            item = self.request._items.popleft()
            if isinstance(item, AfserveError):
                self.error = item
                self.ended += 1
            else:
                assert not self.ended, "something came after the end"
                self.events.append(item)
                self.ended += item.finish_reason is not None

    def check_so_far(self) -> None:
        tokens = [token for event in self.events for token in event.token_ids]
        assert tokens == self.answer[: len(tokens)], "a token is missing, or came twice"
        assert [s.token_id for event in self.events for s in event.logprobs] == tokens
        told = [event for event in self.events if event.prompt_logprobs or event.cached_tokens]
        assert told == self.events[:1], "the prompt is told once, first"

    def check(self) -> None:
        self.check_so_far()
        assert self.ended == 1, "every request is answered exactly once"
        kind = sum(self.asked.prompt_ids)
        if self.error is not None:
            assert isinstance(self.error, RequestError) == (kind == BAD)
            assert self.events == [] or not isinstance(self.error, OverloadedError)
            return
        end = self.events[-1]
        assert kind != BAD and (end.finish_reason, end.error) == (
            ("error", "spoiled") if kind == SPOILED else ("length", None)
        )
        if kind != SPOILED:
            assert sum(len(event.token_ids) for event in self.events) == self.asked.params.max_tokens


class GatewaySide:
    """One life of a gateway and its clients."""

    def __init__(self, world: "World", index: int, generation: int) -> None:
        self.index, self.generation, self.alive = index, generation, True
        self.address = f"gateway-{index}-{generation}"
        self.homes = Homes(Requests(index, generation), RULES, world.clock)
        self.clients: list[Client] = []
        self.told: deque[AttentionNodes] = deque()

    def open(self, asked: GenerationRequest) -> None:
        self.clients.append(Client(self.homes.open(asked), asked, expected(asked)))

    def read(self) -> None:
        """As the frontend: what has ended is closed."""
        for client in self.clients:
            client.read()
            client.check_so_far()
            if client.ended:
                self.homes.close(client.request)

    def leave(self, client: Client) -> None:
        client.left = True
        self.homes.close(client.request)
        self.clients.remove(client)


class World:
    def __init__(self, seed: int, nodes: int = 3, gateways: int = 2) -> None:
        self.dice, self.clock = random.Random(seed), FakeClock(100.0)
        self.wires: list[Wire] = []
        self.gateways = [GatewaySide(self, index, 0) for index in range(gateways)]
        self.nodes = [Node(self, attention_life(index, 0)) for index in range(nodes)]
        self.gone: list[Node] = []  # dead, or fenced and still running
        self.done: list[Client] = []
        self.tell_nodes()
        self.tell_gateways()

    # ---- what the controller does

    def tell_gateways(self) -> None:
        nodes = (AttentionPeer(n.life, n.accepting) for n in self.nodes if n.alive)
        value = AttentionNodes(tuple(nodes))
        for gateway in self.gateways:
            gateway.told.append(messages.decode_to_node(messages.encode_to_node(value)))  # type: ignore[arg-type]

    def tell_nodes(self) -> None:
        value = Gateways(tuple((g.index, g.address) for g in self.gateways))
        for node in self.nodes:
            node.inbox.commands.append(value)

    def replace(self, node: Node) -> None:
        """It was lost, or is taken for it; its place gets another life."""
        self.nodes.remove(node)
        self.gone.append(node)
        successor = Node(self, attention_life(node.life.index, node.life.generation + 1))
        self.nodes.append(successor)
        self.tell_nodes()
        self.tell_gateways()

    def kill(self, node: Node) -> None:
        node.alive = False
        for wire in self.wires:
            if wire.node is node:
                wire.cut = wire.node_knows = True

    def replace_gateway(self, gateway: GatewaySide) -> None:
        """Its clients go with it."""
        gateway.alive = False
        for wire in self.wires:
            if wire.gateway is gateway:
                wire.cut = wire.gateway_knows = True
        self.gateways.remove(gateway)
        self.gateways.append(GatewaySide(self, gateway.index, gateway.generation + 1))
        self.tell_nodes()
        self.tell_gateways()

    # ---- one step of a schedule

    def step(self) -> None:
        dice = self.dice
        roll = dice.random()
        self.wires = [wire for wire in self.wires if wire.open]
        if roll < 0.45 and self.wires:
            wire = dice.choice(self.wires)
            dice.choice(
                (
                    wire.to_gateway,
                    wire.to_node,
                    wire.to_gateway,
                    wire.to_node,
                    wire.tell_gateway,
                    wire.tell_node,
                )
            )()
        elif roll < 0.65:
            dice.choice([*self.nodes, *self.gone]).turn()
        elif roll < 0.75:
            self.clock.advance(dice.choice((0.01, 0.05, 0.3)))
        elif roll < 0.87:
            gateway = dice.choice(self.gateways)
            dice.choice((gateway.homes.check_time, gateway.read, lambda: self.hear(gateway)))()
        elif roll < 0.95:
            self.client()
        else:
            self.trouble()

    def hear(self, gateway: GatewaySide) -> None:
        if gateway.told:
            gateway.homes.update_nodes(gateway.told.popleft())

    def client(self) -> None:
        gateway = self.dice.choice(self.gateways)
        if gateway.clients and self.dice.random() < 0.15:
            gateway.leave(self.dice.choice(gateway.clients))
        elif len(gateway.clients) < 40:
            prompt = tuple(self.dice.randrange(3, 9) for _ in range(self.dice.randint(1, 9)))
            gateway.open(GenerationRequest(0, prompt, SamplingParams(max_tokens=self.dice.randint(1, 12))))

    def trouble(self) -> None:
        dice, node = self.dice, self.dice.choice(self.nodes)
        roll = dice.random()
        if roll < 0.60 and self.wires:
            dice.choice(self.wires).cut = True
        elif roll < 0.68:
            self.kill(node)  # the controller has not noticed yet
        elif roll < 0.76:
            self.replace(node)  # fenced where it still runs
        elif roll < 0.84:
            node.frozen = not node.frozen
        elif roll < 0.94:
            node.accepting = not node.accepting
            self.tell_gateways()
        else:
            self.replace_gateway(dice.choice(self.gateways))
        if not node.alive and node in self.nodes and dice.random() < 0.5:
            self.replace(node)

    # ---- the end of it

    def settle(self) -> None:
        """Everything is repaired, and time passes until all is quiet."""
        for node in list(self.nodes):
            node.frozen = False
            node.accepting = True
            if not node.alive:
                self.replace(node)
        for node in self.gone:
            self.kill(node)
        self.tell_gateways()
        for _ in range(3000):
            for wire in list(self.wires):
                for act in (wire.tell_gateway, wire.tell_node, wire.to_gateway, wire.to_node):
                    act()
            for node in self.nodes:
                node.turn()
            for gateway in self.gateways:
                self.hear(gateway)
                gateway.homes.check_time()
                gateway.read()
            self.clock.advance(0.05)
            if self.quiet():
                return
        raise AssertionError("something is left open")

    def quiet(self) -> bool:
        nodes = all(not node.kept and not node.engine.busy for node in self.nodes)
        return nodes and all(len(gateway.homes.requests) == 0 for gateway in self.gateways)

    def check(self) -> None:
        for gateway in self.gateways:
            for client in gateway.clients:
                client.check()
