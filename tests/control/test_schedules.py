"""The membership under seeded schedules: nodes come, go, fall silent, return; counts, placements, controllers change.

Nothing here is a process. A controller may die between any two effects, and the next one knows nothing but what the
nodes tell it. `World` obeys effects as correct nodes would, some time later, and loses nodes as it likes.
Every answer may come from a life that is over already, and every event may come twice.
"""

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest

from afserve.config import EngineConfig, ModelSource
from afserve.control.membership.balancing import BalanceRules, Balancing
from afserve.control.membership.events import (
    Admit,
    AllDrained,
    Begun,
    ChangeRole,
    Dismiss,
    DrainAll,
    DrainNode,
    EndRun,
    Exited,
    Incident,
    Joined,
    Left,
    Place,
    Refuse,
    Rejoined,
    Replan,
    RestartNodes,
    Said,
    Scale,
    Settled,
    Start,
    TakenOver,
    Tell,
    Ticked,
    Withdrawn,
)
from afserve.control.membership.membership import Membership
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.node.account import NodeAccount
from afserve.control.wire.desired import Deployment
from afserve.control.wire.placement_values import Adopt, Adopted, Filled, FillSlots, Retire, Unfilled
from afserve.control.wire.values import (
    Drain,
    Endpoint,
    Failed,
    Heartbeat,
    Peers,
    Progress,
    Ready,
    Register,
    Shutdown,
    Stuck,
)
from afserve.control.wire.values import Drained as NodeDrained
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import ConfigError, ModelError, PeerLost
from afserve.member import MODEL_ROLES, NodeId, Role, expert_life
from afserve.placement.migrate import SlotUse
from afserve.placement.optimizer.problem import unthrottled
from afserve.placement.placement import FREE, LayerPlacement, Placement
from afserve.placement.rebalance.stats import RoutedRows

LAYERS, EXPERTS, WIDTH = 2, 6, 5  # one slot of a node stays spare, so that there is somewhere to fill
RULES = Rules(
    OnLoss.RECOVER, register=20.0, patience=5.0, silence=2.0, stall=30.0, restarts=1_000_000, longest=4.0
)
QUIET = 400.0  # seconds without a loss, in which all that is wanted must come about


def layer(rows):
    held = [expert for row in rows for expert in row]
    slots = tuple(tuple(row) + (FREE,) * (WIDTH - len(row)) for row in rows)
    share = tuple(tuple(0.0 if e == FREE else 1 / held.count(e) for e in row) for row in slots)
    return LayerPlacement(slots, share)


def placed(rng, nodes, holders):
    """Every expert on one of `holders`, some on two."""

    def rows():
        rows: list[list[int]] = [[] for _ in range(nodes)]
        for expert in rng.sample(range(EXPERTS), EXPERTS):
            rng.choice([rows[n] for n in holders if len(rows[n]) < WIDTH - 1]).append(expert)
        for n in holders:
            extra = rng.randrange(EXPERTS)
            if extra not in rows[n] and len(rows[n]) < WIDTH - 1 and rng.random() < 0.5:
                rows[n].append(extra)
        return rows

    return Placement(0, nodes, EXPERTS, tuple(layer(rows()) for _ in range(LAYERS)))


class Process:
    """One life of a node: what it holds, and what it will say when."""

    def __init__(self, node, connection):
        self.node, self.connection = node, connection
        self.member = None
        self.silent = False
        self.slots = None
        self.filling = set()
        self.held = {}
        self.routing = None
        self.peers = None
        self.met = False
        self.account = NodeAccount()
        self.away = False  # from its controller's end until the next one has let it in
        self.unheard = None  # what it has said on its new stream before that


