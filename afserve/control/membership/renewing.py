"""Other numbers of nodes, other roles, new processes: what is asked for, and one step after the other of it."""

from collections.abc import Collection, Iterable

from afserve.control.membership.coming import ComingMember
from afserve.control.membership.events import (
    Dismiss,
    Effect,
    Scale,
    Start,
    Tell,
)
from afserve.control.membership.phases import check_phases
from afserve.control.membership.roster import Member, State
from afserve.control.membership.scaling import Step, check_count
from afserve.control.wire.values import Shutdown
from afserve.errors import ConfigError, PeerLost
from afserve.member import MODEL_ROLES, AttentionPhase, NodeId, Role


class Renewing(ComingMember):
    """Scale, drain, restart, change a role. Every one is refused, or a few steps that `_reconcile` takes."""

    def check_count(self, role: Role, count: int) -> None:
        """Raises ConfigError where there cannot be so many nodes of a role now."""
        if self.renewals.under_way:
            raise ConfigError("scale: nodes are being restarted; try again when all serve", param=role)
        check_count(self.deployment, role, count, room=self._room)
        places = [node for node in self.members.places(role) if node not in self._guests]
        leaving = [node for node in places if node in self._leaving]
        if (
            leaving
            and count > len(places) - len(leaving)
            and count + len(leaving) > self.deployment.most(role)
        ):
            raise ConfigError(
                f"scale: {', '.join(map(str, leaving))} still leaves, and its place is needed; try again",
                param=role,
            )

    def in_phase(self, phase: AttentionPhase) -> list[NodeId]:
        """The attention nodes that stay and are in this phase."""
        return self._of(Role.ATTENTION, phase)

    def check_scales(self, scales: Iterable[Scale]) -> None:
        """Raises ConfigError where there cannot be so many nodes now. All of them are looked at together."""
        total, leave, more = self.deployment.count(Role.ATTENTION), set[NodeId](), list[AttentionPhase]()
        for scale in scales:
            if scale.role is not Role.ATTENTION:
                self.check_count(scale.role, scale.count)
                continue
            of_it = self._of(scale.role, scale.phase)
            if scale.count < 0:
                what = f"{scale.phase or 'attention'} nodes"
                raise ConfigError(f"scale: {scale.count} {what} were asked for", param=scale.phase)
            total += scale.count - len(of_it)
            leave.update(of_it[scale.count :])
            more += [scale.phase or AttentionPhase.BOTH] * (scale.count - len(of_it))
        if total != self.deployment.count(Role.ATTENTION):
            self.check_count(Role.ATTENTION, total)
        check_phases(self._phases(leave, more), "scale")

    def _scaled(self, role: Role, count: int, phase: AttentionPhase | None, now: float) -> list[Effect]:
        of_it = self._of(role, phase)
        wanted = self.deployment.count(role) + count - len(of_it) if phase else count
        self.check_count(role, wanted)
        self.desired = self.desired.scaled(role, wanted)
        self._leaving.update(of_it[count:])
        for node in of_it[:count]:
            self._recovery.hasten(node, now)
        effects: list[Effect] = []
        for _ in range(count - len(of_it)):
            node = self._add(role, phase or AttentionPhase.BOTH)
            self._since[node] = now
            effects.append(Start(node))
        return effects

    def _of(self, role: Role, phase: AttentionPhase | None) -> list[NodeId]:
        """Those that stay, of a role or of one phase of it."""
        staying = [node for node in self.staying() if node.role is role]
        return [node for node in staying if phase is None or self.deployment.phase(node.index) is phase]

    def _phases(
        self, leave: Collection[NodeId] = (), more: Iterable[AttentionPhase] = ()
    ) -> list[AttentionPhase]:
        """Of the attention nodes that there will be, without those that `leave` and with those that come."""
        staying = (node for node in self._of(Role.ATTENTION, None) if node not in leave)
        return [*(self.deployment.phase(node.index) for node in staying), *more]

    def _add(self, role: Role, phase: AttentionPhase = AttentionPhase.BOTH) -> NodeId:
        """A new place; one of an attention node that left may have had another phase."""
        node = self.members.add(role)
        if role is Role.ATTENTION:
            self.desired = self.desired.in_phase(node.index, phase)
        return node

    def _changes_phase(self, node: NodeId, phase: AttentionPhase) -> list[Effect]:
        """Gateways are told; what runs on it ends there."""
        self._check_place(node)
        if node.role is not Role.ATTENTION:
            raise ConfigError(
                f"phase: {node} is no attention node; only those compute prompts and decode", param="phase"
            )
        if node in self._leaving:
            raise ConfigError(f"phase: {node} is leaving", param="phase")
        check_phases(self._phases([node], [phase]), "phase")
        self.desired = self.desired.in_phase(node.index, phase)
        return []

    def _drained_one(self, node: NodeId) -> list[Effect]:
        self._check_place(node)
        if node not in self._guests and node not in self._leaving:
            self.check_count(node.role, self.deployment.count(node.role) - 1)
            if node.role is Role.ATTENTION:
                check_phases(self._phases([node]), "drain")
            self.desired = self.desired.scaled(node.role, self.deployment.count(node.role) - 1)
        self._leaving.add(node)
        return []

    def check_role(self, node: NodeId, role: Role) -> None:
        """Raises ConfigError where this node cannot go, or no node of this role come for it."""
        self._check_place(node)
        if node.role not in MODEL_ROLES or role not in MODEL_ROLES:
            raise ConfigError("role: only attention and expert nodes change roles", param="role")
        if node.role is role:
            raise ConfigError(f"role: {node} is an {role} node already", param="role")
        if node in self._leaving:
            raise ConfigError(f"role: {node} is leaving; ask for one more {role} node instead", param="node")
        try:
            self.check_count(node.role, self.deployment.count(node.role) - 1)
            self.check_count(role, self.deployment.count(role) + 1)
            if node.role is Role.ATTENTION:
                check_phases(self._phases([node]), "role")
        except ConfigError as error:
            why = error.message.removeprefix("scale: ")
            raise ConfigError(f"role: {node} cannot become an {role} node: {why}", param="role") from None
        if why := self._needed(node):
            raise ConfigError(f"role: {node} cannot become an {role} node now: {why}", param="node")

    def _needed(self, node: NodeId) -> str:
        """Why those that serve beside it cannot do its work; empty where they can."""
        if node.role is Role.EXPERT:
            fits = self.can_spare(node)
            return "" if fits else "the other expert nodes that serve have no room for its experts"
        if node not in self._serving(node.role):
            return ""  # it does none
        others = [n for n in self._serving(node.role) if n != node and n not in self._leaving]
        return "" if others else f"no other {node.role} node serves"

    def _changes_role(self, node: NodeId, role: Role) -> list[Effect]:
        """It goes as one that is drained; its successor has a place from now on, and starts when it has gone."""
        self.check_role(node, role)
        self.desired = self.desired.scaled(node.role, self.deployment.count(node.role) - 1)
        self.desired = self.desired.scaled(role, self.deployment.count(role) + 1)
        self._leaving.add(node)
        self.role_changes.ask(node, self._add(role))
        return []

    def _follow(self, now: float) -> list[Effect]:
        """Those start whose turn has come, but for places that are not wanted any more."""
        starts = [start for start in self.role_changes.due(now) if self.members.vacant(start.node)]
        self._since |= {start.node: now for start in starts}
        return [*starts]

    def _renewed(self, nodes: tuple[NodeId, ...], now: float) -> list[Effect]:
        for node in nodes:
            self._check_place(node)
            if node in self._leaving or node in self._guests:
                why = (
                    "is leaving"
                    if node in self._leaving
                    else "was started by hand, and is started again there"
                )
                raise ConfigError(f"restart: {node} {why}", param="node")
            if node.role is Role.EXPERT and not self.can_spare(node) and not self._recovery.rules.recovers:
                raise ConfigError(
                    f"restart: the other expert nodes have no room for the experts of {node}, and without them the run "
                    "would end; add an expert node first",
                    param="node",
                )
        for node in nodes:
            self._recovery.hasten(node, now)
        self.renewals.ask(nodes)
        return []

    def _check_place(self, node: NodeId) -> None:
        if self.members.at(node) is None and not self.members.vacant(node):
            raise ConfigError(f"{node} is no node of this run", param="node")

    def waits_for(self, node: NodeId) -> str:
        """What waits while this node has no process, in words; empty where nothing does."""
        if node.role is Role.EXPERT and not self.can_spare(node):
            return f"requests wait while {node} restarts: the other expert nodes have no room for its experts"
        if node.role is Role.ATTENTION and len(self.members.places(Role.ATTENTION)) == 1:
            return f"requests wait while {node} restarts: there is no other attention node"
        return ""

    def _see_off(self, node: NodeId, now: float) -> list[Effect]:
        """A leaving node goes when nothing needs it: no request of an attention node, no expert of an expert node."""
        member = self.members.at(node)
        alive = member is not None and member.alive
        if self.migration.holds(node):
            return []
        if member is not None and member.serving and node.role is not Role.EXPERT:
            return self._drain(member)
        self._leaving.discard(node)
        self._guests.discard(node)  # whoever takes its place later may be wanted
        self.role_changes.told(node, now, alive=alive)
        self.members.remove(node)
        self._recovery.forget(node)
        self._waiting = [(j, other) for j, other in self._waiting if other != node]
        effects: list[Effect] = [Tell(member.id, Shutdown())] if member is not None and alive else []
        effects += self._tell(self.migration.lost(node, now))
        if node.role is Role.GATEWAY:
            return effects + self._announce_gateways()
        return effects + (self._announce(self.members.of(Role.ATTENTION)) if node.role is Role.EXPERT else [])

    def _renew(self, now: float) -> list[Effect]:
        """One step further with the member that is to have a new process, or the next one's turn."""
        renewals = self.renewals
        if self._draining:
            renewals.clear()
        renewals.move_on(now)
        while renewals.node is None and renewals.waiting:
            member = self.members.at(renewals.waiting[0])
            if member is not None and member.alive and member.state is not State.READY:
                return []
            node = renewals.waiting.popleft()
            if member is not None and member.alive:  # else it gets a new process as it is
                renewals.begin(node)
        found = None if renewals.node is None else self.members.at(renewals.node)
        if found is None:
            return []
        if renewals.step is Step.LEAVING:
            return self._make_go(found, now)
        if renewals.step is Step.GOING and now >= renewals.until:
            stuck = PeerLost(found.node, "it did not go when it was told to")
            return [Dismiss(found.id, stuck), *self._gone(found, stuck.reason, now)]
        return list(renewals.due(now))

    def _make_go(self, member: Member, now: float) -> list[Effect]:
        """Once nothing needs it, or nothing can be done about that."""
        if member.node.role is Role.EXPERT:
            if self.migration.holds(member.node) and self.can_spare(member.node):
                return []
        elif member.serving:
            return self._drain(member)
        self.renewals.going(now)
        return [Tell(member.id, Shutdown())]
