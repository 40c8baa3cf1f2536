"""The membership of one model as one pure machine: `on(event, now) -> effects`.

What happened comes in, what is to be done goes out; it opens nothing, waits for nothing and reads no clock. A loss,
another number of nodes and another placement are all the same few effects. Whatever an earlier life of a node still
says is dropped here.
"""

from collections.abc import Callable

from afserve.control.membership.events import (
    AllDrained,
    Begun,
    Broken,
    ChangePhase,
    ChangeRole,
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
    Place,
    Rejoined,
    RestartNodes,
    Said,
    Scale,
    Start,
    TakenOver,
    Ticked,
    Waited,
    Withdrawn,
)
from afserve.control.membership.migration import Outgoing
from afserve.control.membership.returning import Returning
from afserve.control.membership.roster import Member, State
from afserve.control.membership.takeover import Takeover
from afserve.control.wire.values import (
    Adopted,
    Endpoint,
    Failed,
    Filled,
    FromNode,
    Heartbeat,
    Identity,
    Progress,
    Ready,
    Register,
    Stuck,
    Unfilled,
    Unheard,
)
from afserve.control.wire.values import Drained as NodeDrained
from afserve.errors import (
    ConfigError,
    PeerLost,
    ProtocolError,
    RendezvousError,
)
from afserve.member import NodeId, Role


def _reloaded(member: Member, filled: Filled) -> Incident:
    rate = filled.bytes / max(filled.seconds, 1e-6) / 1e9
    what = (
        f"{filled.experts} experts for epoch {filled.epoch}, {filled.bytes / 1e6:,.1f} MB at {rate:.1f} GB/s"
    )
    return Incident(Happening.RELOADED, member.node, what, filled.seconds, bytes=filled.bytes)


class Membership(Returning):
    """The whole machine. Each layer below calls itself and those below it only."""

    def on(self, event: Event, now: float) -> list[Effect]:
        """What is to be done now. Raises ConfigError, and changes nothing, for what was asked and cannot be."""
        if self.ended:
            return []
        try:
            effects = self._obey(event, now)
        except RendezvousError as error:
            effects = self._disagreed(event, error, now)
        if not effects and isinstance(event, Said) and isinstance(event.value, Heartbeat):
            return []  # most events are these, and only stats have changed; ticks look at all the rest
        if not self.ended and self._takeover is None:
            effects += self._reconcile(now)
        if self.settled and self._recovery.rules.recovers and not self._draining:
            self._look_at_shortage(now)
        return self._until_end(effects)

    def _look_at_shortage(self, now: float) -> None:
        """An exception here refuses nobody anew."""
        failing = [node for node in self.members.missing() if self._recovery.is_failing(node)]
        placement, planned = self.migration.placement, self.renewals.busy
        self._shortage_advice.ask(
            now, lambda: self._shortage.look(self.members, placement, failing, now, planned=planned), None
        )

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
            case Ticked(load):
                self._watch.look(load, now)
                return self._ticked(now) if self._takeover is None else self._waited(self._takeover, now)
            case Waited() if self._takeover is not None:
                return []
            case Waited(said):
                return self._unheard("the gateway", said, now)
            case Scale() | DrainNode() | RestartNodes() | ChangeRole() | ChangePhase() | Place() if (
                self._takeover is not None
            ):
                raise ConfigError("the controller was started again and still looks who is there; try again")
            case Scale(role, count, phase):
                return self._scaled(role, count, phase, now)
            case DrainNode(node):
                return self._drained_one(node)
            case RestartNodes(nodes):
                return self._renewed(nodes, now)
            case ChangeRole(node, role):
                return self._changes_role(node, role)
            case ChangePhase(node, phase):
                return self._changes_phase(node, phase)
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
                return self._drain_all()

    def _said(self, member: Member, value: FromNode, now: float) -> list[Effect]:
        if isinstance(value, Heartbeat):
            self._watch.hear(member, now)
        member.seen_at = now
        match value:
            case Heartbeat(resident, stats):
                member.resident_bytes, member.stats, member.beats = resident, stats, True
                return self._too_slow(member, now)
            case Progress():
                member.progress, member.progress_at = value, now
            case Endpoint():
                self.members.agree(member, value)
                return self._peers(member)
            case Identity(things):
                self.members.identify(member, things)
            case Ready(resident, expert_error, dense_error):
                self.members.check_identified(member)
                member.resident_bytes, member.progress = resident, Progress(1.0, "ready")
                member.expert_error, member.dense_error = expert_error, dense_error
                return self._catch_up(member, now) if member.state is State.LOADING else []
            case Filled(epoch):
                effects = self._answered(member, self.migration.filled, epoch, now)
                if self.migration.adopting:
                    self._unreadable.read()
                return [*effects, _reloaded(member, value)] if value.experts else effects
            case Unfilled():
                return self._unfilled(member, value, now)
            case Adopted(epoch):
                return self._answered(member, self.migration.adopted, epoch, now)
            case NodeDrained():
                return self._has_drained(member)
            case Failed(error):
                return self._has_failed(member, error, now)
            case Stuck():
                return self._accused(member, value, now)
            case Unheard():
                return self._unheard(str(member.node), value, now)
            case Register():
                return self._give_up(member, PeerLost(member.node, "it registered twice"), now)
        return []

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

    def _unfilled(self, member: Member, said: Unfilled, now: float) -> list[Effect]:
        try:
            return self._cannot_fill(member, said, now)
        except ProtocolError as error:
            return self._give_up(member, error, now)

    def _has_drained(self, member: Member) -> list[Effect]:
        if member.state is State.DRAINING:
            self.members.move(member, State.DRAINED)
        return []

    def _reconcile(self, now: float) -> list[Effect]:
        """What the difference between what is wanted and what is there asks for, once the event has been obeyed."""
        effects: list[Effect] = []
        if not self.migration.adopting:
            for member in self.members.view(Role.EXPERT).unready:
                waits = self._unreadable.of(member.node.index)
                if member.loaded and member.state is State.LOADING and not waits:
                    effects += self._catch_up(member, now)
            waiting, self._waiting = self._waiting, []
            for event, node in waiting:
                effects += self._admit(event, node, now)
        for node in sorted(self._leaving):
            effects += self._see_off(node, now)
        effects += self._renew(now)
        effects += self._follow(now)
        effects += self._replan()
        if self._coverage.lacking:
            effects += self._covered(now)
        if self._draining and not self._drained and not self._has_requests():
            self._drained = True
            effects.append(AllDrained())
        if not self.settled and self.members.all_ready(besides=self._guests):
            effects += self._settle()
        return effects

    def _covered(self, now: float) -> list[Effect]:
        placement, answering = self.migration.placement, self._answering()
        nothing: list[Incident] = []
        told = self._coverage_advice.ask(
            now, lambda: self._coverage.check(placement, answering, now), nothing
        )
        return [*told]

    def _has_requests(self) -> bool:
        return bool(self._serving(Role.ATTENTION) or self._serving(Role.GATEWAY))

    def _until_end(self, effects: list[Effect]) -> list[Effect]:
        """The first reason for an end counts, and nothing comes after it."""
        for number, effect in enumerate(effects):
            if isinstance(effect, EndRun):
                self.ended = True
                return effects[: number + 1]
        return effects
