"""Who is told which attention nodes serve: gateways, those nodes themselves, and expert nodes where phases are.

It knows no socket and no clock: the controller says when, and `tell` is how.
"""

from collections.abc import Callable
from dataclasses import replace

from afserve.control.membership.membership import Membership
from afserve.control.wire.values import AttentionNodes, ToNode
from afserve.member import Life, Role


class AttentionNews:
    """`nodes` is what was told last."""

    def __init__(self, membership: Membership, tell: Callable[[Life, ToNode], None]) -> None:
        self._membership, self._tell = membership, tell
        self.nodes = AttentionNodes()
        self._phased = False  # whether attention nodes have, or had, phases

    def changed(self) -> bool:
        """Whether others serve, or otherwise, than was told last; `nodes` are those of now from here on."""
        before, self.nodes = self.nodes, self._membership.attention_nodes()
        return self.nodes != before

    def tell_all(self) -> None:
        """Where attention nodes have phases, all nodes are told: decode rows come first at expert nodes."""
        members, deployment = self._membership.members, self._membership.deployment
        self._phased = self._phased or bool(deployment.phases)
        hear = [member for member in members.living(Role.ATTENTION) if self._hears(member.id)]
        hear += members.living(Role.EXPERT) if self._phased else ()
        for member in (*hear, *members.living(Role.GATEWAY)):
            self._tell(member.id, self.nodes)

    def tell_who_came(self, member: Life, *, knew: bool, serves: bool) -> None:
        """One that was admitted. `knew`: it has its place from an earlier stream, and may have missed the last news.
        `serves`: the run does already."""
        role = member.node.role
        if role is Role.GATEWAY:
            self._tell(member, replace(self.nodes, serves=serves))
        elif self._phased if role is Role.EXPERT else knew and self._hears(member):
            self._tell(member, self.nodes)

    def _hears(self, member: Life) -> bool:
        """An attention node that serves, of others: to keep copies for them, to ask them for prompts, or to hand its KV
        on to them as it leaves."""
        found = self._membership.members.find_life(member)
        return found is not None and found.serving and member.node.role is Role.ATTENTION
