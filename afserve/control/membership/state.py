"""The membership of one model as one pure machine: `on(event, now) -> effects`.

What happened comes in, what is to be done goes out; it opens nothing, waits for nothing and reads no clock. A loss,
another number of nodes and another placement are all the same few effects. Whatever an earlier life of a node still
says is dropped here.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from afserve.control.membership.coverage import Coverage
from afserve.control.membership.desired import Deployment
from afserve.control.membership.events import (
    Admit,
    AllDrained,
    Begun,
    Broken,
    Cause,
    Dismiss,
    DrainAll,
    DrainNode,
    Effect,
    EndRun,
    Event,
    Exited,
    Happening,
    Incident,
    Joined,
    Known,
    Left,
    MemberId,
    Place,
    Refuse,
    Rejoined,
    Renew,
    Replan,
    Said,
    Scale,
    Settled,
    Start,
    TakenOver,
    Tell,
    Ticked,
    Withdrawn,
)
from afserve.control.membership.members import NO_EPOCH, Member, Members, State
from afserve.control.membership.migration import Migration, Outgoing, Phase, asks, holders
from afserve.control.membership.recovery import Recovery, Rules
from afserve.control.membership.scaling import Renewals, Step, check_count
from afserve.control.membership.shortage import Patience, Shortage
from afserve.control.membership.slowness import Slowness
from afserve.control.membership.takeover import REJOIN_SECONDS, Claim, Inherited, Takeover, inherit
from afserve.control.wire.values import (
    Adopted,
    Assigned,
    AttentionNodes,
    Drain,
    Endpoint,
    Failed,
    Filled,
    FromNode,
    Heartbeat,
    Identity,
    Progress,
    Ready,
    Register,
    Retire,
    Shutdown,
    Standing,
    Stuck,
)
from afserve.control.wire.values import Drained as NodeDrained
from afserve.engine.stats import ExpertStats
from afserve.errors import (
    AfserveError,
    ConfigError,
    DeadlineError,
    PeerError,
    PeerLost,
    ProtocolError,
    RendezvousError,
)
from afserve.member import MODEL_ROLES, NodeId, Role, expert_node

_SUCCEEDED = RendezvousError("another stream of this node has taken the place of this one")
_LIVES = 256  # of one node under one controller: more are not started
Assign = Callable[[Deployment, NodeId], Deployment]  # what one node is to run, such as on its own device


def first_generation(life: int) -> int:
    """Of nodes that are new under this controller of the run."""
    return life * _LIVES


def same_everywhere(deployment: Deployment, node: NodeId) -> Deployment:
    return deployment


class Membership:
    """`deployment` is what is wanted now, its placement the one in force. `assign` may make it a node's own.

    `spare` slots of every expert node stay empty in whatever placement is thought out.
    """

    def __init__(
        self,
        deployment: Deployment,
        version: str,
        rules: Rules | None = None,
        assign: Assign = same_everywhere,
        spare: int = 0,
        life: int = 0,
    ) -> None:
        """`life` counts the controllers of a run: what a later one gives out is never taken for an earlier one's."""
        self.deployment = deployment
        self.members = Members(deployment.nodes, version, deployment.colocated, first_generation(life))
        self.migration = Migration(deployment.placement, self._serving)
        self.settled = False
        self.ended = False
        self._takeover: Takeover | None = None  # while those who were there before come back
        self._fresh: list[Joined] = []  # who came meanwhile without having been there
        self._recovery = Recovery(rules or Rules())
        self._assign = assign
        self._room = deployment.placement.slots_per_node() - spare
        patience = Patience(self._recovery.rules.short, self._recovery.rules.deadline)
        self._shortage = Shortage(patience, self._room)
        self._slowness = Slowness()
        self.renewals = Renewals()
        self._coverage = Coverage()
        self._since: dict[NodeId, float] = {}  # when a place became empty
        self._waiting: list[tuple[Joined, NodeId]] = []  # expert nodes that came while attention nodes adopt
        self._leaving: set[NodeId] = set()
        self._guests: set[NodeId] = (
            set()
        )  # gateways that came by themselves, beyond those that were asked for
        self._asked: frozenset[int] | None = None  # expert nodes that a placement is being thought out for
        self._seen: frozenset[int] | None = (
            None  # those that the placement in force or under way was thought out for
        )
        self._first = frozenset(range(deployment.count(Role.EXPERT)))
        self._lost_at: dict[NodeId, float] = {}  # of places whose member was lost while it served
        self._draining = self._drained = False
        self._restarted = False  # whether somebody was lost before the run had settled

    # ---- the one way in

    def on(self, event: Event, now: float) -> list[Effect]:
        """What is to be done now. Raises ConfigError, and changes nothing, for what was asked and cannot be."""
        if self.ended:
            return []
        try:
            effects = self._obey(event, now)
        except RendezvousError as error:
            effects = self._disagreed(event, error, now)
        if not self.ended and self._takeover is None:
            effects += self._reconcile(now)
        if self.settled and self._recovery.rules.recovers and not self._draining:
            planned, given_up = self.renewals.busy, self._recovery.given_up
            self._shortage.look(self.members, self.migration.placement, given_up, now, planned=planned)
        return self._until_end(effects)

    def _obey(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Begun():
                self._since = dict.fromkeys(self.members.missing(), now)
                return [Start(node) for node in self.members.missing()]
            case TakenOver():
                self._takeover = Takeover(now)
                return []
            case Rejoined():
                return self._rejoined(event, now)
            case Joined() if self._takeover is not None:
                self._fresh.append(event)
                return []
            case Joined():
                return self._joined(event, now)
            case Withdrawn(connection):
                self._waiting = [(j, node) for j, node in self._waiting if j.connection != connection]
                self._fresh = [joined for joined in self._fresh if joined.connection != connection]
                if self._takeover is not None:
                    self._takeover.withdraw(connection)
                return []
            case Said(member, value):
                found = self.members.get(member)
                return [] if found is None else self._said(found, value, now)
            case Left(member, reason):
                found = self.members.get(member)
                return [] if found is None else self._gone(found, reason, now)
            case Exited(node, _):
                return self._exited(event, node, now)
            case Ticked() if self._takeover is not None:
                over = now - self._takeover.began >= REJOIN_SECONDS
                return self._take_over(self._takeover, now) if over else []
            case Ticked():
                return self._ticked(now)
            case Scale() | DrainNode() | Renew() | Place() if self._takeover is not None:
                raise ConfigError("the controller was started again and still looks who is there; try again")
            case Scale(role, count):
                return self._scaled(role, count, now)
            case DrainNode(node):
                return self._drained_one(node)
            case Renew(nodes):
                return self._renewed(nodes)
            case Broken(node):
                self._recovery.pardon(node)
                return []
            case Place():
                return self._placed(event, now)
            case Known(things):
                self.members.expect(things)
                for known in self.members:
                    if known.state is not State.LOADING:
                        self.members.check_identified(known)
                return []
            case DrainAll():
                self._draining = True
                return [e for m in self.members if m.node.role is not Role.EXPERT for e in self._drain(m)]

    def _disagreed(self, event: Event, error: RendezvousError, now: float) -> list[Effect]:
        """A member of another run is sent away, and told why. Whether the run goes on is the rules' business."""
        found = self.members.get(event.member) if isinstance(event, Said) else None
        if found is None:
            return [EndRun(error)]
        ends = not self._recovery.rules.recovers or not self.settled
        if ends and found.node not in self._guests:
            return [Dismiss(found.id, error), EndRun(error)]
        return self._give_up(found, error, now)

    # ---- coming

    def _joined(self, event: Joined, now: float) -> list[Effect]:
        try:
            node = self.members.check(event.register, taken=[node for _, node in self._waiting])
        except RendezvousError as error:
            return [Refuse(event.connection, error)]
        if node.role is Role.EXPERT and self.migration.adopting:
            # Some attention nodes route by the next placement already, some do not: it starts with the next one.
            self._waiting.append((event, node))
            return []
        return self._admit(event, node, now)

    def _admit(self, event: Joined, node: NodeId, now: float) -> list[Effect]:
        member = self.members.admit(node, event.register, now)
        if node not in self.deployment.nodes and node.role is Role.GATEWAY:
            self._guests.add(node)
        member.epoch = member.asked = self.migration.placement.epoch
        self._since.pop(node, None)
        self._recovery.forget(node)
        deployment = replace(self.deployment, placement=self.migration.placement)
        assigned = Assigned(node, member.id.generation, self._assign(deployment, node))
        return [Admit(event.connection, member.id, assigned)]

    # ---- coming back, to another controller

    def _rejoined(self, event: Rejoined, now: float) -> list[Effect]:
        register, standing = event.register, event.register.standing
        assert standing is not None, "it says what it is"
        try:
            role = self.members.check_kind(register)
            if register.index is None:
                raise RendezvousError(f"index: a {role} node that was here before knows its own")
            claim = Claim(event.connection, NodeId(role, register.index), register, standing)
            self.members.seen(claim.node, standing.generation)
            if self._takeover is None:
                raise RendezvousError(f"{claim.node} was given up meanwhile; start it anew")
        except RendezvousError as error:
            return [Refuse(event.connection, error)]
        other = self._takeover.claim(claim)
        effects: list[Effect] = [] if other is None else [Refuse(other.connection, _SUCCEEDED)]
        if self._takeover.complete(self.deployment.counts):
            effects += self._take_over(self._takeover, now)
        return effects

    def _take_over(self, takeover: Takeover, now: float) -> list[Effect]:
        """All are back, or those who are not are lost."""
        self._takeover, fresh, self._fresh = None, self._fresh, []
        self.settled = self._restarted = True
        inherited = inherit(takeover, self.deployment.placement)
        effects, admitted = self._readmit(takeover, inherited, now)
        following = inherited.following
        given_up = [
            (m.node, epoch) for m, standing in admitted for epoch in inherited.given_up(m.node.role, standing)
        ]
        fronts = [m for m, _ in admitted if m.node.role is Role.ATTENTION and m.serving]
        missing = [m.node for m in fronts if following is not None and m.epoch != following.epoch]
        self.migration.resume(inherited.placement, following, missing, given_up, inherited.newest, now)
        self._choose_places(inherited)
        self._seen = frozenset(node.index for node in self.members.places(Role.EXPERT))
        for member, standing in admitted:
            effects += self._resumed(member, standing, inherited, now)
        effects += [Settled(), *self._announce(self.members.of(Role.ATTENTION)), *self._announce_gateways()]
        for node in self.members.missing():
            if node not in self._leaving:
                effects += self._missed(node, now)
        for joined in fresh:
            effects += self._joined(joined, now)
        if self._draining:
            effects += [e for m in self.members if m.node.role is not Role.EXPERT for e in self._drain(m)]
        return effects

    def _readmit(
        self, takeover: Takeover, inherited: Inherited, now: float
    ) -> tuple[list[Effect], list[tuple[Member, Standing]]]:
        effects: list[Effect] = []
        admitted = []
        for node, claim in sorted(takeover.claims.items()):
            try:
                inherited.check(claim)
                member = self.members.readmit(node, claim.register, claim.standing, now)
            except RendezvousError as error:
                effects.append(Refuse(claim.connection, error))
                continue
            if node.role is Role.GATEWAY and node not in self.deployment.nodes:
                self._guests.add(node)
            member.state, member.epoch, member.asked = inherited.state(node.role, claim.standing)
            admitted.append((member, claim.standing))
            effects.append(Admit(claim.connection, member.id, None))
        return effects, admitted

    def _choose_places(self, inherited: Inherited) -> None:
        """Of those who are there, and those that experts are placed on, as many stay as are wanted."""
        for role in Role:
            wanted = self.deployment.count(role)
            here = [member for member in self.members.of(role) if member.node not in self._guests]
            staying = [member.node for member in here if member.state in (State.LOADING, State.READY)]
            if role is Role.EXPERT and not self.deployment.colocated:
                needed = {node for placement in inherited.placements for node in holders(placement)}
                staying += sorted(needed.difference(member.node for member in here))
            for node in staying:
                self.members.keep(node)
            going = [member.node for member in here if member.node not in staying]
            if going and len(staying) < wanted and self.renewals.node is None:
                staying.append(going[0])  # it was to have a new process
                self.renewals.begin(going[0])
            self._leaving.update(node for node in going if node not in staying)
            empty = [
                node
                for node in self.members.places(role)
                if node not in staying and node not in self._leaving and node not in self._guests
            ]
            self._leaving.update(staying[wanted:])
            for node in empty[max(0, wanted - len(staying)) :]:
                self.members.remove(node)
            for _ in range(wanted - len(staying) - len(empty)):
                self.members.add(role)

    def _resumed(self, member: Member, standing: Standing, inherited: Inherited, now: float) -> list[Effect]:
        """What a member that is back is told beside what all are."""
        effects: list[Effect] = [
            Tell(member.id, Retire(epoch)) for epoch in inherited.obsolete(member.node.role, standing)
        ]
        if not member.serving:
            return effects + (self._catch_up(member, now) if member.loaded else [])
        self._recovery.serves(member.node, now)
        following = inherited.following
        if member.node.role is not Role.ATTENTION or following is None:
            return effects
        knows = following.epoch in (member.epoch, member.asked)
        return effects if knows else [*effects, Tell(member.id, asks(Phase.ADOPTING, following))]

    # ---- what nodes say

    def _said(self, member: Member, value: FromNode, now: float) -> list[Effect]:
        member.seen_at = now
        match value:
            case Heartbeat(resident, stats):
                member.resident_bytes, member.stats = resident, stats
                return self._too_slow(member, now)
            case Progress():
                member.progress, member.progress_at = value, now
            case Endpoint():
                self.members.agree(member, value)
                return self._peers(member)
            case Identity(things):
                self.members.identify(member, things)
            case Ready(resident):
                self.members.check_identified(member)
                member.resident_bytes, member.progress = resident, Progress(1.0, "ready")
                return self._catch_up(member, now) if member.state is State.LOADING else []
            case Filled(epoch):
                effects = self._answered(member, self.migration.filled, epoch, now)
                return [*effects, _reloaded(member, value)] if value.experts else effects
            case Adopted(epoch):
                return self._answered(member, self.migration.adopted, epoch, now)
            case NodeDrained():
                return self._has_drained(member)
            case Failed(error):
                return self._has_failed(member, error, now)
            case Stuck():
                return self._accused(member, value, now)
            case Register():
                return self._give_up(member, PeerLost(member.node, "it registered twice"), now)
        return []

    def _peers(self, member: Member) -> list[Effect]:
        """Attention nodes are told of all expert nodes' mailboxes, once they are known and whenever they change.

        So they are of gateways, when they are ready to serve and whenever these change.
        """
        if member.node.role is Role.GATEWAY:
            return self._announce_gateways()
        if member.node.role is Role.ATTENTION:
            return self._announce([member])
        return [] if self.settled else self._announce(self.members.of(Role.ATTENTION))

    def _announce(self, told: list[Member]) -> list[Effect]:
        peers = self.members.peers(settled=self.settled)
        if peers is None:
            return []
        return [
            Tell(attention.id, peers)
            for attention in told
            if attention.address is not None
            and (peers.experts or attention.serving or self.deployment.colocated)
        ]

    def _announce_gateways(self) -> list[Effect]:
        serving = [member for member in self.members.of(Role.ATTENTION) if member.serving]
        return [Tell(member.id, self.members.gateways()) for member in serving]

    def _catch_up(self, member: Member, now: float) -> list[Effect]:
        """It has loaded. It serves once it knows the placement in force, which may be another than when it began."""
        member.loaded = True
        in_force, is_expert = self.migration.placement, member.node.role is Role.EXPERT
        if is_expert and self.migration.adopting:
            return []  # some attention nodes route by the next placement already: it is asked once that is in force
        if member.epoch != in_force.epoch and member.node.role in MODEL_ROLES:
            if member.asked == in_force.epoch:
                return []
            # Nobody routes rows to it yet: what it began with may be overwritten.
            before = [Tell(member.id, Retire(member.asked))] if is_expert and member.asked != NO_EPOCH else []
            member.asked = in_force.epoch
            phase = Phase.FILLING if is_expert else Phase.ADOPTING
            return [*before, Tell(member.id, asks(phase, in_force))]
        if self._draining and not is_expert:
            member.state = State.DRAINED
            return []
        return self._serves(member, now)

    def _serves(self, member: Member, now: float) -> list[Effect]:
        """From now on."""
        member.state = State.READY
        node = member.node
        self._recovery.serves(node, now)
        self.renewals.serves(node, now)
        effects = self._tell(self.migration.joined(node))
        if node.role is Role.ATTENTION:
            effects.append(Tell(member.id, self.members.gateways()))
        if self.settled:  # before, everyone is told when the run settles
            effects += self._announce(
                self.members.of(Role.ATTENTION) if node.role is Role.EXPERT else [member]
            )
        if (lost_at := self._lost_at.pop(node, None)) is not None:
            effects.append(Incident(Happening.RETURNED, node, f"pid {member.pid}", now - lost_at))
        return effects

    def _answered(
        self, member: Member, take: Callable[[NodeId, int, float], list[Outgoing]], epoch: int, now: float
    ) -> list[Effect]:
        """An answer that was not asked for comes from no correct node: it is as good as gone."""
        if member.state is State.LOADING and epoch == member.asked:
            member.epoch = epoch
            return self._catch_up(member, now)
        if self.migration.forget(member.node, epoch):
            return []
        try:
            effects = self._tell(take(member.node, epoch, now))
        except ProtocolError as error:
            return self._give_up(member, error, now)
        member.epoch = epoch
        return effects

    def _has_drained(self, member: Member) -> list[Effect]:
        if member.state is State.DRAINING:
            member.state = State.DRAINED
        return []

    def _has_failed(self, member: Member, error: AfserveError, now: float) -> list[Effect]:
        if isinstance(error, PeerError):
            if member.node not in self._guests:
                self._recovery.accused(member.node, error.message, now)
            return []
        why = self._recovery.failed(member.node, error)
        if not self.settled and not isinstance(why, PeerLost):
            return [EndRun(why)]  # the user's to mend: a new process would fail in the same way
        return self._give_up(member, why, now, Cause.FAILED)

    def _accused(self, asker: Member, said: Stuck, now: float) -> list[Effect]:
        """A peer waits for an expert node. Of an earlier life of that one, it will hear that it is gone."""
        found = self.members.get(MemberId(expert_node(said.expert), said.generation))
        if found is None or not found.serving:
            return []
        why = self._recovery.unproductive(found, said, asker.node, now)
        silent = now - found.seen_at >= self._recovery.rules.silence
        cause = Cause.SILENT if silent else Cause.SLOW
        return self._give_up(found, PeerLost(found.node, why), now, cause) if why else []

    def _too_slow(self, member: Member, now: float) -> list[Effect]:
        """An expert node that has become much slower is left where the others can do its work."""
        if not isinstance(member.stats, ExpertStats) or not member.serving:
            return []
        why = self._slowness.heard(member.node, member.host, member.id.generation, member.stats, now)
        if (
            not why
            or not self._recovery.rules.recovers
            or not self.settled
            or not self.can_spare(member.node)
        ):
            return []
        return self._give_up(member, PeerLost(member.node, why), now)

    # ---- going

    def _gone(self, member: Member, reason: str, now: float, cause: Cause = Cause.ENDED) -> list[Effect]:
        served, member.state, member.why = member.serving, State.GONE, reason
        node = member.node
        self._since[node] = now
        self._asked = None
        effects = self._tell(self.migration.lost(node, now))
        if node.role is Role.GATEWAY:
            effects += self._announce_gateways()
        if node.role is Role.EXPERT and self.settled:
            effects += self._announce(self.members.of(Role.ATTENTION))
        if node in self._guests:
            self._guests.discard(node)
            self.members.remove(node)
            return effects
        if node in self._leaving or self.renewals.gone(node, now):
            return effects
        self._restarted = True
        if served and self.settled:
            self._lost_at.setdefault(node, now)
            effects.append(self._loss(member, reason, now, cause))
        return effects + self._started_again(node, reason, now)

    def _loss(self, member: Member, reason: str, now: float, cause: Cause) -> Incident:
        """With what becomes of the work of whoever is gone, in words."""
        did, role = "", member.node.role
        if role is Role.EXPERT:
            did = self._coverage.lost(member.id, self.migration.placement, self._answering(), now)
        elif role is Role.ATTENTION:
            others = len(self._serving(Role.ATTENTION))
            did = "its requests go on at another one" if others else "its requests wait for another one"
        return Incident(
            Happening.LOST, member.node, reason, generation=member.id.generation, cause=cause, did=did
        )

    def _missed(self, node: NodeId, now: float) -> list[Effect]:
        """It was there under the controller before this one, as far as that is known."""
        why = "it did not come back to the new controller"
        self._since.setdefault(node, now)
        self._lost_at.setdefault(node, now)
        lost = Incident(Happening.LOST, node, why, cause=Cause.ENDED)
        return [lost, *self._started_again(node, why, now)]

    def _started_again(self, node: NodeId, reason: str, now: float) -> list[Effect]:
        return self._recovery.lost(node, reason, now, settled=self.settled)

    def _exited(self, event: Exited, node: NodeId, now: float) -> list[Effect]:
        """The process of whoever was to go has gone."""
        unwanted = node in self._leaving or node not in self.members.places(node.role)
        if unwanted or self.renewals.has_exited(node, now):
            return []
        return self._recovery.exited(event)

    def _give_up(
        self, member: Member, error: AfserveError, now: float, cause: Cause = Cause.REFUSED
    ) -> list[Effect]:
        """A member that is there, but of no use any more."""
        if not self._recovery.rules.recovers and member.node not in self._guests:
            return [EndRun(error)]
        reason = error.reason if isinstance(error, PeerLost) else error.message
        return [Dismiss(member.id, error), *self._gone(member, reason, now, cause)]

    def _ticked(self, now: float) -> list[Effect]:
        rules = self._recovery.rules
        effects = self._recovery.due(now) + self._check_places(now)
        for member in self.members:
            if why := self._recovery.silent(member, now):
                effects += self._give_up(member, PeerLost(member.node, why), now, Cause.SILENT)
            elif member.state is State.LOADING and now - member.progress_at > rules.stall:
                late = self._recovery.late(self.members.unready(), rules.stall)
                effects += self._give_up(member, late, now)
        return effects + self._check_migration(now)

    def _check_places(self, now: float) -> list[Effect]:
        """Nobody came for a place, although somebody was started for it."""
        rules, awaited = self._recovery.rules, [node for _, node in self._waiting]
        late = [
            node
            for node in self.members.missing()
            if node not in awaited and now - self._since.get(node, now) > rules.register
        ]
        if late and not rules.recovers:
            return [EndRun(self._recovery.late(self.members.unready(), rules.register))]
        self._since |= dict.fromkeys(late, now)
        return [e for node in late for e in self._started_again(node, "nobody came for its place", now)]

    def _check_migration(self, now: float) -> list[Effect]:
        try:
            self.migration.check(now)
        except DeadlineError as error:
            late = [
                m for node in self.migration.missing if (m := self.members.at(node)) is not None and m.alive
            ]
            return [e for member in late for e in self._give_up(member, error, now)]
        return []

    # ---- other numbers of nodes, other placements

    def check_count(self, role: Role, count: int) -> None:
        """Raises ConfigError where there cannot be so many nodes of a role now."""
        if self.renewals.busy:
            raise ConfigError("scale: nodes are being restarted; try again when all serve", param=role)
        check_count(self.deployment, role, count, room=self._room)
        places = [node for node in self.members.places(role) if node not in self._guests]
        leaving = [node for node in places if node in self._leaving]
        if (
            leaving
            and count > len(places) - len(leaving)
            and count + len(leaving) > self.deployment.most(role)
        ):
            raise ConfigError(
                f"scale: {', '.join(map(str, leaving))} still leaves, and its place is needed; try again",
                param=role,
            )

    def _scaled(self, role: Role, count: int, now: float) -> list[Effect]:
        self.check_count(role, count)
        self.deployment = self.deployment.scaled(role, count)
        staying = [node for node in self.staying() if node.role is role]
        self._leaving.update(staying[count:])
        effects: list[Effect] = []
        for _ in range(count - len(staying)):
            node = self.members.add(role)
            self._since[node] = now
            effects.append(Start(node))
        return effects

    def _drained_one(self, node: NodeId) -> list[Effect]:
        self._check_place(node)
        if node not in self._guests and node not in self._leaving:
            self.check_count(node.role, self.deployment.count(node.role) - 1)
            self.deployment = self.deployment.scaled(node.role, self.deployment.count(node.role) - 1)
        self._leaving.add(node)
        return []

    def _renewed(self, nodes: tuple[NodeId, ...]) -> list[Effect]:
        for node in nodes:
            self._check_place(node)
            if node in self._leaving or node in self._guests:
                why = (
                    "is leaving"
                    if node in self._leaving
                    else "was started by hand, and is started again there"
                )
                raise ConfigError(f"restart: {node} {why}", param="node")
            if node.role is Role.EXPERT and not self.can_spare(node) and not self._recovery.rules.recovers:
                raise ConfigError(
                    f"restart: the other expert nodes have no room for the experts of {node}, and without them the run "
                    "would end; add an expert node first",
                    param="node",
                )
        self.renewals.ask(nodes)
        return []

    def _check_place(self, node: NodeId) -> None:
        if self.members.at(node) is None and node not in self.members.missing():
            raise ConfigError(f"{node} is no node of this run", param="node")

    def staying(self) -> list[NodeId]:
        """The places that are to be filled, beside those of nodes that leave and of gateways that joined by hand."""
        places = [node for role in Role for node in self.members.places(role)]
        return [node for node in places if node not in self._leaving and node not in self._guests]

    def waits_for(self, node: NodeId) -> str:
        """What waits while this node has no process, in words; empty where nothing does."""
        if node.role is Role.EXPERT and not self.can_spare(node):
            return f"requests wait while {node} restarts: the other expert nodes have no room for its experts"
        if node.role is Role.ATTENTION and len(self.members.places(Role.ATTENTION)) == 1:
            return f"requests wait while {node} restarts: there is no other attention node"
        return ""

    def can_spare(self, node: NodeId) -> bool:
        """Whether the expert nodes beside this one have room for all experts."""
        others = self._serving_experts() - {node.index}
        return len(others) * self._room >= self.migration.placement.experts

    def _placed(self, event: Place, now: float) -> list[Effect]:
        """Raises ConfigError for a placement that cannot be reached from the one in force."""
        if event.nodes is not None:
            self._asked = None
            if event.nodes != self._holders() or not self.migration.steady:
                return []  # who can hold experts has changed since it was thought out
        elif self._away():
            raise ConfigError(
                "the placement cannot change while an expert node is away; try again", param="placement"
            )
        elif strangers := [node for node in holders(event.placement) if node.index not in self._holders()]:
            names = ", ".join(map(str, sorted(strangers)))
            raise ConfigError(f"the placement puts experts on {names}, not serving now", param="placement")
        effects = self._tell(self.migration.begin(event.placement, now, event.route, urgent=event.urgent))
        self._seen = self._holders()
        return effects

    def _away(self) -> bool:
        """Whether an expert node that holds experts does not serve: what it holds must not change then."""
        serving = {m.node for m in self.members.of(Role.EXPERT) if m.serving}
        return any(
            self.migration.holds(node) and node not in serving for node in self.members.places(Role.EXPERT)
        )

    def _reconcile(self, now: float) -> list[Effect]:
        """What the difference between what is wanted and what is there asks for, once the event has been obeyed."""
        effects: list[Effect] = []
        if not self.migration.adopting:
            for member in self.members.of(Role.EXPERT):
                if member.loaded and member.state is State.LOADING:
                    effects += self._catch_up(member, now)
            waiting, self._waiting = self._waiting, []
            for event, node in waiting:
                effects += self._admit(event, node, now)
        for node in sorted(self._leaving):
            effects += self._see_off(node, now)
        effects += self._renew(now)
        effects += self._replan()
        effects += self._coverage.check(self.migration.placement, self._answering(), now)
        busy = self._serving(Role.ATTENTION) or self._serving(Role.GATEWAY)
        if self._draining and not self._drained and not busy:
            self._drained = True
            effects.append(AllDrained())
        if not self.settled and self._all_ready():
            effects += self._settle()
        return effects

    def _all_ready(self) -> bool:
        waited_for = [member for member in self.members if member.node not in self._guests]
        return not self.members.missing() and all(member.state is State.READY for member in waited_for)

    def _settle(self) -> list[Effect]:
        """Somebody may have become ready before anybody said what its checkpoint is, or not be who was announced."""
        try:
            for member in self.members:
                self.members.check_identified(member)
        except RendezvousError as error:
            return [EndRun(error)]
        self.settled = True
        self._seen = self._first  # the run begins as it was asked for
        return [Settled(), *(self._announce(self.members.of(Role.ATTENTION)) if self._restarted else [])]

    def _see_off(self, node: NodeId, now: float) -> list[Effect]:
        """A leaving node goes when nothing needs it: no request of an attention node, no expert of an expert node."""
        member = self.members.at(node)
        alive = member is not None and member.alive
        if self.migration.holds(node):
            return []
        if member is not None and member.serving and node.role is not Role.EXPERT:
            return self._drain(member)
        self._leaving.discard(node)
        self.members.remove(node)
        self._recovery.forget(node)
        self._waiting = [(j, other) for j, other in self._waiting if other != node]
        effects: list[Effect] = [Tell(member.id, Shutdown())] if member is not None and alive else []
        effects += self._tell(self.migration.lost(node, now))
        if node.role is Role.GATEWAY:
            return effects + self._announce_gateways()
        return effects + (self._announce(self.members.of(Role.ATTENTION)) if node.role is Role.EXPERT else [])

    def _renew(self, now: float) -> list[Effect]:
        """One step further with the member that is to have a new process, or the next one's turn."""
        renewals = self.renewals
        if self._draining:
            renewals.clear()
        renewals.move_on(now)
        while renewals.node is None and renewals.waiting:
            member = self.members.at(renewals.waiting[0])
            if member is not None and member.alive and member.state is not State.READY:
                return []
            node = renewals.waiting.popleft()
            if member is not None and member.alive:  # else it gets a new process as it is
                renewals.begin(node)
        found = None if renewals.node is None else self.members.at(renewals.node)
        if found is None:
            return []
        if renewals.step is Step.LEAVING:
            return self._make_go(found, now)
        if renewals.step is Step.GOING and now >= renewals.until:
            stuck = PeerLost(found.node, "it did not go when it was told to")
            return [Dismiss(found.id, stuck), *self._gone(found, stuck.reason, now)]
        return list(renewals.due(now))

    def _make_go(self, member: Member, now: float) -> list[Effect]:
        """Once nothing needs it, or nothing can be done about that."""
        if member.node.role is Role.EXPERT:
            if self.migration.holds(member.node) and self.can_spare(member.node):
                return []
        elif member.serving:
            return self._drain(member)
        self.renewals.going(now)
        return [Tell(member.id, Shutdown())]

    def _replan(self) -> list[Effect]:
        """Ask for another placement when the expert nodes that are to hold experts are not those that do."""
        if self.deployment.colocated or not self.settled or not self.migration.steady:
            return []
        holders, placement = self._holders(), self.migration.placement
        held = {node.index for node in self.members.places(Role.EXPERT) if self.migration.holds(node)}
        if holders == self._asked or (held <= holders and holders in (held, self._seen)):
            return []
        if len(holders) * placement.slots_per_node() < placement.experts:
            return []  # rows for what nobody holds wait until somebody does
        self._asked = holders
        serving = {m.node.index for m in self.members.of(Role.EXPERT) if m.serving}
        return [Replan(holders, frozenset(held - serving))]

    def _holders(self) -> frozenset[int]:
        """Expert nodes that serve and stay."""
        serving = self._serving_experts()
        going = [n for n in map(expert_node, serving) if self.renewals.is_leaving(n) and self.can_spare(n)]
        return serving - {node.index for node in going}

    def _answering(self) -> frozenset[int]:
        """Expert nodes that rows are sent to."""
        return frozenset(node.index for node in self._serving(Role.EXPERT))

    def _serving_experts(self) -> frozenset[int]:
        """Also one that is about to have a new process."""
        return frozenset(
            m.node.index for m in self.members.of(Role.EXPERT) if m.serving and m.node not in self._leaving
        )

    # ---- words

    def attention_nodes(self) -> AttentionNodes:
        """For gateways: who attends, and why new requests are refused, where they are."""
        return self.members.attention_nodes(self._shortage.refusing)

    def absent(self) -> list[str]:
        """A phrase for every place whose member is gone."""
        gone = ((node, self.members.at(node)) for node in self.members.missing())
        said = {node: f"{node} is gone: {member.why}" for node, member in gone if member is not None}
        unfilled = self._recovery.given_up
        return [f"{why}; not started again" if node in unfilled else why for node, why in said.items()]

    def _drain(self, member: Member) -> list[Effect]:
        """One that still loads has no request, and will not serve."""
        if member.state is not State.READY:
            return []
        member.state = State.DRAINING
        return [Tell(member.id, Drain())]

    def _tell(self, outgoing: Iterable[Outgoing]) -> list[Effect]:
        """To the present lives of nodes; who is gone will be told when it comes back."""
        found = ((self.members.at(node), value) for node, value in outgoing)
        return [Tell(member.id, value) for member, value in found if member is not None and member.alive]

    def _serving(self, role: Role) -> list[NodeId]:
        return [member.node for member in self.members.of(role) if member.serving]

    def _until_end(self, effects: list[Effect]) -> list[Effect]:
        """The first reason for an end counts, and nothing comes after it."""
        for number, effect in enumerate(effects):
            if isinstance(effect, EndRun):
                self.ended = True
                return effects[: number + 1]
        return effects


def _reloaded(member: Member, filled: Filled) -> Incident:
    rate = filled.bytes / max(filled.seconds, 1e-6) / 1e9
    what = (
        f"{filled.experts} experts for epoch {filled.epoch}, {filled.bytes / 1e6:,.1f} MB at {rate:.1f} GB/s"
    )
    return Incident(Happening.RELOADED, member.node, what, filled.seconds, bytes=filled.bytes)
