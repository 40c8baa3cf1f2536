"""A whole deployment in one thread: the membership, gateways, attention and expert nodes as they are, and a fake clock.

The dice say who has a turn, what arrives when, who is killed, stopped and returns, which counts and placements are
asked for, and which clients come and go. Nothing here sleeps, opens a socket or starts a process.
"""

import random
from collections import Counter
from dataclasses import replace

from afserve.clock import FakeClock
from afserve.control.membership.balancing import AT_ONCE, BalanceRules, Balancing
from afserve.control.membership.events import (
    Admit,
    AllDrained,
    Begun,
    ChangeRole,
    Dismiss,
    DrainNode,
    EndRun,
    Exited,
    Incident,
    Joined,
    Left,
    Place,
    Refuse,
    Replan,
    RestartNodes,
    Said,
    Scale,
    Settled,
    Start,
    Tell,
    Ticked,
    Withdrawn,
)
from afserve.control.membership.membership import Membership
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.wire.desired import Deployment
from afserve.control.wire.values import AttentionNodes, Gateways, Register
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import ConfigError
from afserve.member import MODEL_ROLES, NodeId, Role
from afserve.placement.placement import Placement
from tests.comm.faults import Faults
from tests.control.moving import Client, GatewaySide
from tests.engine.test_live_migration import shuffled
from tests.engine.test_lost_peer import doubled
from tests.simulation.processes import AttentionProcess, ExpertProcess, Process

RULES = Rules(
    OnLoss.RECOVER,
    register=20.0,
    patience=5.0,
    silence=1.0,
    slow=3.0,
    stall=30.0,
    restarts=1_000_000,
    longest=2.0,
)
MOST_ATTENTION, TICK = 4, 0.25
BOUND = 120.0  # seconds in which everything is answered and in order once nothing happens any more


class Asker(Client):
    """A client whose answer is that of the undisturbed run, or breaks off with an error that names a node."""

    def check_so_far(self) -> None:
        tokens = [token for event in self.events for token in event.token_ids]
        assert tokens == self.answer[: len(tokens)], "a token is wrong, is missing, or came twice"

    @property
    def failure(self) -> str:
        return str(self.error or (self.events and self.events[-1].error) or "")

    def check(self) -> None:
        self.check_so_far()
        assert self.ended == 1, "every request is answered exactly once"
        if self.failure:
            assert any(word in self.failure for word in ("expert-", "attention-", "no attention node")), (
                self.failure
            )
        else:
            assert sum(len(event.token_ids) for event in self.events) == len(self.answer)


class Front(GatewaySide):
    """A gateway that, like the frontend, takes nothing new while it is told to refuse it."""

    def __init__(self, world: "World", index: int) -> None:
        super().__init__(world, index, 0)
        self.world, self.refused = world, 0

    def ask(self, asked: GenerationRequest) -> None:
        if self.homes.attendance.refusing:
            self.refused += 1
        else:
            answer = self.world.model.answer(asked)
            self.clients.append(Asker(self.homes.open(asked), asked, answer))


