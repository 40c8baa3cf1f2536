"""Other numbers of nodes, other roles, other phases, new processes: what people ask for, refused or noted.

Every wish is refused with a ConfigError that says why, and then nothing has changed; or it is noted, and
`departures.py` takes the steps.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from afserve.control.membership.cluster_state import ClusterState
from afserve.control.membership.events import Effect, Scale, Start
from afserve.control.membership.losses import Losses
from afserve.control.membership.recovery import Recovery
from afserve.control.wire.desired import Deployment
from afserve.errors import ConfigError
from afserve.member import MODEL_ROLES, AttentionPhase, NodeId, Role


def check_limits(deployment: Deployment, role: Role, count: int, *, room: int) -> None:
    """Raises ConfigError where there cannot be `count` nodes. An expert node has room for `room` experts of a layer."""
    least, most = 1, deployment.most(role)
    if role is Role.EXPERT:
        if deployment.colocated:
            raise ConfigError("scale: a colocated run has no expert nodes", param=role)
        if count >= 1 and count * room < deployment.placement.experts:
            raise ConfigError(
                f"scale: {count} expert nodes have room for {count * room} of the {deployment.placement.experts} "
                "experts of a layer; start with more --redundant-experts to need fewer nodes",
                param=role,
            )
    if role is Role.GATEWAY and not deployment.count(role):
        raise ConfigError(
            "scale: HTTP is served by the controller's process, which is one; start with --gateways 1 to have gateways "
            "whose number can change",
            param=role,
        )
    if count < least:
        raise ConfigError(f"scale: at least one {role} node is needed, {count} were asked for", param=role)
    if count > most:
        raise ConfigError(f"scale: {count} {role} nodes; {_limit(deployment, role)}", param=role)


def _limit(deployment: Deployment, role: Role) -> str:
    most = deployment.most(role)
    if role is Role.ATTENTION:
        return f"expert nodes keep mailboxes for {most}; start with --most-attention to have more"
    return f"there may be {most}"


def check_phases(after: Iterable[AttentionPhase], what: str) -> None:
    """Raises ConfigError where attention nodes in these phases cannot serve together: a prefill node computes prompts
    for decode nodes, those that do both need nobody. `what` was asked for."""
    count = Counter(after)
    if count[AttentionPhase.PREFILL] and not count[AttentionPhase.DECODE]:
        raise ConfigError(
            f"{what}: leaves prefill nodes and no decode node that they could compute prompts for; add a decode node "
            "first, or make a node one with --phase, such as attention-1=decode",
            param="phase",
        )


class NodeWishes:
    """Scale, drain, restart, change a role or a phase."""

    def __init__(self, state: ClusterState, losses: Losses, recovery: Recovery) -> None:
        self._state, self._losses, self._recovery = state, losses, recovery

    def check_count(self, role: Role, count: int) -> None:
        """Raises ConfigError where there cannot be so many nodes of a role now."""
        if self._state.renewals.awaits_process:
            raise ConfigError("scale: nodes are being restarted; try again when all serve", param=role)
        check_limits(self._state.deployment, role, count, room=self._state.room)
        places = [node for node in self._state.members.places(role) if node not in self._state.guests]
        leaving = [node for node in places if node in self._state.leaving]
        if (
            leaving
            and count > len(places) - len(leaving)
            and count + len(leaving) > self._state.deployment.most(role)
        ):
            raise ConfigError(
                f"scale: {', '.join(map(str, leaving))} still leaves, and its place is needed; try again",
                param=role,
            )

    def nodes_in_phase(self, phase: AttentionPhase) -> list[NodeId]:
        """The attention nodes that stay and are in this phase."""
        return self._staying_in(Role.ATTENTION, phase)

    def check_scales(self, scales: Iterable[Scale]) -> None:
        """Raises ConfigError where there cannot be so many nodes now. All of them are looked at together."""
        total, leave, more = (
            self._state.deployment.count(Role.ATTENTION),
            set[NodeId](),
            list[AttentionPhase](),
        )
        for scale in scales:
            if scale.role is not Role.ATTENTION:
                self.check_count(scale.role, scale.count)
                continue
            of_it = self._staying_in(scale.role, scale.phase)
            if scale.count < 0:
                what = f"{scale.phase or 'attention'} nodes"
                raise ConfigError(f"scale: {scale.count} {what} were asked for", param=scale.phase)
            total += scale.count - len(of_it)
            leave.update(of_it[scale.count :])
            more += [scale.phase or AttentionPhase.BOTH] * (scale.count - len(of_it))
        if total != self._state.deployment.count(Role.ATTENTION):
            self.check_count(Role.ATTENTION, total)
        check_phases(self._phases(leave, more), "scale")

    def scale(self, role: Role, count: int, phase: AttentionPhase | None, now: float) -> list[Effect]:
        of_it = self._staying_in(role, phase)
        wanted = self._state.deployment.count(role) + count - len(of_it) if phase else count
        self.check_count(role, wanted)
        self._state.want(role, wanted)
        self._state.leaving.update(of_it[count:])
        for node in of_it[:count]:
            self._recovery.hasten(node, now)
        effects: list[Effect] = []
        for _ in range(count - len(of_it)):
            node = self._add_place(role, phase or AttentionPhase.BOTH)
            self._losses.await_members([node], now)
            effects.append(Start(node))
        return effects

    def _staying_in(self, role: Role, phase: AttentionPhase | None) -> list[NodeId]:
        """Those that stay, of a role or of one phase of it."""
        staying = [node for node in self._state.staying() if node.role is role]
        return [one for one in staying if phase is None or self._state.deployment.phase(one.index) is phase]

    def _phases(
        self, leave: Collection[NodeId] = (), more: Iterable[AttentionPhase] = ()
    ) -> list[AttentionPhase]:
        """Of the attention nodes that there will be, without those that `leave` and with those that come."""
        staying = (node for node in self._staying_in(Role.ATTENTION, None) if node not in leave)
        return [*(self._state.deployment.phase(node.index) for node in staying), *more]

    def _add_place(self, role: Role, phase: AttentionPhase = AttentionPhase.BOTH) -> NodeId:
        """A new place; one of an attention node that left may have had another phase."""
        node = self._state.members.add_place(role)
        if role is Role.ATTENTION:
            self._state.want_phase(node, phase)
        return node

    def change_phase(self, node: NodeId, phase: AttentionPhase) -> list[Effect]:
        """Gateways are told; what runs on it ends there."""
        self._check_place(node)
        if node.role is not Role.ATTENTION:
            raise ConfigError(
                f"phase: {node} is no attention node; only those compute prompts and decode", param="phase"
            )
        if node in self._state.leaving:
            raise ConfigError(f"phase: {node} is leaving", param="phase")
        check_phases(self._phases([node], [phase]), "phase")
        self._state.want_phase(node, phase)
        return []

    def drain_node(self, node: NodeId) -> list[Effect]:
        self._check_place(node)
        if node not in self._state.guests and node not in self._state.leaving:
            self.check_count(node.role, self._state.deployment.count(node.role) - 1)
            if node.role is Role.ATTENTION:
                check_phases(self._phases([node]), "drain")
            self._state.want(node.role, self._state.deployment.count(node.role) - 1)
        self._state.leaving.add(node)
        return []

    def check_role(self, node: NodeId, role: Role) -> None:
        """Raises ConfigError where this node cannot go, or no node of this role come for it."""
        self._check_place(node)
        if node.role not in MODEL_ROLES or role not in MODEL_ROLES:
            raise ConfigError("role: only attention and expert nodes change roles", param="role")
        if node.role is role:
            raise ConfigError(f"role: {node} is an {role} node already", param="role")
        if node in self._state.leaving:
            raise ConfigError(f"role: {node} is leaving; ask for one more {role} node instead", param="node")
        try:
            self.check_count(node.role, self._state.deployment.count(node.role) - 1)
            self.check_count(role, self._state.deployment.count(role) + 1)
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
            fits = self._state.can_spare(node)
            return "" if fits else "the other expert nodes that serve have no room for its experts"
        if node not in self._state.serving(node.role):
            return ""  # it does none
        others = [n for n in self._state.serving(node.role) if n != node and n not in self._state.leaving]
        return "" if others else f"no other {node.role} node serves"

    def change_role(self, node: NodeId, role: Role) -> list[Effect]:
        """It goes as one that is drained; its successor has a place from now on, and starts when it has gone."""
        self.check_role(node, role)
        self._state.want(node.role, self._state.deployment.count(node.role) - 1)
        self._state.want(role, self._state.deployment.count(role) + 1)
        self._state.leaving.add(node)
        self._state.role_changes.add_follower(node, self._add_place(role))
        return []

    def restart_nodes(self, nodes: tuple[NodeId, ...], now: float) -> list[Effect]:
        for node in nodes:
            self._check_place(node)
            if node in self._state.leaving or node in self._state.guests:
                why = (
                    "is leaving"
                    if node in self._state.leaving
                    else "was started by hand, and is started again there"
                )
                raise ConfigError(f"restart: {node} {why}", param="node")
            if (
                node.role is Role.EXPERT
                and not self._state.can_spare(node)
                and not self._recovery.rules.recovers
            ):
                raise ConfigError(
                    f"restart: the other expert nodes have no room for the experts of {node}, and without them the run "
                    "would end; add an expert node first",
                    param="node",
                )
        for node in nodes:
            self._recovery.hasten(node, now)
        self._state.renewals.ask_renewals(nodes)
        return []

    def _check_place(self, node: NodeId) -> None:
        if self._state.members.last_at(node) is None and not self._state.members.vacant(node):
            raise ConfigError(f"{node} is no node of this run", param="node")

    def waits_for(self, node: NodeId) -> str:
        """What waits while this node has no process, in words; empty where nothing does."""
        if node.role is Role.EXPERT and not self._state.can_spare(node):
            return f"requests wait while {node} restarts: the other expert nodes have no room for its experts"
        if node.role is Role.ATTENTION and len(self._state.members.places(Role.ATTENTION)) == 1:
            return f"requests wait while {node} restarts: there is no other attention node"
        return ""
