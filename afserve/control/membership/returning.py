"""How members come back to a new controller; `takeover.py` says what becomes of what they tell."""

from afserve.control.membership.events import (
    Admit,
    Cause,
    Effect,
    Happening,
    Incident,
    Refuse,
    Rejoined,
    Settled,
    Tell,
)
from afserve.control.membership.migration import Phase, asks, holders
from afserve.control.membership.renewing import Renewing
from afserve.control.membership.roster import Member, State
from afserve.control.membership.takeover import (
    REJOIN_SECONDS,
    Inherited,
    NodeClaim,
    Takeover,
    inherit,
)
from afserve.control.wire.values import Retire, Standing
from afserve.errors import RendezvousError
from afserve.member import NodeId, Role

_REJOIN_TIMES = 4.0  # at most as long as on a quiet host: until then nobody takes the place of who is lost
_SUCCEEDED = RendezvousError("another stream of this node has taken the place of this one")


class Returning(Renewing):
    """Only while a new controller takes over; afterwards whoever comes has to join."""

    def _rejoined(self, event: Rejoined, now: float) -> list[Effect]:
        register, standing = event.register, event.register.standing
        assert standing is not None, "it says what it is"
        try:
            role = self.members.check_kind(register)
            if register.index is None:
                raise RendezvousError(f"index: a {role} node that was here before knows its own")
            claim = NodeClaim(event.connection, NodeId(role, register.index), register, standing)
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

    def _waited(self, takeover: Takeover, now: float) -> list[Effect]:
        """On a host that starves those who live take longer to come back."""
        seconds = REJOIN_SECONDS * min(_REJOIN_TIMES, self._watch.stretch(now))
        return self._take_over(takeover, now) if now - takeover.began >= seconds else []

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
            effects += self._drain_all()
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
            state, member.epoch, member.asked = inherited.state(node.role, claim.standing)
            self.members.move(member, state)
            if node in self._guests and state in (State.DRAINING, State.DRAINED):
                self._leaving.add(node)
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
        effects += self._drain_again(
            member
        )  # what it answered may have gone to the controller before this one
        if member.state is State.LOADING and member.loaded:
            return effects + self._catch_up(member, now)
        if not member.serving:
            return effects  # it loads, or has finished what it had and only has to go
        self._recovery.serves(member.node, now)
        following = inherited.following
        if member.node.role is not Role.ATTENTION or following is None:
            return effects
        knows = following.epoch in (member.epoch, member.asked)
        return effects if knows else [*effects, Tell(member.id, asks(Phase.ADOPTING, following))]

    def _missed(self, node: NodeId, now: float) -> list[Effect]:
        """It was there under the controller before this one, as far as that is known."""
        why = "it did not come back to the new controller"
        self._since.setdefault(node, now)
        self._lost_at.setdefault(node, now)
        lost = Incident(Happening.LOST, node, why, cause=Cause.ENDED)
        return [lost, *self._started_again(node, why, now, counts=not self._watch.starves(now))]
