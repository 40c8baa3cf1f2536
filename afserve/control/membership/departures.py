"""Those who are to go go once nothing needs them, and get a new process or a follower where they are to have one.

Each call takes one step further; what was asked for is in `wishes.py`.
"""

from afserve.control.membership.announcing import Announcer, Draining
from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import Dismiss, Effect, Tell
from afserve.control.membership.joining import Joining
from afserve.control.membership.losses import Losses
from afserve.control.membership.renewals import Step
from afserve.control.membership.roster import Member, State
from afserve.control.wire.values import Shutdown
from afserve.errors import PeerLost
from afserve.member import NodeId, Role


class Departures:
    def __init__(
        self, state: ClusterState, announcer: Announcer, losses: Losses, joining: Joining, draining: Draining
    ) -> None:
        self._state, self._announcer, self._losses, self._joining = state, announcer, losses, joining
        self._draining = draining

    def take_steps(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node in sorted(self._state.leaving):
            effects += self._see_off(node, now)
        effects += self._renew(now)
        # Those start whose turn has come, but for places that are not wanted any more.
        starts = [
            start
            for start in self._state.role_changes.followers_due(now)
            if self._state.members.vacant(start.node)
        ]
        self._losses.await_members([start.node for start in starts], now)
        return [*effects, *starts]

    def _see_off(self, node: NodeId, now: float) -> list[Effect]:
        """A leaving node goes when nothing needs it: no request of an attention node, no expert of an expert node."""
        state = self._state
        member = state.members.last_at(node)
        alive = member is not None and member.alive
        if state.migration.holds_experts(node):
            return []
        if member is not None and member.serving and node.role is not Role.EXPERT:
            return self._draining.drain_member(member)
        self._state.role_changes.note_dismissal(node, now, alive=alive)
        state.vacate(node)
        self._losses.forget_place(node)
        self._joining.drop_place(node)
        effects: list[Effect] = [Tell(member.id, Shutdown())] if member is not None and alive else []
        effects += self._announcer.relay(state.migration.drop_node(node, now))
        if node.role is Role.GATEWAY:
            return effects + self._announcer.announce_gateways()
        return effects + (self._announcer.announce_experts() if node.role is Role.EXPERT else [])

    def _renew(self, now: float) -> list[Effect]:
        """One step further with the member that is to have a new process, or the next one's turn."""
        renewals, members = self._state.renewals, self._state.members
        if self._draining.ends:
            renewals.drop_waiting()
        renewals.move_on(now)
        while renewals.node is None and renewals.waiting:
            member = members.last_at(renewals.waiting[0])
            if member is not None and member.alive and member.state is not State.READY:
                return []
            node = renewals.waiting.popleft()
            if member is not None and member.alive:  # else it gets a new process as it is
                renewals.begin_renewal(node)
        found = None if renewals.node is None else members.last_at(renewals.node)
        if found is None:
            return []
        if renewals.step is Step.LEAVING:
            return self._make_go(found, now)
        if renewals.step is Step.GOING and now >= renewals.until:
            stuck = PeerLost(found.node, "it did not go when it was told to")
            return [Dismiss(found.id, stuck), *self._losses.lose_member(found, stuck.reason, now)]
        return list(renewals.starts_due(now))

    def _make_go(self, member: Member, now: float) -> list[Effect]:
        """Once nothing needs it, or nothing can be done about that."""
        if member.node.role is Role.EXPERT:
            if self._state.migration.holds_experts(member.node) and self._state.can_spare(member.node):
                return []
        elif member.serving:
            return self._draining.drain_member(member)
        self._state.renewals.going(now)
        return [Tell(member.id, Shutdown())]
