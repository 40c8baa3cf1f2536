"""How members go: their streams end, they fail, fall silent or become useless, and what that means for their places."""

from collections.abc import Collection, Iterable

from afserve.adviser import Adviser
from afserve.control.membership.announcing import Announcer
from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import (
    Cause,
    Dismiss,
    Effect,
    EndRun,
    Event,
    Exited,
    Happening,
    Incident,
    Said,
    Start,
)
from afserve.control.membership.migration import ADOPT_SECONDS
from afserve.control.membership.placing import ExpertPlacing
from afserve.control.membership.recovery import Patience, Recovery
from afserve.control.membership.roster import Member, State
from afserve.control.membership.shortage import Coverage
from afserve.control.membership.slowness import Slowness
from afserve.control.membership.watching import Watch
from afserve.control.wire.values import Stuck, Unheard
from afserve.engine.stats import ExpertStats
from afserve.errors import AfserveError, DeadlineError, PeerError, PeerLost, RendezvousError
from afserve.member import NodeId, Role
from afserve.placement.recovery import homeless


class Reach:
    """Which expert nodes have no connection to which attention nodes, as these say.

    A network that is cut between some nodes looks from either side as if the other one were gone. What was said is
    forgotten where it is older than the `since` that is asked for.
    """

    def __init__(self) -> None:
        self._missed: dict[tuple[NodeId, int], float] = {}

    def note_missed(self, asker: NodeId, expert: int, now: float) -> None:
        self._missed[asker, expert] = now

    def askers(self, expert: int, since: float) -> set[NodeId]:
        """Attention nodes that miss this one."""
        return {asker for (asker, missed), at in self._missed.items() if missed == expert and at >= since}

    def missing(self, asker: NodeId, since: float) -> frozenset[int]:
        """Expert nodes that this one misses."""
        return frozenset(missed for (who, missed), at in self._missed.items() if who == asker and at >= since)