class World:
    """With `balanced`, rows are routed and the real balancer says where experts stand."""

    def __init__(self, seed, rules=RULES, balanced=False):
        self.life, self.lives_left, self.served = 0, 0, False
        self.depth = 0
        self.zombies = []  # were given up while they were stopped, and do not know it
        self.rng = random.Random(seed)
        self.disk = random.Random(seed + 1)
        self.unreadable = 0.0  # the part of experts that cannot be read just now
        counts = {Role.ATTENTION: self.rng.randint(1, 3), Role.EXPERT: self.rng.randint(2, 4)}
        start = placed(self.rng, counts[Role.EXPERT], range(counts[Role.EXPERT]))
        deployment = Deployment(ModelSource("/m", "m"), EngineConfig(64, 9), counts, "f", start)
        self.membership = Membership(deployment, "1.0", rules)
        self.balanced = self.rows_come = balanced
        self.thoughts = 0
        self.balancing = self.balancer()
        self.now, self.connections = 0.0, 0
        self.later = []  # (at, what to do)
        self.processes = {}  # connection -> Process
        self.generation = {}  # newest life of each node
        self.said = []  # the last things said, to be said again
        self.ended = None
        self.settled = self.drained = 0

    def balancer(self):
        """As a controller has it; where nothing is balanced, nobody asks it."""
        rules = BalanceRules(act=True, every=5.0)
        found = Balancing("m", self.membership.migration, rules, self.membership.state.holders)
        found._rebalancer._throttle = unthrottled
        return found

    def balance(self):
        """As the controller does at each look at the time, while its run is ready."""
        rows = self.rng.choices((0, 5, 300), k=LAYERS * EXPERTS)
        counts = np.array(rows, np.int64).reshape(LAYERS, EXPERTS)
        self.balancing.count_rows(RoutedRows(np.zeros_like(counts), counts), self.now)
        assert len(self.balancing.imbalance()) == LAYERS
        stats = self.balancing.age(self.now) if self.membership.settled else None
        if stats is not None:
            self.thoughts += 1
            place = self.balancing.decided(self.balancing.think(stats, self.now))
            if place is not None:
                self.on(place)

    # ---- what the membership wants done

    def on(self, event):
        try:
            effects = self.membership.on(event, self.now)
        except ConfigError:
            assert isinstance(event, Place | Scale | DrainNode | RestartNodes | ChangeRole), event
            return
        life, dies_after = self.life, None
        if self.lives_left and self.served and self.rng.random() < 0.01:
            dies_after = self.rng.randint(0, len(effects))
        self.depth += 1
        for number, effect in enumerate(effects):
            if number == dies_after or life != self.life:
                break
            assert self.ended is None, f"{effect} after the end"
            self.obey(effect)
        if dies_after is not None and life == self.life:
            self.controller_dies()
        self.depth -= 1
        if not self.depth:
            self.deliver()

    def deliver(self):
        """What came on a stream before it was let in."""
        for process in [p for p in self.processes.values() if p.unheard is not None and not p.away]:
            unheard, process.unheard = process.unheard or (), None
            for value in unheard:
                self.on(Said(process.member, value))

    def controller_dies(self):
        """The next one is told what is wanted, and that everyone served once."""
        self.life, self.lives_left = self.life + 1, self.lives_left - 1
        self.membership = Membership(self.membership.deployment, "1.0", RULES, life=self.life)
        self.balancing = self.balancer()
        self.settled = 0
        self.said.clear()
        for process in list(self.processes.values()):
            if process.member is None or not process.account.grace:
                self.processes.pop(process.connection)
            else:
                self.rejoins(process)
        for zombie in self.zombies:
            self.connections += 1
            zombie.connection = self.connections
            self.processes[zombie.connection] = zombie
            self.rejoins(zombie)
        self.zombies.clear()
        self.on(TakenOver())

    def rejoins(self, process):
        process.away, process.unheard, life = True, None, self.life
        self.soon(lambda: self.rejoin(process, life), 5.0 if self.rng.random() < 0.1 else 1.5)

    def rejoin(self, process, life):
        there = self.processes.get(process.connection) is process
        if self.life != life or not there:
            return
        if process.silent:
            self.soon(lambda: self.rejoin(process, life), 1.0)
            return
        del self.processes[process.connection]
        self.connections += 1
        process.connection = self.connections
        self.processes[process.connection] = process
        process.unheard = []
        self.on(Rejoined(process.connection, process.account.register()))

    def obey(self, effect):
        match effect:
            case Start(node):
                self.soon(lambda: self.join(node), 3.0)
            case Admit(connection, member, assigned):
                self.admitted(self.processes[connection], member, assigned)
            case Refuse(connection):
                del self.processes[connection]
            case Tell(member, value):
                assert member.generation == self.generation[member.node], (
                    f"{value} to an old life of {member}"
                )
                process = self.process(member)
                if process is not None:
                    self.told(process, value)
            case Dismiss(member):
                assert member.generation == self.generation[member.node]
                if (process := self.process(member)) is not None:
                    if process.silent and self.rng.random() < 0.5:
                        self.zombies.append(process)
                    self.gone(process)
            case Replan(holders, lost):
                life = self.life
                self.soon(lambda: self.replanned(holders, lost) if life == self.life else None, 2.0)
            case Incident():
                pass
            case Settled():
                self.settled, self.served = self.settled + 1, True
            case AllDrained():
                self.drained += 1
            case EndRun(error):
                self.ended = error

    def process(self, member):
        return next((p for p in self.processes.values() if p.member == member and not p.away), None)

    # ---- what nodes do

    def soon(self, act, seconds):
        self.later.append((self.now + self.rng.uniform(0.0, seconds), act))

    def join(self, node, index=True):
        self.connections += 1
        process = self.processes[self.connections] = Process(node, self.connections)
        register = Register(node.role, node.index if index else None, 1, "host", "1.0")
        process.account.said(register)
        self.on(Joined(process.connection, register))

    def admitted(self, process, member, assigned):
        process.away = False
        if assigned is None:
            assert process.member == member
            self.generation[member.node] = member.generation
            return
        assert member.generation > self.generation.get(member.node, -1)
        process.account.told(assigned)
        self.generation[member.node] = member.generation
        process.member, process.node = member, member.node
        placement = process.routing = assigned.deployment.placement
        process.slots = SlotUse(member.node.index, placement)
        if member.node.role is Role.EXPERT and member.node.index < placement.nodes:
            process.held = {(y, slot): expert for y, slot, expert in placement.held(member.node.index)}
        address = "a" if member.node.role is Role.EXPERT else ""
        self.soon(lambda: self.listening(process, address), 1.0)
        self.soon(lambda: self.say(process, Progress(0.5, "weights")), 1.0)

    def listening(self, process, address):
        if process.silent:
            self.soon(lambda: self.listening(process, address), 1.0)
            return
        self.say(process, Endpoint(address, {}))
        if process.node.role is Role.EXPERT:
            self.soon(lambda: self.say(process, Ready(1)), 3.0)

    def say(self, process, value):
        if process.connection not in self.processes:
            return
        if process.silent:  # a stopped process: it says so when it goes on
            if not isinstance(value, Heartbeat):
                self.soon(lambda: self.say(process, value), 1.0)
        else:
            process.account.said(value)
            if process.unheard is not None:
                process.unheard.append(value)
            elif not process.away:
                self.said = [*self.said[-20:], Said(process.member, value)]
                self.on(self.said[-1])

    def told(self, process, value):
        process.account.told(value)
        match value:
            case Peers(experts):
                process.peers = {peer.life.index: peer.life.generation for peer in experts}
                if not process.met:
                    process.met = True
                    self.soon(lambda: self.say(process, Ready(1)), 3.0)
            case FillSlots(placement):
                process.filling.add(placement.epoch)
                self.soon(lambda: self.filled(process, placement), 3.0)
            case Adopt(placement):
                self.soon(lambda: self.adopted(process, placement), 1.0)
            case Drain():
                self.soon(lambda: self.say(process, NodeDrained()), 2.0)
            case Shutdown():
                self.soon(lambda: self.gone(process), 1.0)
            case Retire(epoch):
                process.filling.discard(epoch)
                process.slots.retire(epoch)

    def filled(self, process, placement):
        if process.silent:
            self.soon(lambda: self.filled(process, placement), 1.0)
            return
        if placement.epoch not in process.filling:
            return
        process.filling.discard(placement.epoch)
        fills = process.slots.fills(placement)
        unread = [replace(fill, replaced=FREE) for fill in fills if self.disk.random() < self.unreadable]
        process.slots.forget(unread)
        if unread:
            process.slots.retire(placement.epoch)
        for fill in fills:
            process.held[fill.layer, fill.slot] = fill.expert
        for fill in unread:
            process.held[fill.layer, fill.slot] = "garbage"
        experts = tuple((fill.layer, fill.expert) for fill in unread)
        self.say(process, Unfilled(placement.epoch, experts, "EIO") if unread else Filled(placement.epoch))

    def adopted(self, process, placement):
        if process.silent:
            self.soon(lambda: self.adopted(process, placement), 1.0)
            return
        if process.connection not in self.processes:
            return
        process.routing = placement
        self.say(process, Adopted(placement.epoch))

    def gone(self, process, *, exit_seen=True):
        if self.processes.pop(process.connection, None) is None:
            return
        if process.member is None:
            self.on(Withdrawn(process.connection))
            return
        if process.away:
            self.on(Withdrawn(process.connection))
            return
        events = [Left(process.member, "its stream broke")] + [Exited(process.node, "killed")] * exit_seen
        for event in self.rng.sample(events, len(events)):
            self.on(event)

    def replanned(self, holders, lost):
        if self.balanced:
            balancing, now = self.balancing, self.now
            with contextlib.suppress(ConfigError):  # there is no room
                place = (
                    balancing.plan_without(lost, holders, now) if lost else balancing.plan_over(holders, now)
                )
                if place is not None:
                    self.on(place)
            return
        nodes = max(max(holders) + 1, self.membership.migration.placement.nodes)
        if (WIDTH - 1) * len(holders) >= EXPERTS:
            self.on(Place(placed(self.rng, nodes, sorted(holders)), holders))

    # ---- what happens to them

    def mishap(self):
        rng, processes = self.rng, list(self.processes.values())
        some = rng.choice(processes) if processes else None
        choice = rng.random()
        if choice < 0.25 and some:
            self.gone(some, exit_seen=rng.random() < 0.5)
        elif choice < 0.4 and some:
            some.silent = not some.silent
        elif choice < 0.5 and some and some.member:
            its_own = ConfigError("y") if self.membership.settled else ModelError("y")
            self.say(some, Failed(rng.choice([PeerLost(NodeId(Role.EXPERT, 0), "x"), its_own])))
        elif choice < 0.6 and self.said:
            self.on(rng.choice(self.said))
        elif choice < 0.7:
            role = rng.choice(list(Role))
            self.join(NodeId(role, rng.randrange(5)), index=role is not Role.GATEWAY and rng.random() < 0.5)
        elif choice < 0.8:
            node = NodeId(rng.choice(list(MODEL_ROLES)), rng.randrange(5))
            other = rng.choice([ChangeRole(node, role) for role in MODEL_ROLES])
            self.on(
                rng.choice([DrainNode(node), RestartNodes((node,)), RestartNodes(self.renewable()), other])
            )
        elif choice < 0.87:
            role = rng.choice(list(MODEL_ROLES))
            self.on(Scale(role, rng.randint(2, 5) if role is Role.EXPERT else rng.randint(1, 4)))
        elif choice < 0.9 and (
            fronts := [p for p in processes if p.node.role is Role.ATTENTION and p.member]
        ):
            peers = rng.choice(fronts).peers or {0: 0}
            index = rng.choice([*peers, 0])
            said = Stuck(
                expert_life(index, peers.get(index, 0) + rng.choice((0, 0, 1))), rng.uniform(0.0, 20.0)
            )
            self.say(rng.choice(fronts), said)
        else:
            holders = sorted(n.index for n in self.membership.members.places(Role.EXPERT))
            nodes = max(max(holders) + 1, self.membership.migration.placement.nodes)
            self.on(Place(placed(rng, nodes, holders)))

    def renewable(self):
        """Everyone who stays, whether it is there or not."""
        members = self.membership.members
        places = [node for role in MODEL_ROLES for node in members.places(role)]
        return tuple(n for n in places if self.rng.random() < 0.9)

    def pass_time(self):
        self.now += self.rng.uniform(0.01, 0.7)
        due = [entry for entry in self.later if entry[0] <= self.now]
        self.later = [entry for entry in self.later if entry[0] > self.now]
        for _, act in sorted(due, key=lambda entry: entry[0]):
            act()
        for process in list(self.processes.values()):
            if process.member is not None and not process.away:
                stats = AttentionStats() if process.node.role is Role.ATTENTION else ExpertStats()
                self.say(process, Heartbeat(1, stats))
        self.on(Ticked())
        if self.rng.random() < 0.1:
            self.on(Ticked())
        if self.rows_come:
            self.balance()
        self.check_routing()

    def check_routing(self):
        """Whoever serves routes only to experts that are there."""
        serving = [p for p in self.processes.values() if p.member and not p.away and self.serves(p.member)]
        experts = {p.node.index: p for p in serving if p.node.role is Role.EXPERT}
        fronts = [p for p in serving if p.node.role is Role.ATTENTION]
        for front in fronts if self.membership.settled and self.ended is None else ():
            there = {index: p.member.generation for index, p in experts.items()}
            assert front.peers == there, f"{front.node} sends to {front.peers}, there are {there}"
        for placement in {id(p.routing): p.routing for p in fronts}.values():
            for index, expert_node in experts.items():
                held = placement.held(index) if index < placement.nodes else ()
                for y, slot, expert in held:
                    assert expert_node.held.get((y, slot)) == expert, "routed to an expert that is not there"

    def serves(self, member):
        found = self.membership.members.find_life(member)
        return found is not None and found.serving

    def reached(self):
        """All that is wanted is there, ready, and holds what it should; nothing is under way."""
        membership = self.membership
        placement, members = membership.migration.placement, membership.members
        for role in MODEL_ROLES:
            if len(members.places(role)) != membership.deployment.count(role):
                return f"{role}: {members.places(role)}"
        if membership.state.renewals.planned:
            return f"{membership.state.renewals}"
        if not members.all_ready() or not membership.migration.steady:
            return f"{members.unready()}, {membership.migration.phase}"
        holders = {n for n in range(placement.nodes) if any(True for _ in placement.held(n))}
        present = {n.index for n in members.places(Role.EXPERT)}
        if not holders <= present:
            return f"experts on {holders}, nodes {present}"
        for process in self.processes.values():
            if process.member is None or members.find_life(process.member) is None:
                continue
            if process.node.role is Role.ATTENTION and process.routing.epoch != placement.epoch:
                return f"{process.node} routes by epoch {process.routing.epoch}, not {placement.epoch}"
            if process.node.role is Role.EXPERT and process.node.index < placement.nodes:
                for y, slot, expert in placement.held(process.node.index):
                    if process.held.get((y, slot)) != expert:
                        return f"{process.node} lacks expert {expert} of layer {y}"
        return None


