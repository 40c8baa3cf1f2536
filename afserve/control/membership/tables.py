"""What the membership knows, and its words: the lowest layer of the machine (`state.py`), which the others build on.

Who is told what, which expert nodes may hold experts, and phrases for people. Nothing is decided here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from afserve.adviser import Adviser
from afserve.control.membership.coverage import Coverage
from afserve.control.membership.events import Effect, Joined, Tell
from afserve.control.membership.members import Members
from afserve.control.membership.migration import Migration, Outgoing
from afserve.control.membership.reach import Reach
from afserve.control.membership.recovery import Recovery, Rules
from afserve.control.membership.roles import RoleChanges
from afserve.control.membership.roster import Member, State
from afserve.control.membership.scaling import Renewals
from afserve.control.membership.shortage import Shortage, ShortagePatience
from afserve.control.membership.slowness import Slowness
from afserve.control.membership.takeover import Takeover
from afserve.control.membership.unreadable import UnreadableExperts
from afserve.control.membership.watching import Watch
from afserve.control.wire.desired import Deployment, Desired
from afserve.control.wire.values import AttentionNodes, Drain
from afserve.member import AttentionPhase, NodeId, Role

Assign = Callable[[Deployment, NodeId], Deployment]  # what one node is to run, such as on its own device


_LIVES = 256  # of one node under one controller: more are not started


def same_everywhere(deployment: Deployment, node: NodeId) -> Deployment:
    return deployment


def first_generation(life: int) -> int:
    """Of nodes that are new under this controller of the run."""
    return life * _LIVES


class Tables:
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
        self.desired = Desired({deployment.source.name: deployment})
        self.members = Members(deployment.nodes, version, deployment.colocated, first_generation(life))
        self.migration = Migration(deployment.placement, self._serving)
        self.settled = False
        self.ended = False
        self._takeover: Takeover | None = None  # while those who were there before come back
        self._fresh: list[Joined] = []  # who came meanwhile without having been there
        self._recovery = Recovery(rules or Rules())
        self._assign = assign
        self._room = deployment.placement.slots_per_node() - spare
        patience = ShortagePatience(self._recovery.rules.short, self._recovery.rules.deadline)
        self._shortage = Shortage(patience, self._room)
        self._slowness = Slowness()
        self._reach = Reach()
        self._watch = Watch(self.members, self._recovery.rules.silence, self._phase_of)
        self.renewals = Renewals()
        self.role_changes = RoleChanges()
        self._coverage = Coverage()
        self._unreadable = UnreadableExperts()
        # What only advises: an exception there must not end anything.
        self._shortage_advice = Adviser("telling what is lacking")
        self._slowness_advice = Adviser("finding slow expert nodes")
        self._coverage_advice = Adviser("telling which experts have no node")
        self._since: dict[NodeId, float] = {}  # when a place became empty
        self._waiting: list[tuple[Joined, NodeId]] = []  # expert nodes that came while attention nodes adopt
        self._leaving: set[NodeId] = set()
        self._guests: set[NodeId] = (
            set()
        )  # gateways that came by themselves, beyond those that were asked for
        # Expert nodes that a placement is being thought out for, and that the one in force or under way was.
        self._asked: frozenset[int] | None = None
        self._seen: frozenset[int] | None = None
        self._first = frozenset(range(deployment.count(Role.EXPERT)))
        self._lost_at: dict[NodeId, float] = {}  # of places whose member was lost while it served
        self._draining = self._drained = False
        self._restarted = False  # whether somebody was lost before the run had settled
        # What gateways are told, and what it was made from.
        self._attending: tuple[tuple[int, str, Mapping[int, AttentionPhase]], AttentionNodes] = (
            (-1, "", {}),
            AttentionNodes(),
        )

    @property
    def deployment(self) -> Deployment:
        return self.desired.only

    def _phase_of(self, index: int) -> AttentionPhase:
        return self.deployment.phase(index)

    def attention_nodes(self) -> AttentionNodes:
        """For gateways: who attends, and why new requests are refused, where they are."""
        refusing, phases = self._shortage.refusing, self.deployment.phases
        key = self.members.view(Role.ATTENTION).version, refusing, phases
        if key != self._attending[0]:
            self._attending = key, self.members.attention_nodes(refusing, self.deployment.phase)
        return self._attending[1]

    def absent(self) -> list[str]:
        """A phrase for every place whose member is gone."""
        gone = ((node, self.members.at(node)) for node in self.members.missing())
        said = {node: f"{node} is gone: {member.why}" for node, member in gone if member is not None}
        failing = self._recovery.is_failing
        return [
            f"{why}; it keeps failing, and is tried again" if failing(n) else why for n, why in said.items()
        ]

    def staying(self) -> list[NodeId]:
        """The places that are to be filled, beside those of nodes that leave and of gateways that joined by hand."""
        places = [node for role in Role for node in self.members.places(role)]
        return [node for node in places if node not in self._leaving and node not in self._guests]

    def can_spare(self, node: NodeId) -> bool:
        """Whether the expert nodes beside this one have room for all experts."""
        others = self._serving_experts() - {node.index}
        return len(others) * self._room >= self.migration.placement.experts

    def holders(self) -> frozenset[int]:
        """Expert nodes that serve and stay."""
        serving, going = self._serving_experts(), self.renewals.leaving
        if going is None or going.role is not Role.EXPERT or not self.can_spare(going):
            return serving
        return serving - {going.index}

    def _answering(self) -> frozenset[int]:
        """Expert nodes that rows are sent to."""
        return self.members.view(Role.EXPERT).serving_indices

    def _serving_experts(self) -> frozenset[int]:
        """Also one that is about to have a new process."""
        leaving = frozenset(node.index for node in self._leaving if node.role is Role.EXPERT)
        return self._answering() - leaving if leaving else self._answering()

    def _away(self) -> bool:
        """Whether an expert node that holds experts does not serve: what it holds must not change then."""
        return bool(self.migration.holding - self._answering())

    def _announce(self, told: Sequence[Member]) -> list[Effect]:
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
        gateways = self.members.gateways()
        return [Tell(member.id, gateways) for member in self.members.view(Role.ATTENTION).serving]

    def _drain(self, member: Member) -> list[Effect]:
        """One that still loads has no request, and will not serve."""
        if member.state is not State.READY:
            return []
        self.members.move(member, State.DRAINING)
        return self._drain_again(member)

    def _drain_again(self, member: Member) -> list[Effect]:
        """One that drains already is told why now: a second `Drain` is harmless, a lost one would be waited for."""
        draining = member.state is State.DRAINING
        return [Tell(member.id, Drain(ends=self._draining))] if draining else []

    def _drain_all(self) -> list[Effect]:
        """Also those that drain because only they leave: with the end of the run a gateway waits for nobody new."""
        members = [member for member in self.members if member.node.role is not Role.EXPERT]
        return [e for member in members for e in self._drain(member) or self._drain_again(member)]

    def _tell(self, outgoing: Iterable[Outgoing]) -> list[Effect]:
        """To the present lives of nodes; who is gone will be told when it comes back."""
        found = ((self.members.at(node), value) for node, value in outgoing)
        return [Tell(member.id, value) for member, value in found if member is not None and member.alive]

    def _serving(self, role: Role) -> list[NodeId]:
        return [member.node for member in self.members.view(role).serving]
