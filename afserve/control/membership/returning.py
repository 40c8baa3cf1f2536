"""How members come back to a new controller; `takeover.py` says what becomes of what they tell."""

from afserve.control.membership.announcing import Announcer, Draining
from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import Admit, Effect, Joined, Refuse, Rejoined, Settled, Tell
from afserve.control.membership.joining import Joining
from afserve.control.membership.losses import Losses
from afserve.control.membership.migration import Phase, asks, holders
from afserve.control.membership.placing import ExpertPlacing
from afserve.control.membership.roster import Member, State
from afserve.control.membership.takeover import REJOIN_SECONDS, Inherited, NodeClaim, Takeover, inherit
from afserve.control.membership.watching import Watch
from afserve.control.wire.placement_values import Retire
from afserve.control.wire.values import Standing
from afserve.errors import RendezvousError
from afserve.member import NodeId, Role

_REJOIN_TIMES = 4.0  # at most as long as on a quiet host: until then nobody takes the place of who is lost
_SUCCEEDED = RendezvousError("another stream of this node has taken the place of this one")


class Returning:
    """Only while a new controller takes over; afterwards whoever comes has to join.

    Owns who has come back meanwhile, and who came without having been there.
    """

    def __init__(
        self,
        state: ClusterState,
        announcer: Announcer,
        placing: ExpertPlacing,
        losses: Losses,
        joining: Joining,
        draining: Draining,
        watch: Watch,
    ) -> None:
        self._state, self._announcer, self._placing = state, announcer, placing
        self._losses, self._joining, self._draining = losses, joining, draining
        self._watch = watch
        self._takeover: Takeover | None = None
        self._fresh: list[Joined] = []

    @property
    def taking_over(self) -> bool:
        """Whether it is still looked who is there."""
        return self._takeover is not None

    def begin_takeover(self, now: float) -> None:
        """Those who were there before are to come back."""
        self._takeover = Takeover(now)

    def postpone_join(self, event: Joined) -> None:
        """Somebody came who was not there before: those who were come first."""
        self._fresh.append(event)

    def withdraw(self, connection: int) -> None:
        """Whoever came by this stream has gone."""
        self._fresh = [joined for joined in self._fresh if joined.connection != connection]
        if self._takeover is not None:
            self._takeover.withdraw(connection)

    def rejoin(self, event: Rejoined, now: float) -> list[Effect]:
        register, standing = event.register, event.register.standing
        assert standing is not None, "it says what it is"
        members = self._state.members
        try:
            role = members.check_kind(register)
            if register.index is None:
                raise RendezvousError(f"index: a {role} node that was here before knows its own")
            claim = NodeClaim(event.connection, NodeId(role, register.index), register, standing)
            members.count_life(claim.node, standing.generation)
            if self._takeover is None:
                raise RendezvousError(f"{claim.node} was given up meanwhile; start it anew")
        except RendezvousError as error:
            return [Refuse(event.connection, error)]
        other = self._takeover.claim(claim)
        effects: list[Effect] = [] if other is None else [Refuse(other.connection, _SUCCEEDED)]
        if self._takeover.all_back(self._state.deployment.counts):
            effects += self._take_over(self._takeover, now)
        return effects

    def check_wait(self, now: float) -> list[Effect]:
        """On a host that starves those who live take longer to come back."""
        seconds = REJOIN_SECONDS * min(_REJOIN_TIMES, self._watch.stretch(now))
        takeover = self._takeover
        over = takeover is not None and now - takeover.began >= seconds
        return self._take_over(takeover, now) if takeover is not None and over else []

    def _take_over(self, takeover: Takeover, now: float) -> list[Effect]:
        """All are back, or those who are not are lost."""
        self._takeover, fresh, self._fresh = None, self._fresh, []
        self._state.settled = True
        inherited = inherit(takeover, self._state.deployment.placement)
        effects, admitted = self._readmit(takeover, inherited, now)
        following = inherited.following
        given_up = [
            (m.node, epoch) for m, standing in admitted for epoch in inherited.given_up(m.node.role, standing)
        ]
        fronts = [m for m, _ in admitted if m.node.role is Role.ATTENTION and m.serving]
        missing = [m.node for m in fronts if following is not None and m.epoch != following.epoch]
        self._state.migration.resume(inherited.placement, following, missing, given_up, inherited.newest, now)
        self._choose_places(inherited)
        self._placing.resume()
        for member, standing in admitted:
            effects += self._resumed(member, standing, inherited, now)
        effects += [Settled(), *self._announcer.announce_experts(), *self._announcer.announce_gateways()]
        for node in self._state.members.vacancies():
            if node not in self._state.leaving:
                effects += self._losses.report_missed(node, now)
        for joined in fresh:
            effects += self._joining.join(joined, now)
        if self._draining.ends:
            effects += self._draining.drain_all()
        return effects

    def _readmit(
        self, takeover: Takeover, inherited: Inherited, now: float
    ) -> tuple[list[Effect], list[tuple[Member, Standing]]]:
        effects: list[Effect] = []
        admitted = []
        for node, claim in sorted(takeover.claims.items()):
            try:
                inherited.check_claim(claim)
                member = self._state.members.readmit(node, claim.register, claim.standing, now)
            except RendezvousError as error:
                effects.append(Refuse(claim.connection, error))
                continue
            if node.role is Role.GATEWAY and node not in self._state.deployment.nodes:
                self._state.guests.add(node)
            state, member.epoch, member.asked = inherited.state(node.role, claim.standing)
            self._state.members.set_state(member, state)
            if node in self._state.guests and state in (State.DRAINING, State.DRAINED):
                self._state.leaving.add(node)
            admitted.append((member, claim.standing))
            effects.append(Admit(claim.connection, member.id, None))
        return effects, admitted

    def _choose_places(self, inherited: Inherited) -> None:
        """Of those who are there, and those that experts are placed on, as many stay as are wanted."""
        for role in Role:
            wanted = self._state.deployment.count(role)
            here = [
                member for member in self._state.members.living(role) if member.node not in self._state.guests
            ]
            staying = [member.node for member in here if member.state in (State.LOADING, State.READY)]
            if role is Role.EXPERT and not self._state.deployment.colocated:
                needed = {node for placement in inherited.placements for node in holders(placement)}
                staying += sorted(needed.difference(member.node for member in here))
            for node in staying:
                self._state.members.keep_place(node)
            going = [member.node for member in here if member.node not in staying]
            if going and len(staying) < wanted and self._state.renewals.node is None:
                staying.append(going[0])  # it was to have a new process
                self._state.renewals.begin_renewal(going[0])
            self._state.leaving.update(node for node in going if node not in staying)
            empty = [
                node
                for node in self._state.members.places(role)
                if node not in staying and node not in self._state.leaving and node not in self._state.guests
            ]
            self._state.leaving.update(staying[wanted:])
            for node in empty[max(0, wanted - len(staying)) :]:
                self._state.members.remove_place(node)
            for _ in range(wanted - len(staying) - len(empty)):
                self._state.members.add_place(role)

    def _resumed(self, member: Member, standing: Standing, inherited: Inherited, now: float) -> list[Effect]:
        """What a member that is back is told beside what all are."""
        effects: list[Effect] = [
            Tell(member.id, Retire(epoch)) for epoch in inherited.obsolete(member.node.role, standing)
        ]
        effects += self._draining.repeat_drain(
            member
        )  # what it answered may have gone to the controller before this one
        if member.state is State.LOADING and member.loaded:
            return effects + self._joining.catch_up(member, now)
        if not member.serving:
            return effects  # it loads, or has finished what it had and only has to go
        effects += self._losses.report_serving(member, now)
        following = inherited.following
        if member.node.role is not Role.ATTENTION or following is None:
            return effects
        knows = following.epoch in (member.epoch, member.asked)
        return effects if knows else [*effects, Tell(member.id, asks(Phase.ADOPTING, following))]
