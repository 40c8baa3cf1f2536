"""Messages to those who are there: peers, gateways, what a migration says, and to take nothing new. Decides nothing."""

from collections.abc import Iterable, Mapping, Sequence

from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import AllDrained, Effect, Tell
from afserve.control.membership.migration import Outgoing
from afserve.control.membership.roster import Member, State
from afserve.control.wire.values import AttentionNodes, Drain
from afserve.member import AttentionPhase, Role


class Announcer:
    def __init__(self, state: ClusterState) -> None:
        self._state = state
        # What gateways are told, and what it was made from.
        self._attending: tuple[tuple[int, str, Mapping[int, AttentionPhase]], AttentionNodes] = (
            (-1, "", {}),
            AttentionNodes(),
        )

    def attention_nodes(self, refusing: str) -> AttentionNodes:
        """For gateways: who attends, and why new requests are refused, where they are."""
        members, deployment = self._state.members, self._state.deployment
        key = members.role_view(Role.ATTENTION).version, refusing, deployment.phases
        if key != self._attending[0]:
            self._attending = key, members.attention_nodes(refusing, deployment.phase)
        return self._attending[1]

    def introduce(self, member: Member) -> list[Effect]:
        """Its peers are told of a member whose address is known now.

        Attention nodes are told of all expert nodes' mailboxes, once they are known and whenever they change. So they
        are of gateways, when they are ready to serve and whenever these change.
        """
        if member.node.role is Role.GATEWAY:
            return self.announce_gateways()
        if member.node.role is Role.ATTENTION:
            return self.announce_experts([member])
        return [] if self._state.settled else self.announce_experts()

    def announce_experts(self, told: Sequence[Member] | None = None) -> list[Effect]:
        """Where the expert nodes are, to these attention nodes or to all."""
        state = self._state
        peers = state.members.peers(settled=state.settled)
        if peers is None:
            return []
        return [
            Tell(attention.id, peers)
            for attention in (state.members.living(Role.ATTENTION) if told is None else told)
            if attention.address is not None
            and (peers.experts or attention.serving or state.deployment.colocated)
        ]

    def announce_gateways(self) -> list[Effect]:
        gateways = self._state.members.gateways()
        return [Tell(member.id, gateways) for member in self._state.members.role_view(Role.ATTENTION).serving]

    def relay(self, outgoing: Iterable[Outgoing]) -> list[Effect]:
        """To the present lives of nodes; who is gone will be told when it comes back."""
        found = ((self._state.members.last_at(node), value) for node, value in outgoing)
        return [Tell(member.id, value) for member, value in found if member is not None and member.alive]


class Draining:
    """Nodes that take nothing new and finish what runs: one that leaves, or all of them where the run `ends`."""

    def __init__(self, state: ClusterState) -> None:
        self.ends = False
        self._state = state
        self._drained = False

    def drain_member(self, member: Member) -> list[Effect]:
        """One that still loads has no request, and will not serve."""
        if member.state is not State.READY:
            return []
        self._state.members.set_state(member, State.DRAINING)
        return self.repeat_drain(member)

    def repeat_drain(self, member: Member) -> list[Effect]:
        """One that drains already is told why now: a second `Drain` is harmless, a lost one would be waited for."""
        draining = member.state is State.DRAINING
        return [Tell(member.id, Drain(ends=self.ends))] if draining else []

    def drain_all(self) -> list[Effect]:
        """Also those that drain because only they leave: with the end of the run a gateway waits for nobody new."""
        self.ends = True
        members = [member for member in self._state.members if member.node.role is not Role.EXPERT]
        return [e for member in members for e in self.drain_member(member) or self.repeat_drain(member)]

    def report_drained(self, member: Member) -> None:
        if member.state is State.DRAINING:
            self._state.members.set_state(member, State.DRAINED)

    def check_drained(self) -> list[Effect]:
        """Said once, when nobody has a request any more."""
        has_requests = self._state.serving(Role.ATTENTION) or self._state.serving(Role.GATEWAY)
        if not self.ends or self._drained or has_requests:
            return []
        self._drained = True
        return [AllDrained()]