class Losses:
    """What counts as a loss, and when a place gets a new process, is up to the rules (`recovery.py`).

    Owns when places became empty, and what is known of those who may be lost. `restarted`: somebody has been lost.
    """

    def __init__(
        self,
        state: ClusterState,
        announcer: Announcer,
        placing: ExpertPlacing,
        recovery: Recovery,
        watch: Watch,
    ) -> None:
        self.restarted = False
        self._state, self._announcer, self._placing = state, announcer, placing
        self._recovery, self._watch = recovery, watch
        self._slowness = Slowness()
        self._reach = Reach()
        self._coverage = Coverage()
        # What only advises: an exception there must not end anything.
        self._slowness_advice = Adviser("finding slow expert nodes")
        self._coverage_advice = Adviser("telling which experts have no node")
        self._since: dict[NodeId, float] = {}  # when a place became empty
        self._lost_at: dict[NodeId, float] = {}  # of places whose member was lost while it served

    # ---- places

    def await_members(self, nodes: Iterable[NodeId], now: float) -> None:
        """Somebody was started for each of these places, and is to come."""
        self._since |= dict.fromkeys(nodes, now)

    def fill_place(self, node: NodeId) -> None:
        """Somebody has come."""
        self._since.pop(node, None)
        self._recovery.forget_place(node)

    def forget_place(self, node: NodeId) -> None:
        """Nobody is wanted there any more."""
        self._recovery.forget_place(node)

    def report_serving(self, member: Member, now: float) -> list[Effect]:
        """From now on; told where somebody was lost there."""
        self._recovery.serves(member.node, now)
        lost_at = self._lost_at.pop(member.node, None)
        if lost_at is None:
            return []
        return [Incident(Happening.RETURNED, member.node, f"pid {member.pid}", now - lost_at)]

    def absent(self) -> list[str]:
        """A phrase for every place whose member is gone."""
        members = self._state.members
        gone = ((node, members.last_at(node)) for node in members.vacancies())
        said = {node: f"{node} is gone: {member.why}" for node, member in gone if member is not None}
        failing = self._recovery.is_failing
        return [
            f"{why}; it keeps failing, and is tried again" if failing(n) else why for n, why in said.items()
        ]

    def restart_place(self, node: NodeId, reason: str, now: float, *, counts: bool = True) -> list[Effect]:
        """By the rules; the first that is due is started by `check_time`."""
        effects = self._recovery.plan_restart(node, reason, now, settled=self._state.settled, counts=counts)
        if self._recovery.is_failing(node):
            self._state.renewals.abandon(node)
        return effects

    # ---- losses

    def lose_member(
        self, member: Member, reason: str, now: float, cause: Cause = Cause.ENDED
    ) -> list[Effect]:
        """A member is gone."""
        state, served = self._state, member.serving
        member.why, member.lost_by = reason, cause
        state.members.set_state(member, State.GONE)
        node = member.node
        self._since[node] = now
        self._placing.replan_anew()
        effects = self._announcer.relay(state.migration.drop_node(node, now))
        if node.role is Role.GATEWAY:
            effects += self._announcer.announce_gateways()
        if node.role is Role.EXPERT and state.settled:
            effects += self._announcer.announce_experts()
        if node in state.guests:
            state.guests.discard(node)
            state.members.remove_place(node)
            return effects
        if node in state.leaving or state.renewals.gone(node, now):
            return effects
        self.restarted = True
        if served and state.settled:
            self._lost_at.setdefault(node, now)
            effects.append(self._loss(member, reason, now, cause))
        counts = cause not in (Cause.SILENT, Cause.SLOW) or not self._watch.starves(now)
        return effects + self.restart_place(node, reason, now, counts=counts)

    def _loss(self, member: Member, reason: str, now: float, cause: Cause) -> Incident:
        """With what becomes of the work of whoever is gone, in words."""
        did, role = "", member.node.role
        if role is Role.EXPERT:
            placement, answering = self._state.migration.placement, self._state.answering()
            did = self._coverage_advice.ask(
                now, lambda: self._coverage.explain_loss(member.id, placement, answering, now), ""
            )
        elif role is Role.ATTENTION:
            others = len(self._state.serving(Role.ATTENTION))
            did = "its requests go on at another one" if others else "its requests wait for another one"
        return Incident(
            Happening.LOST, member.node, reason, generation=member.id.generation, cause=cause, did=did
        )

    def check_coverage(self, now: float) -> list[Effect]:
        """Whether every expert has a node again, where one was lost that no other held."""
        if not self._coverage.lacking:
            return []
        placement, answering = self._state.migration.placement, self._state.answering()
        nothing: list[Incident] = []
        told = self._coverage_advice.ask(
            now, lambda: self._coverage.check_covered(placement, answering, now), nothing
        )
        return [*told]

    def report_missed(self, node: NodeId, now: float) -> list[Effect]:
        """It was there under the controller before this one, as far as that is known."""
        why = "it did not come back to the new controller"
        self._since.setdefault(node, now)
        self._lost_at.setdefault(node, now)
        lost = Incident(Happening.LOST, node, why, cause=Cause.ENDED)
        return [lost, *self.restart_place(node, why, now, counts=not self._watch.starves(now))]

    def report_exit(self, event: Exited, now: float, *, taking_over: bool) -> list[Effect]:
        """The process of whoever was to go has gone, or one that had not joined yet: nobody else will tell of that."""
        state, node = self._state, event.node
        self._state.role_changes.has_exited(node)
        unwanted = node in state.leaving or node not in state.members.places(node.role)
        if unwanted or self._state.renewals.has_exited(node, now):
            return []
        member = state.members.last_at(node)
        if self._recovery.awaits(node) and (member is None or not member.alive) and not taking_over:
            return self.restart_place(node, event.reason, now)
        return self._recovery.exited(event)

    # ---- members that are there, but of no use

    def give_up(
        self, member: Member, error: AfserveError, now: float, cause: Cause = Cause.REFUSED
    ) -> list[Effect]:
        """It is sent away, and lost."""
        if not self._recovery.rules.recovers and member.node not in self._state.guests:
            return [EndRun(error)]
        reason = error.reason if isinstance(error, PeerLost) else error.message
        reason = reason.removeprefix(f"{member.node}: ")
        return [Dismiss(member.id, error), *self.lose_member(member, reason, now, cause)]

    def report_failure(self, member: Member, error: AfserveError, now: float) -> list[Effect]:
        """It says that it cannot go on."""
        if isinstance(error, PeerError):
            if member.node not in self._state.guests:
                self._recovery.accused(member.node, error.message, now)
            return []
        why = self._recovery.explain_failure(member.node, error)
        if not self._state.settled and not isinstance(why, PeerLost):
            return [EndRun(why)]  # the user's to mend: a new process would fail in the same way
        return self.give_up(member, why, now, Cause.FAILED)

    def report_stuck(self, asker: Member, said: Stuck, now: float) -> list[Effect]:
        """A peer waits for an expert node. Of an earlier life of that one, it will hear that it is gone."""
        found = self._state.members.find_life(said.life)
        if found is None or not found.serving:
            return []
        patience = self._patience(found, now)
        why, cause = self._recovery.unproductive(found, said, asker.node, now, patience)
        if not why and said.unreachable:
            return self._cut_off(asker, found, said, now)
        return self.give_up(found, PeerLost(found.node, why), now, cause) if why else []

    def _cut_off(self, asker: Member, expert: Member, said: Stuck, now: float) -> list[Effect]:
        """Both speak, but not with each other. An expert node that nobody reaches is of no use; an attention node goes
        that lacks experts which others reach. With replicas that it does reach, nobody has to."""
        self._reach.note_missed(asker.node, said.life.index, now)
        state, rules = self._state, self._recovery.rules
        limit = 2 * rules.silence
        if (
            not rules.recovers
            or said.seconds < limit
            or said.seconds < self._watch.patience(expert, limit, now)
        ):
            return []
        since, cut = now - rules.silence, f"has had no connection to {expert.node} for {said.seconds:.1f} s"
        if self._reach.askers(said.life.index, since).issuperset(state.serving(Role.ATTENTION)):
            why = f"{asker.node} {cut}, nor has any other attention node"
            return self.give_up(expert, PeerLost(expert.node, why), now, Cause.SILENT)
        reached = state.answering() - self._reach.missing(asker.node, since)
        if not homeless(state.migration.placement, reached):
            return []
        why = f"it {cut}, which others reach, and lacks experts"
        return self.give_up(asker, PeerLost(asker.node, why), now, Cause.SILENT)

    def report_unheard(self, asker: str, said: Unheard, now: float) -> list[Effect]:
        """A gateway waits for an attention node, whose own last word may be older than the requests."""
        found = self._state.members.find_life(said.life)
        if found is None or not found.serving:
            return []
        why = self._recovery.unheard(found, said, asker, now, self._patience(found, now))
        return self.give_up(found, PeerLost(found.node, why), now, Cause.SILENT) if why else []

    def judge_pace(self, member: Member, now: float) -> list[Effect]:
        """An expert node that has become much slower is left where the others can do its work."""
        if not isinstance(member.stats, ExpertStats) or not member.serving:
            return []
        life, stats = member.id, member.stats
        why = self._slowness_advice.ask(
            now, lambda: self._slowness.judge_stats(life.node, member.host, life.generation, stats, now), ""
        )
        if (
            not why
            or self._watch.starves(now)
            or not self._recovery.rules.recovers
            or not self._state.settled
            or not self._state.can_spare(member.node)
        ):
            return []
        return self.give_up(member, PeerLost(member.node, why), now, Cause.SLOW)

    def dismiss_stranger(self, event: Event, error: RendezvousError, now: float) -> list[Effect]:
        """A member of another run is sent away, and told why. Whether the run goes on is the rules' business."""
        found = self._state.members.find_life(event.member) if isinstance(event, Said) else None
        if found is None:
            return [EndRun(error)]
        ends = not self._recovery.rules.recovers or not self._state.settled
        if ends and found.node not in self._state.guests:
            return [Dismiss(found.id, error), EndRun(error)]
        return self.give_up(found, error, now)

    # ---- time

    def check_time(self, awaited: Collection[NodeId], now: float) -> list[Effect]:
        """What time alone brings about. `awaited` are places of those who have come and are let in later."""
        rules, members = self._recovery.rules, self._state.members
        self._placing.retry_unreadable(now)
        effects = self._recovery.restarts_due(now)
        self.await_members([effect.node for effect in effects if isinstance(effect, Start)], now)
        effects += self._check_places(awaited, now)
        for member in members:
            if why := self._recovery.silent(member, now, self._patience(member, now)):
                effects += self.give_up(member, PeerLost(member.node, why), now, Cause.SILENT)
            elif member.state is State.LOADING and now - member.progress_at > rules.stall:
                late = self._recovery.late(members.unready(), rules.stall)
                effects += self.give_up(member, late, now)
        return effects + self._check_migration(now)

    def _patience(self, member: Member, now: float) -> Patience:
        return lambda limit: self._watch.patience(member, limit, now)

    def _check_places(self, awaited: Collection[NodeId], now: float) -> list[Effect]:
        """Nobody came for a place, although somebody was started for it."""
        rules, members = self._recovery.rules, self._state.members
        seconds = rules.register * self._watch.stretch(now)
        late = [
            node
            for node in members.vacancies()
            if node not in awaited
            and not self._recovery.pauses(node)
            and now - self._since.get(node, now) > seconds
        ]
        if late and not rules.recovers:
            return [EndRun(self._recovery.late(members.unready(), seconds))]
        self.await_members(late, now)
        why, counts = "nobody came for its place", not self._watch.starves(now)
        return [e for node in late for e in self.restart_place(node, why, now, counts=counts)]

    def _check_migration(self, now: float) -> list[Effect]:
        migration, members = self._state.migration, self._state.members
        try:
            migration.check_deadline(now - ADOPT_SECONDS * (self._watch.stretch(now) - 1.0))
        except DeadlineError as error:
            if not migration.adopting:
                return self._placing.give_up_late_fills(error.message, now)
            late = [m for n in migration.unanswered if (m := members.last_at(n)) is not None and m.alive]
            return [e for member in late for e in self.give_up(member, error, now)]
        return []
