"""How members go: their streams end, they fail, fall silent or become useless, and what that means for their places."""

from afserve.control.membership.events import (
    Cause,
    Dismiss,
    Effect,
    EndRun,
    Event,
    Exited,
    Happening,
    Incident,
    MemberId,
    Said,
    Start,
)
from afserve.control.membership.migration import ADOPT_SECONDS
from afserve.control.membership.placing import Placing
from afserve.control.membership.recovery import Patience
from afserve.control.membership.roster import Member, State
from afserve.control.wire.values import Stuck, Unheard
from afserve.engine.stats import ExpertStats
from afserve.errors import (
    AfserveError,
    DeadlineError,
    PeerError,
    PeerLost,
    RendezvousError,
)
from afserve.member import NodeId, Role, attention_node, expert_node
from afserve.placement.recovery import homeless


class Going(Placing):
    """What counts as a loss, and when a place gets a new process, is up to the rules (`recovery.py`)."""

    def _gone(self, member: Member, reason: str, now: float, cause: Cause = Cause.ENDED) -> list[Effect]:
        served, member.why, member.lost_by = member.serving, reason, cause
        self.members.move(member, State.GONE)
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
        counts = cause not in (Cause.SILENT, Cause.SLOW) or not self._watch.starves(now)
        return effects + self._started_again(node, reason, now, counts=counts)

    def _loss(self, member: Member, reason: str, now: float, cause: Cause) -> Incident:
        """With what becomes of the work of whoever is gone, in words."""
        did, role = "", member.node.role
        if role is Role.EXPERT:
            placement, answering = self.migration.placement, self._answering()
            did = self._coverage_advice.ask(
                now, lambda: self._coverage.lost(member.id, placement, answering, now), ""
            )
        elif role is Role.ATTENTION:
            others = len(self._serving(Role.ATTENTION))
            did = "its requests go on at another one" if others else "its requests wait for another one"
        return Incident(
            Happening.LOST, member.node, reason, generation=member.id.generation, cause=cause, did=did
        )

    def _started_again(self, node: NodeId, reason: str, now: float, *, counts: bool = True) -> list[Effect]:
        effects = self._recovery.lost(node, reason, now, settled=self.settled, counts=counts)
        if self._recovery.is_failing(node):
            self.renewals.abandon(node)
        return effects

    def _patience(self, member: Member, now: float) -> Patience:
        return lambda limit: self._watch.patience(member, limit, now)

    def _exited(self, event: Exited, node: NodeId, now: float) -> list[Effect]:
        """The process of whoever was to go has gone, or one that had not joined yet: nobody else will tell of that."""
        self.role_changes.has_exited(node)
        unwanted = node in self._leaving or node not in self.members.places(node.role)
        if unwanted or self.renewals.has_exited(node, now):
            return []
        member = self.members.at(node)
        if self._recovery.awaits(node) and (member is None or not member.alive) and self._takeover is None:
            return self._started_again(node, event.reason, now)
        return self._recovery.exited(event)

    def _give_up(
        self, member: Member, error: AfserveError, now: float, cause: Cause = Cause.REFUSED
    ) -> list[Effect]:
        """A member that is there, but of no use any more."""
        if not self._recovery.rules.recovers and member.node not in self._guests:
            return [EndRun(error)]
        reason = error.reason if isinstance(error, PeerLost) else error.message
        reason = reason.removeprefix(f"{member.node}: ")
        return [Dismiss(member.id, error), *self._gone(member, reason, now, cause)]

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
        patience = self._patience(found, now)
        why, cause = self._recovery.unproductive(found, said, asker.node, now, patience)
        if not why and said.unreachable:
            return self._cut_off(asker, found, said, now)
        return self._give_up(found, PeerLost(found.node, why), now, cause) if why else []

    def _cut_off(self, asker: Member, expert: Member, said: Stuck, now: float) -> list[Effect]:
        """Both speak, but not with each other. An expert node that nobody reaches is of no use; an attention node goes
        that lacks experts which others reach. With replicas that it does reach, nobody has to."""
        self._reach.missed(asker.node, said.expert, now)
        rules = self._recovery.rules
        limit = 2 * rules.silence
        if (
            not rules.recovers
            or said.seconds < limit
            or said.seconds < self._watch.patience(expert, limit, now)
        ):
            return []
        since, cut = now - rules.silence, f"has had no connection to {expert.node} for {said.seconds:.1f} s"
        if self._reach.askers(said.expert, since).issuperset(self._serving(Role.ATTENTION)):
            why = f"{asker.node} {cut}, nor has any other attention node"
            return self._give_up(expert, PeerLost(expert.node, why), now, Cause.SILENT)
        reached = self._answering() - self._reach.missing(asker.node, since)
        if not homeless(self.migration.placement, reached):
            return []
        why = f"it {cut}, which others reach, and lacks experts"
        return self._give_up(asker, PeerLost(asker.node, why), now, Cause.SILENT)

    def _unheard(self, asker: str, said: Unheard, now: float) -> list[Effect]:
        """A gateway waits for an attention node, whose own last word may be older than the requests."""
        found = self.members.get(MemberId(attention_node(said.attention), said.generation))
        if found is None or not found.serving:
            return []
        why = self._recovery.unheard(found, said, asker, now, self._patience(found, now))
        return self._give_up(found, PeerLost(found.node, why), now, Cause.SILENT) if why else []

    def _too_slow(self, member: Member, now: float) -> list[Effect]:
        """An expert node that has become much slower is left where the others can do its work."""
        if not isinstance(member.stats, ExpertStats) or not member.serving:
            return []
        life, stats = member.id, member.stats
        why = self._slowness_advice.ask(
            now, lambda: self._slowness.heard(life.node, member.host, life.generation, stats, now), ""
        )
        if (
            not why
            or self._watch.starves(now)
            or not self._recovery.rules.recovers
            or not self.settled
            or not self.can_spare(member.node)
        ):
            return []
        return self._give_up(member, PeerLost(member.node, why), now, Cause.SLOW)

    def _disagreed(self, event: Event, error: RendezvousError, now: float) -> list[Effect]:
        """A member of another run is sent away, and told why. Whether the run goes on is the rules' business."""
        found = self.members.get(event.member) if isinstance(event, Said) else None
        if found is None:
            return [EndRun(error)]
        ends = not self._recovery.rules.recovers or not self.settled
        if ends and found.node not in self._guests:
            return [Dismiss(found.id, error), EndRun(error)]
        return self._give_up(found, error, now)

    def _ticked(self, now: float) -> list[Effect]:
        rules = self._recovery.rules
        self._read_again(now)
        effects = self._recovery.due(now)
        self._since |= {effect.node: now for effect in effects if isinstance(effect, Start)}
        effects += self._check_places(now)
        for member in self.members:
            if why := self._recovery.silent(member, now, self._patience(member, now)):
                effects += self._give_up(member, PeerLost(member.node, why), now, Cause.SILENT)
            elif member.state is State.LOADING and now - member.progress_at > rules.stall:
                late = self._recovery.late(self.members.unready(), rules.stall)
                effects += self._give_up(member, late, now)
        return effects + self._check_migration(now)

    def _check_places(self, now: float) -> list[Effect]:
        """Nobody came for a place, although somebody was started for it."""
        rules, awaited = self._recovery.rules, [node for _, node in self._waiting]
        seconds = rules.register * self._watch.stretch(now)
        late = [
            node
            for node in self.members.missing()
            if node not in awaited
            and not self._recovery.pauses(node)
            and now - self._since.get(node, now) > seconds
        ]
        if late and not rules.recovers:
            return [EndRun(self._recovery.late(self.members.unready(), seconds))]
        self._since |= dict.fromkeys(late, now)
        why, counts = "nobody came for its place", not self._watch.starves(now)
        return [e for node in late for e in self._started_again(node, why, now, counts=counts)]

    def _check_migration(self, now: float) -> list[Effect]:
        try:
            self.migration.check(now - ADOPT_SECONDS * (self._watch.stretch(now) - 1.0))
        except DeadlineError as error:
            if not self.migration.adopting:
                return self._too_late(error, now)
            late = [
                m for node in self.migration.missing if (m := self.members.at(node)) is not None and m.alive
            ]
            return [e for member in late for e in self._give_up(member, error, now)]
        return []

    def _too_late(self, error: DeadlineError, now: float) -> list[Effect]:
        """A disk that does not answer costs the fill, as one that fails does."""
        told, late = self.migration.give_up_late()
        said = [e for n, experts in late.items() for e in self._unread(n, experts, error.message, now)]
        return [*self._tell(told), *said]
