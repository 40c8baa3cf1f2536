"""What the parts of the membership (`membership.py`) share: who is wanted and who is there, who leaves, and what each
expert node may hold. It answers questions and decides nothing.
"""

from afserve.control.membership.members import Members
from afserve.control.membership.migration import Migration
from afserve.control.membership.renewals import Renewals, RoleChanges
from afserve.control.wire.desired import Deployment, Desired
from afserve.member import AttentionPhase, NodeId, Role


class ClusterState:
    """`desired` is what is wanted now, `migration` knows the placement in force. Nodes that are `leaving` go once
    nothing needs them; `guests` are gateways that came by themselves, beyond those that were asked for.

    `room`: experts of a layer that a node may hold. `settled`: everyone who was wanted has served, once.
    """

    def __init__(self, deployment: Deployment, members: Members, spare: int) -> None:
        self.desired = Desired({deployment.source.name: deployment})
        self.members = members
        self.migration = Migration(deployment.placement, self.serving)
        self.room = deployment.placement.slots_per_node() - spare
        self.renewals = Renewals()
        self.role_changes = RoleChanges()
        self.settled = False
        self.leaving: set[NodeId] = set()
        self.guests: set[NodeId] = set()

    @property
    def deployment(self) -> Deployment:
        return self.desired.only

    def want(self, role: Role, count: int) -> None:
        """So many nodes of a role from now on."""
        self.desired = self.desired.scaled(role, count)

    def want_phase(self, node: NodeId, phase: AttentionPhase) -> None:
        """This attention node is in this phase from now on."""
        self.desired = self.desired.in_phase(node.index, phase)

    def phase_of(self, index: int) -> AttentionPhase:
        return self.deployment.phase(index)

    def staying(self) -> list[NodeId]:
        """The places that are to be filled, beside those of nodes that leave and of gateways that joined by hand."""
        places = [node for role in Role for node in self.members.places(role)]
        return [node for node in places if node not in self.leaving and node not in self.guests]

    def serving(self, role: Role) -> list[NodeId]:
        return [member.node for member in self.members.role_view(role).serving]

    def answering(self) -> frozenset[int]:
        """Expert nodes that rows are sent to."""
        return self.members.role_view(Role.EXPERT).serving_indices

    def can_spare(self, node: NodeId) -> bool:
        """Whether the expert nodes beside this one have room for all experts."""
        others = self._staying_experts() - {node.index}
        return len(others) * self.room >= self.migration.placement.experts

    def holders(self) -> frozenset[int]:
        """Expert nodes that serve and stay."""
        serving, going = self._staying_experts(), self.renewals.leaving
        if going is None or going.role is not Role.EXPERT or not self.can_spare(going):
            return serving
        return serving - {going.index}

    def _staying_experts(self) -> frozenset[int]:
        """Those that serve, also one that is about to have a new process."""
        leaving = frozenset(node.index for node in self.leaving if node.role is Role.EXPERT)
        return self.answering() - leaving if leaving else self.answering()

    def vacate(self, node: NodeId) -> None:
        """There is no such place any more. Whoever takes one with this index later may be wanted."""
        self.leaving.discard(node)
        self.guests.discard(node)
        self.members.remove_place(node)
