"""How members come: they join, load, catch up with the placement in force, and serve; until the run has settled."""

from collections.abc import Callable
from dataclasses import replace

from afserve.control.membership.announcing import Announcer, Draining
from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import Admit, Effect, EndRun, Joined, Refuse, Settled, Tell
from afserve.control.membership.losses import Losses
from afserve.control.membership.members import NO_EPOCH
from afserve.control.membership.migration import Phase, asks
from afserve.control.membership.placing import ExpertPlacing
from afserve.control.membership.roster import Member, State
from afserve.control.wire.desired import Deployment
from afserve.control.wire.placement_values import Retire
from afserve.control.wire.values import Assigned
from afserve.errors import RendezvousError
from afserve.member import MODEL_ROLES, NodeId, Role

Assign = Callable[[Deployment, NodeId], Deployment]  # what one node is to run, such as on its own device


def same_everywhere(deployment: Deployment, node: NodeId) -> Deployment:
    return deployment


class Joining:
    """A member serves once it knows the placement in force.

    Owns the expert nodes that came while attention nodes adopt: some of these route by the next placement already, some
    do not, so who comes then starts with the next one.
    """

    def __init__(
        self,
        state: ClusterState,
        announcer: Announcer,
        losses: Losses,
        placing: ExpertPlacing,
        draining: Draining,
        assign: Assign,
    ) -> None:
        self._state, self._announcer, self._losses, self._placing = state, announcer, losses, placing
        self._draining, self._assign = draining, assign
        self._waiting: list[tuple[Joined, NodeId]] = []

    def join(self, event: Joined, now: float) -> list[Effect]:
        try:
            node = self._state.members.check_register(event.register, taken=self.awaited())
        except RendezvousError as error:
            return [Refuse(event.connection, error)]
        if node.role is Role.EXPERT and self._state.migration.adopting:
            self._waiting.append((event, node))
            return []
        return self._admit(event, node, now)

    def awaited(self) -> list[NodeId]:
        """Places of those who have come and wait."""
        return [node for _, node in self._waiting]

    def withdraw(self, connection: int) -> None:
        """Whoever waits on this stream has gone."""
        self._waiting = [(j, node) for j, node in self._waiting if j.connection != connection]

    def drop_place(self, node: NodeId) -> None:
        """Nobody is wanted there any more."""
        self._waiting = [(j, other) for j, other in self._waiting if other != node]

    def admit_waiting(self, unreadable: Callable[[int], bool], now: float) -> list[Effect]:
        """Once no attention node adopts: those who have loaded catch up, unless they cannot read an expert, and those
        who came meanwhile are let in."""
        if self._state.migration.adopting:
            return []
        effects: list[Effect] = []
        for member in self._state.members.role_view(Role.EXPERT).unready:
            if member.loaded and member.state is State.LOADING and not unreadable(member.node.index):
                effects += self.catch_up(member, now)
        waiting, self._waiting = self._waiting, []
        for event, node in waiting:
            effects += self._admit(event, node, now)
        return effects

    def _admit(self, event: Joined, node: NodeId, now: float) -> list[Effect]:
        state = self._state
        member = state.members.admit_member(node, event.register, now)
        if node.role is Role.GATEWAY and not state.deployment.wants(node):
            state.guests.add(node)
        member.epoch = member.asked = state.migration.placement.epoch
        self._losses.fill_place(node)
        deployment = replace(state.deployment, placement=state.migration.placement)
        assigned = Assigned(member.id, self._assign(deployment, node))
        return [Admit(event.connection, member.id, assigned)]

    def catch_up(self, member: Member, now: float) -> list[Effect]:
        """It has loaded. It serves once it knows the placement in force, which may be another than when it began."""
        member.loaded = True
        migration, is_expert = self._state.migration, member.node.role is Role.EXPERT
        in_force = migration.placement
        if is_expert and migration.adopting:
            return []  # some attention nodes route by the next placement already: it is asked once that is in force
        if member.epoch != in_force.epoch and member.node.role in MODEL_ROLES:
            if member.asked == in_force.epoch:
                return []
            # Nobody routes rows to it yet: what it began with may be overwritten.
            before = [Tell(member.id, Retire(member.asked))] if is_expert and member.asked != NO_EPOCH else []
            member.asked = in_force.epoch
            phase = Phase.FILLING if is_expert else Phase.ADOPTING
            return [*before, Tell(member.id, asks(phase, in_force))]
        if self._draining.ends and not is_expert:
            self._state.members.set_state(member, State.DRAINED)
            return []
        return self._serve(member, now)

    def _serve(self, member: Member, now: float) -> list[Effect]:
        """From now on."""
        self._state.members.set_state(member, State.READY)
        node = member.node
        self._state.renewals.serves(node, now)
        effects = self._announcer.relay(self._state.migration.include_node(node))
        if node.role is Role.ATTENTION:
            effects.append(Tell(member.id, self._state.members.gateways()))
        if self._state.settled:  # before, everyone is told when the run settles
            effects += self._announcer.announce_experts(None if node.role is Role.EXPERT else [member])
        return effects + self._losses.report_serving(member, now)

    def check_settled(self) -> list[Effect]:
        """Said once, when everyone serves. Somebody may have become ready before anybody said what its checkpoint is,
        or not be who was announced."""
        state = self._state
        if state.settled or not state.members.all_ready(besides=state.guests):
            return []
        try:
            for member in state.members:
                state.members.check_identified(member)
        except RendezvousError as error:
            return [EndRun(error)]
        state.settled = True
        self._placing.accept_first()
        return [Settled(), *(self._announcer.announce_experts() if self._losses.restarted else [])]
