"""How members come: they join, load, catch up with the placement in force, and serve; until the run has settled."""

from dataclasses import replace

from afserve.control.membership.events import (
    Admit,
    Effect,
    EndRun,
    Happening,
    Incident,
    Joined,
    Refuse,
    Settled,
    Tell,
)
from afserve.control.membership.going import Going
from afserve.control.membership.members import NO_EPOCH
from afserve.control.membership.migration import Phase, asks
from afserve.control.membership.roster import Member, State
from afserve.control.wire.values import Assigned, Retire
from afserve.errors import RendezvousError
from afserve.member import MODEL_ROLES, NodeId, Role


class ComingMember(Going):
    """A member serves once it knows the placement in force."""

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
        if node.role is Role.GATEWAY and not self.deployment.wants(node):
            self._guests.add(node)
        member.epoch = member.asked = self.migration.placement.epoch
        self._since.pop(node, None)
        self._recovery.forget(node)
        deployment = replace(self.deployment, placement=self.migration.placement)
        assigned = Assigned(node, member.id.generation, self._assign(deployment, node))
        return [Admit(event.connection, member.id, assigned)]

    def _peers(self, member: Member) -> list[Effect]:
        """Attention nodes are told of all expert nodes' mailboxes, once they are known and whenever they change.

        So they are of gateways, when they are ready to serve and whenever these change.
        """
        if member.node.role is Role.GATEWAY:
            return self._announce_gateways()
        if member.node.role is Role.ATTENTION:
            return self._announce([member])
        return [] if self.settled else self._announce(self.members.of(Role.ATTENTION))

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
            self.members.move(member, State.DRAINED)
            return []
        return self._serves(member, now)

    def _serves(self, member: Member, now: float) -> list[Effect]:
        """From now on."""
        self.members.move(member, State.READY)
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
