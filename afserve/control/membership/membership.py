"""The membership of one model as one pure machine: `on(event, now) -> effects`.

What happened comes in, what is to be done goes out; it opens nothing, waits for nothing and reads no clock. A loss,
another number of nodes and another placement are all the same few effects. Whatever an earlier life of a node still
says is dropped here.
"""

from collections.abc import Callable

from afserve.adviser import Adviser
from afserve.control.membership import events
from afserve.control.membership.announcing import Announcer, Draining
from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.departures import Departures
from afserve.control.membership.joining import Assign, Joining, same_everywhere
from afserve.control.membership.losses import Losses
from afserve.control.membership.members import Members, first_generation
from afserve.control.membership.migration import Migration, Outgoing
from afserve.control.membership.placing import ExpertPlacing
from afserve.control.membership.recovery import Recovery, Rules
from afserve.control.membership.returning import Returning
from afserve.control.membership.roster import Member, State
from afserve.control.membership.shortage import Shortage, ShortagePatience
from afserve.control.membership.watching import Watch
from afserve.control.membership.wishes import NodeWishes
from afserve.control.wire import placement_values, values
from afserve.control.wire.desired import Deployment
from afserve.errors import ConfigError, PeerLost, ProtocolError, RendezvousError
from afserve.member import NodeId


def _reloaded(member: Member, filled: placement_values.Filled) -> events.Incident:
    rate = filled.bytes / max(filled.seconds, 1e-6) / 1e9
    what = (
        f"{filled.experts} experts for epoch {filled.epoch}, {filled.bytes / 1e6:,.1f} MB at {rate:.1f} GB/s"
    )
    return events.Incident(events.Happening.RELOADED, member.node, what, filled.seconds, bytes=filled.bytes)