def run(seed, controllers=1, balanced=False, unreadable=()):
    world = World(seed, balanced=balanced)
    world.lives_left = controllers - 1
    world.on(Begun())
    for _ in range(world.rng.randrange(30, 150)):
        world.pass_time()
        if world.rng.random() < 0.3:
            world.mishap()
        if unreadable and world.disk.random() < 0.2:
            world.unreadable = world.disk.choice(unreadable)
    world.lives_left, world.rows_come, world.unreadable = 0, False, 0.0
    for process in world.processes.values():
        process.silent = False
    since = world.now
    while (why := world.reached()) is not None and world.now < since + QUIET:
        world.pass_time()
    assert world.ended is None, f"seed {seed}: {world.ended}"
    assert why is None, f"seed {seed}: still not after {QUIET:.0f} s: {why}"
    assert world.settled == 1
    world.on(DrainAll())
    for _ in range(30):
        world.pass_time()
    assert world.drained == 1, f"seed {seed}"
    return world


def blocks(by_day, all_, size):
    """First seeds of blocks of schedules: the first `by_day` of them, the others by night."""
    first = range(0, all_ * size, size)
    return [*first[:by_day], *(pytest.param(seed, marks=pytest.mark.long) for seed in first[by_day:])]


@pytest.mark.parametrize("first", blocks(1, 8, 25))
@pytest.mark.slow
def test_what_is_wanted_is_reached_when_losses_stop(first):
    for seed in range(first, first + 25):
        run(seed)