class World:
    """A schedule that `seed` draws. A round takes `pace` seconds; a process, up to `startup` to be started anew.

    With `roles` some of the nodes that go are followed by one of the other role, and lost experts come back in parts.
    """

    def __init__(self, seed: int, model, *, roles: bool = False) -> None:
        dice = self.dice = random.Random(seed)
        self.model, self.clock, self.changes_roles = model, FakeClock(100.0), roles
        self.pace, self.startup = dice.choice((0.02, 0.02, 0.1)), dice.choice((0.5, 0.5, 6.0))
        self.rules = replace(RULES, restarts=dice.choice((1_000_000, 1_000_000, 1)))
        self.most_attention = MOST_ATTENTION
        self.delay = dice.choice((0, 0, 2))
        experts = dice.randint(1, 3)
        attention = dice.randint(1, 2)
        least = -(-model.experts // experts)
        slots = dice.choice((least, least + 1, model.experts, model.experts + 1))
        start = Placement.contiguous(
            layers=model.layers, experts=model.experts, nodes=experts, slots_per_node=slots
        )
        if slots >= 2 * least and dice.random() < 0.5:
            start = doubled(start, slots)
        self.layout = model.layout(slots)
        counts = {Role.ATTENTION: attention, Role.EXPERT: experts}
        deployment = Deployment(
            model.source,
            model.config,
            counts,
            "f",
            start,
            silence=RULES.silence,
            most_attention=MOST_ATTENTION,
        )
        self.membership = Membership(deployment, "1.0", self.rules)
        self.balancing = Balancing(
            "m", self.membership.migration, BalanceRules(at_once=2 if roles else AT_ONCE)
        )
        self.processes: list[Process] = []  # with a stream to the controller, or still running without
        self.later: list[tuple[float, object]] = []
        self.wires: list[object] = []
        self.streams: dict[int, Process] = {}  # by connection, also those that have ended
        self.gateways = [Front(self, index) for index in range(dice.randint(1, 2))]
        self.attending = AttentionNodes()
        self.connections = 0
        self.ticked = self.clock.now()
        self.done: list[Asker] = []
        self.happened: Counter[str] = Counter()
        self.on(Begun())

    def faults(self) -> Faults:
        return Faults(self.dice.randrange(1 << 30), delay=self.delay, repeat=0.1 if self.delay else 0.0)

    # ---- the controller

    def on(self, event) -> None:
        try:
            effects = self.membership.on(event, self.clock.now())
        except ConfigError:
            assert isinstance(event, Place | Scale | DrainNode | RestartNodes | ChangeRole), event
            return
        for effect in effects:
            self.obey(effect)
        if (attending := self.membership.attention_nodes()) != self.attending:
            self.attending = attending
            for gateway in self.gateways:
                gateway.told.append(attending)

    def obey(self, effect) -> None:
        match effect:
            case Start(node):
                self.soon(lambda: self.start(node), self.startup)
            case Admit(connection, member, assigned):
                self.streams[connection].admitted(member, assigned)
            case Refuse(connection):
                if (refused := self.streams[connection]).alive:
                    self.end(refused)
            case Tell(member, value):
                if (process := self.of(member)) is not None:
                    process.control.down.append(self.reached(value))
            case Dismiss(member):
                if (process := self.of(member)) is not None:
                    process.connection = -1
                    process.control.ended = True
            case Replan(holders, lost):
                self.soon(lambda: self.replan(holders, lost), 0.1)
            case EndRun(error):
                raise AssertionError(f"the run ended: {error}")
            case Incident(what):
                self.happened[what] += 1
            case Settled() | AllDrained():
                pass

    def reached(self, value):
        """The gateways are no members here: they are told of in place of the controller's own."""
        if isinstance(value, Gateways):
            return Gateways(tuple((gateway.index, gateway.address) for gateway in self.gateways))
        return value

    def replan(self, holders, lost) -> None:
        now, balancing = self.clock.now(), self.balancing
        try:
            place = balancing.plan_without(lost, holders, now) if lost else balancing.plan_over(holders, now)
        except ConfigError:
            return
        if place is not None:
            self.on(place)

    def of(self, member) -> Process | None:
        return next((p for p in self.processes if p.member == member and p.connection >= 0), None)

    def soon(self, act, seconds: float) -> None:
        self.later.append((self.clock.now() + self.dice.uniform(0.0, seconds), act))

    # ---- processes

    def start(self, node: NodeId) -> None:
        """As the fork server: what is left of an earlier process of this node is killed first."""
        for process in [p for p in self.processes if p.node == node and p.connection < 0]:
            self.end(process)
        self.connections += 1
        kind = ExpertProcess if node.role is Role.EXPERT else AttentionProcess
        self.processes.append(kind(self, node, self.connections))
        self.streams[self.connections] = self.processes[-1]
        self.on(Joined(self.connections, Register(node.role, node.index, 1, "host", "1.0")))

    def end(self, process: Process) -> None:
        """Its process is gone; what hangs on it is closed."""
        process.alive = False
        process.close()
        self.processes.remove(process)

    def exited(self, process: Process) -> None:
        """By itself, or killed. The controller notices the end of the stream, and the parent that of the process."""
        self.end(process)
        if process.connection >= 0:
            self.soon(lambda: self.lost(process), 0.2)

    def lost(self, process: Process) -> None:
        if process.member is None:
            self.on(Withdrawn(process.connection))
            return
        self.on(Left(process.member, "its control stream ended"))
        self.on(Exited(process.node, "killed"))

    def roles(self, role: Role) -> list[Process]:
        return [process for process in self.processes if process.node.role is role]

    # ---- time

    def round(self) -> None:
        """A turn for most, in any order."""
        dice = self.dice
        self.clock.advance(dice.uniform(0.2, 1.8) * self.pace)
        now = self.clock.now()
        due = [act for at, act in self.later if at <= now]
        self.later = [(at, act) for at, act in self.later if at > now]
        for act in due:
            act()
        for process in dice.sample(self.processes, len(self.processes)):
            if dice.random() < 0.9:
                process.turn()
            self.carry(process)
        self.carry_streams()
        if now - self.ticked >= TICK:
            self.ticked = now
            for process in self.processes:
                process.beat()
            self.on(Ticked())

    def carry(self, process: Process) -> None:
        """What is under way between a node and the controller arrives in order, now or later."""
        control, dice = process.control, self.dice
        while control.up and process.connection >= 0 and dice.random() < 0.9:
            value = control.up.popleft()
            if process.member is not None:
                self.on(Said(process.member, value))
        while control.down and dice.random() < 0.9:
            control.inbox.append(control.down.popleft())

    def carry_streams(self) -> None:
        for wire in list(self.wires):
            for act in (wire.to_gateway, wire.to_node, wire.tell_gateway, wire.tell_node):
                while self.dice.random() < 0.7:
                    act()
        self.wires = [wire for wire in self.wires if not (wire.gateway_knows and wire.node_knows)]
        for gateway in self.gateways:
            if gateway.told and self.dice.random() < 0.8:
                gateway.homes.update_nodes(gateway.told.popleft())
            gateway.homes.check_time()
            gateway.read()
            self.done += [client for client in gateway.clients if client.ended]
            gateway.clients = [client for client in gateway.clients if not client.ended]

    # ---- clients and mishaps

    def client(self) -> None:
        gateway = self.dice.choice(self.gateways)
        if gateway.clients and self.dice.random() < 0.1:
            self.happened["cancelled"] += 1
            gateway.leave(self.dice.choice(gateway.clients))
        elif len(gateway.clients) < 4:
            prompt = self.dice.choice(self.model.prompts)
            most = self.dice.randint(1, self.model.longest)
            params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
            gateway.ask(GenerationRequest(0, prompt, params))

    def mishap(self) -> None:
        dice = self.dice
        process = dice.choice(self.processes) if self.processes else None
        what = dice.choices(
            ("kill", "stop", "cut", "scale", "drain", "renew", "place"), (6, 4, 3, 2, 1, 1, 2)
        )[0]
        self.happened[what] += 1
        match what:
            case "kill" if process is not None:
                self.exited(process)
            case "stop" if process is not None:
                process.frozen = True
                self.soon(lambda: self.thaw(process), dice.choice((0.3, 3.0, 12.0, 1e6)))
            case "cut" if self.wires:
                dice.choice(self.wires).cut = True
            case "scale":
                role = dice.choice(MODEL_ROLES)
                self.on(Scale(role, dice.randint(1, 3)))
            case "drain" if process is not None and self.changes_roles:
                self.change_role(process.node)
            case "drain" | "renew" if process is not None:
                self.on(DrainNode(process.node) if what == "drain" else RestartNodes((process.node,)))
            case "place":
                self.place()

    def change_role(self, node: NodeId) -> None:
        (other,) = (role for role in MODEL_ROLES if role is not node.role)
        before = self.membership.deployment.counts
        self.on(ChangeRole(node, other))
        self.happened["role changed"] += self.membership.deployment.counts != before

    def thaw(self, process: Process) -> None:
        process.frozen = False

    def place(self) -> None:
        """Another placement, as people or the rebalancer ask for it."""
        here = self.membership.migration.placement
        slots = here.slots_per_node()
        if here.nodes * (slots - 1) > here.experts:
            try:
                self.on(self.balancing.asked(shuffled(self.dice, here, slots)))
            except ConfigError:
                return

    # ---- a schedule

    def run(self, rounds: int) -> None:
        """Mishaps, and then none: within a bound everything is answered and in order again."""
        self.until(lambda: self.membership.settled, BOUND, "the run never settled")
        for _ in range(rounds):
            self.round()
            if self.dice.random() < 0.24:
                self.client()
            if self.dice.random() < 0.04:
                self.mishap()
        for process in self.processes:
            process.frozen = False
        self.until(self.quiet, BOUND, "something is left open")

    def until(self, holds, seconds: float, what: str) -> None:
        end = self.clock.now() + seconds
        while not holds():
            assert self.clock.now() < end, f"{what} after {seconds:.0f} s: {self.state()}"
            self.round()

    def quiet(self) -> bool:
        members, migration = self.membership.members, self.membership.migration
        nodes = [p for p in self.roles(Role.ATTENTION) if p.loop is not None]
        return (
            members.all_ready()
            and migration.steady
            and not self.membership.state.renewals.planned
            and not self.membership.attention_nodes().refusing
            and not any(len(gateway.homes.requests) for gateway in self.gateways)
            and not any(process.kept or process.engine.busy for process in nodes)
        )

    def state(self) -> str:
        members = ", ".join(f"{m.node} {m.state.value}" for m in self.membership.members)
        open_ = sum(len(gateway.homes.requests) for gateway in self.gateways)
        why = self.membership.attention_nodes().refusing
        phase = self.membership.migration.phase.value
        return (
            f"{open_} requests open; {members}; missing {self.membership.members.vacancies()}; {phase}; {why}"
        )

    def check(self) -> None:
        for client in self.done:
            client.check()
        for process in self.roles(Role.ATTENTION):
            if process.loop is None:
                continue  # it has never served, and ends
            process.engine.check()
            assert process.engine.stats().kv_blocks_used == 0, "KV blocks are left"
            assert not process.link._under_way and process.engine.owing() == {}
