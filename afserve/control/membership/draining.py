"""Nodes that take nothing new and finish what runs: one that leaves, or all of them before the run ends."""

from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import AllDrained, Effect, Tell
from afserve.control.membership.roster import Member, State
from afserve.control.wire.values import Drain
from afserve.member import Role


class Draining:
    """`ends`: the run is to end once nobody has a request."""

    def __init__(self, state: ClusterState) -> None:
        self.ends = False
        self._state = state
        self._drained = False

    def drain_member(self, member: Member) -> list[Effect]:
        """One that still loads has no request, and will not serve."""
        if member.state is not State.READY:
            return []
        self._state.members.move(member, State.DRAINING)
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
            self._state.members.move(member, State.DRAINED)

    def check_drained(self) -> list[Effect]:
        """Said once, when nobody has a request any more."""
        has_requests = self._state.serving(Role.ATTENTION) or self._state.serving(Role.GATEWAY)
        if not self.ends or self._drained or has_requests:
            return []
        self._drained = True
        return [AllDrained()]