class Membership:
    """Events go to the part that they are for; after each comes what the difference between what is wanted and what is
    there asks for. `state` is what all parts share; each owns the rest of what it knows.

    `deployment` is what is wanted now, its placement the one in force. `assign` may make it a node's own.
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
        self.ended = False
        self._recovery = recovery = Recovery(rules or Rules())
        members = Members(deployment.nodes, version, deployment.colocated, first_generation(life))
        self.state = state = ClusterState(deployment, members, spare)
        self._watch = watch = Watch(members, recovery.rules.silence, state.phase_of)
        self._announcer = announcer = Announcer(state)
        self._draining = draining = Draining(state)
        self._placing = placing = ExpertPlacing(state, announcer)
        self.losses = losses = Losses(state, announcer, placing, recovery, watch)
        self._joining = joining = Joining(state, announcer, losses, placing, draining, assign)
        self.wishes = NodeWishes(state, losses, recovery)
        self._departures = Departures(state, announcer, losses, joining, draining)
        self._returning = Returning(state, announcer, placing, losses, joining, draining, watch)
        self._shortage = Shortage(ShortagePatience(recovery.rules.short, recovery.rules.deadline), state.room)
        self._shortage_advice = Adviser("telling what is lacking")  # an exception there refuses nobody anew

    @property
    def deployment(self) -> Deployment:
        return self.state.deployment

    @property
    def members(self) -> Members:
        return self.state.members

    @property
    def migration(self) -> Migration:
        return self.state.migration

    @property
    def settled(self) -> bool:
        return self.state.settled

    def attention_nodes(self) -> values.AttentionNodes:
        """For gateways: who attends, and why new requests are refused, where they are."""
        return self._announcer.attention_nodes(self._shortage.refusing)

    def on(self, event: events.Event, now: float) -> list[events.Effect]:
        """What is to be done now. Raises ConfigError, and changes nothing, for what was asked and cannot be."""
        if self.ended:
            return []
        try:
            effects = self._obey(event, now)
        except RendezvousError as error:
            effects = self.losses.dismiss_stranger(event, error, now)
        if not effects and isinstance(event, events.Said) and isinstance(event.value, values.Heartbeat):
            return []  # most events are these, and only stats have changed; ticks look at all the rest
        if not self.ended and not self._returning.taking_over:
            effects += self._reconcile(now)
        if self.settled and self._recovery.rules.recovers and not self._draining.ends:
            self._look_at_shortage(now)
        return self._until_end(effects)

    def _reconcile(self, now: float) -> list[events.Effect]:
        """What the difference between what is wanted and what is there asks for, once the event has been obeyed."""
        effects = self._joining.admit_waiting(self._placing.unreadable.waits_for_node, now)
        effects += self._departures.take_steps(now)
        effects += self._placing.replan()
        effects += self.losses.check_coverage(now)
        effects += self._draining.check_drained()
        return effects + self._joining.check_settled()

    def _look_at_shortage(self, now: float) -> None:
        failing = [node for node in self.members.vacancies() if self._recovery.is_failing(node)]
        placement, planned = self.migration.placement, self.state.renewals.planned
        self._shortage_advice.ask(
            now,
            lambda: self._shortage.check_shortage(self.members, placement, failing, now, planned=planned),
            None,
        )

    def _obey(self, event: events.Event, now: float) -> list[events.Effect]:
        match event:
            case events.Begun():
                self.losses.await_members(self.members.vacancies(), now)
                return [events.Start(node) for node in self.members.vacancies()]
            case events.TakenOver():
                self._returning.begin_takeover(now)
                return []
            case events.Rejoined():
                return self._returning.rejoin(event, now)
            case events.Joined() if self._returning.taking_over:
                self._returning.postpone_join(event)
                return []
            case events.Joined():
                return self._joining.join(event, now)
            case events.Withdrawn(connection):
                self._joining.withdraw(connection)
                self._returning.withdraw(connection)
                return []
            case events.Said(member, value):
                found = self.members.find_life(member)
                return [] if found is None else self._hear(found, value, now)
            case events.Left(member, reason):
                found = self.members.find_life(member)
                return [] if found is None else self.losses.lose_member(found, reason, now)
            case events.Exited():
                return self.losses.report_exit(event, now, taking_over=self._returning.taking_over)
            case events.Ticked(load):
                self._watch.note_load(load, now)
                if self._returning.taking_over:
                    return self._returning.check_wait(now)
                return self.losses.check_time(self._joining.awaited(), now)
            case events.Waited() if self._returning.taking_over:
                return []
            case events.Waited(said):
                return self.losses.report_unheard("the gateway", said, now)
            case (
                events.Scale()
                | events.DrainNode()
                | events.RestartNodes()
                | events.ChangeRole()
                | events.ChangePhase()
                | events.Place()
            ) if self._returning.taking_over:
                raise ConfigError("the controller was started again and still looks who is there; try again")
            case events.Scale(role, count, phase):
                return self.wishes.scale(role, count, phase, now)
            case events.DrainNode(node):
                return self.wishes.drain_node(node)
            case events.RestartNodes(nodes):
                return self.wishes.restart_nodes(nodes, now)
            case events.ChangeRole(node, role):
                return self.wishes.change_role(node, role)
            case events.ChangePhase(node, phase):
                return self.wishes.change_phase(node, phase)
            case events.Broken(node):
                self._recovery.pardon(node)
                return []
            case events.Place():
                return self._placing.place(event, now)
            case events.Known(things):
                self.members.expect_copy(things)
                for known in self.members:
                    if known.state is not State.LOADING:
                        self.members.check_identified(known)
                return []
            case events.DrainAll():
                return self._draining.drain_all()

    def _hear(self, member: Member, value: values.FromNode, now: float) -> list[events.Effect]:
        if isinstance(value, values.Heartbeat):
            self._watch.note_heartbeat(member, now)
        member.seen_at = now
        match value:
            case values.Heartbeat(resident, stats):
                member.resident_bytes, member.stats, member.beats = resident, stats, True
                return self.losses.judge_pace(member, now)
            case values.Progress():
                member.progress, member.progress_at = value, now
            case values.Endpoint():
                self.members.agree(member, value)
                return self._announcer.introduce(member)
            case values.Identity(things):
                self.members.identify(member, things)
            case values.Ready(resident, expert_error, dense_error, isa):
                self.members.check_identified(member)
                member.resident_bytes, member.progress = resident, values.Progress(1.0, "ready")
                member.expert_error, member.dense_error, member.isa = expert_error, dense_error, isa
                return self._joining.catch_up(member, now) if member.state is State.LOADING else []
            case placement_values.Filled(epoch):
                effects = self._answered(member, self.migration.filled, epoch, now)
                if self.migration.adopting:
                    self._placing.unreadable.note_all_read()
                return [*effects, _reloaded(member, value)] if value.experts else effects
            case placement_values.Unfilled():
                return self._unfilled(member, value, now)
            case placement_values.Adopted(epoch):
                return self._answered(member, self.migration.adopted, epoch, now)
            case values.Drained():
                self._draining.report_drained(member)
            case values.Failed(error):
                return self.losses.report_failure(member, error, now)
            case values.Stuck():
                return self.losses.report_stuck(member, value, now)
            case values.Unheard():
                return self.losses.report_unheard(str(member.node), value, now)
            case values.Register():
                return self.losses.give_up(member, PeerLost(member.node, "it registered twice"), now)
        return []

    def _answered(
        self, member: Member, take: Callable[[NodeId, int, float], list[Outgoing]], epoch: int, now: float
    ) -> list[events.Effect]:
        """An answer that was not asked for comes from no correct node: it is as good as gone."""
        if member.state is State.LOADING and epoch == member.asked:
            member.epoch = epoch
            return self._joining.catch_up(member, now)
        if self.migration.forget_fill(member.node, epoch):
            return []
        try:
            effects = self._announcer.relay(take(member.node, epoch, now))
        except ProtocolError as error:
            return self.losses.give_up(member, error, now)
        member.epoch = epoch
        return effects

    def _unfilled(self, member: Member, said: placement_values.Unfilled, now: float) -> list[events.Effect]:
        try:
            return self._placing.report_unfilled(member, said, now)
        except ProtocolError as error:
            return self.losses.give_up(member, error, now)

    def _until_end(self, effects: list[events.Effect]) -> list[events.Effect]:
        """The first reason for an end counts, and nothing comes after it."""
        for number, effect in enumerate(effects):
            if isinstance(effect, events.EndRun):
                self.ended = True
                return effects[: number + 1]
        return effects
