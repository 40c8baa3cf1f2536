"""Puts what is known into messages to those who are there: peers, gateways, what a migration says. Decides nothing."""

from collections.abc import Iterable, Mapping, Sequence

from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import Effect, Tell
from afserve.control.membership.migration import Outgoing
from afserve.control.membership.roster import Member
from afserve.control.wire.values import AttentionNodes
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
        key = members.view(Role.ATTENTION).version, refusing, deployment.phases
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
            for attention in (state.members.of(Role.ATTENTION) if told is None else told)
            if attention.address is not None
            and (peers.experts or attention.serving or state.deployment.colocated)
        ]

    def announce_gateways(self) -> list[Effect]:
        gateways = self._state.members.gateways()
        return [Tell(member.id, gateways) for member in self._state.members.view(Role.ATTENTION).serving]

    def relay(self, outgoing: Iterable[Outgoing]) -> list[Effect]:
        """To the present lives of nodes; who is gone will be told when it comes back."""
        found = ((self._state.members.at(node), value) for node, value in outgoing)
        return [Tell(member.id, value) for member, value in found if member is not None and member.alive]