@pytest.mark.parametrize("first", blocks(1, 6, 25))
@pytest.mark.slow
def test_what_is_wanted_is_reached_when_controllers_are_lost_too(first):
    for seed in range(first, first + 25):
        run(seed, controllers=4)


@pytest.mark.parametrize("first", blocks(1, 2, 16))
@pytest.mark.slow
def test_what_is_wanted_is_reached_with_a_balancer_while_nodes_and_controllers_come_and_go(first):
    worlds = [run(seed, controllers=4, balanced=True) for seed in range(first, first + 16)]
    assert sum(world.thoughts for world in worlds) > 50 and sum(world.life for world in worlds) > 3


@pytest.mark.parametrize("first", blocks(1, 4, 25))
@pytest.mark.slow
def test_what_is_wanted_is_reached_when_files_can_be_read_again(first):
    for seed in range(first, first + 25):
        run(seed, controllers=1 + seed % 2, unreadable=(0.0, 0.3, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "controllers"), [(9857, 2)])
def test_what_is_wanted_is_reached_by_a_seed_that_failed(seed, controllers):
    """9857: whoever was stopped while it was told to drain comes back to the next controller, its answer lost."""
    run(seed, controllers)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_is_wanted_is_reached_in_ten_thousand_schedules():
    for seed in range(500, 10_500):
        run(seed, controllers=1 + seed % 4)


@pytest.mark.parametrize("seed", range(40))
def test_by_todays_rule_the_first_loss_ends_the_run_once(seed):
    world = World(seed, Rules(OnLoss.END, register=20.0, patience=5.0, report=1.0))
    world.on(Begun())
    while not world.settled:
        world.pass_time()
    lost = world.rng.choice(list(world.processes.values()))
    lost.silent = world.rng.random() < 0.5
    if not lost.silent:
        world.gone(lost, exit_seen=world.rng.random() < 0.5)
    until = world.now + 10.0
    while world.now < until:
        world.pass_time()
    assert isinstance(world.ended, PeerLost) and world.ended.peer == lost.node
