"""Obeys what people ask of a running deployment: from names and numbers to events of the membership.

All of a change is checked before any of it is begun. It starts nothing and waits for nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from afserve.control.controller import Controller
from afserve.control.membership.events import Broken, ChangePhase, ChangeRole, DrainNode, RestartNodes, Scale
from afserve.control.wire.change_values import (
    MOST_FAULT_SECONDS,
    PHASE_POOLS,
    POOLS,
    Change,
    Changed,
    DrainOne,
    End,
    Fault,
    FaultKind,
    NewPhase,
    NewRole,
    Restart,
    ScaleTo,
    count_of,
)
from afserve.errors import CapacityError, ConfigError, NotFoundError, shown
from afserve.member import MODEL_ROLES, AttentionPhase, NodeId, Role

CheckRoom = Callable[[Mapping[Role, int]], None]
CheckRole = Callable[[Role, Role], None]
Break = Callable[[NodeId, FaultKind, float], int]


def any_number(more: Mapping[Role, int]) -> None:
    """Where nobody knows of a limit."""


def any_role(old: Role, new: Role) -> None:
    """Where nobody knows of a limit."""


def nobody_here(node: NodeId, kind: FaultKind, seconds: float) -> int:
    raise ConfigError(f"{node} was not started from here and cannot be broken from here", param="node")


def not_from_here() -> None:
    raise ConfigError("this run ends with the program that started it, and not before")


class Changing:
    """`check_room` raises DoesNotFitError where so many more nodes of each role find no place; `can_start` says
    whether a node's process is started from here; `break_node` breaks it on purpose and returns its pid; `end` ends the
    run. `check_role` raises DoesNotFitError where a node of the new role does not fit where one of the old was."""

    def __init__(
        self,
        controller: Controller,
        check_room: CheckRoom = any_number,
        can_start: Callable[[NodeId], bool] = lambda node: True,
        break_node: Break = nobody_here,
        check_role: CheckRole = any_role,
        end: Callable[[], None] = not_from_here,
    ) -> None:
        self._check_role = check_role
        self._end = end
        self._break_node = break_node
        self._controller = controller
        self._check_room = check_room
        self._can_start = can_start

    def change(self, change: Change) -> Changed:
        """Raises ConfigError, NotFoundError or DoesNotFitError, and changes nothing, for what cannot be."""
        if isinstance(change, End):
            self._end()
            return Changed({}, going=tuple(map(str, self._controller.membership.state.staying())))
        if not self._controller.changeable:
            raise CapacityError("the run is stopping, and cannot be changed any more")
        match change:
            case ScaleTo():
                return self._scale(change)
            case DrainOne(name):
                return self._changed(lambda: self._controller.obey(DrainNode(self._named(name))))
            case Restart(names):
                return self._restart(names)
            case NewPhase():
                return self._new_phase(change)
            case NewRole(name, role):
                return self._new_role(self._named(name), role)
            case Fault():
                return self._broken(change)

    def _scale(self, change: ScaleTo) -> Changed:
        known = (*POOLS, *PHASE_POOLS)
        if not change.counts:
            raise ConfigError(f"scale: say how many nodes of {', '.join(known)}")
        scales: list[tuple[int, Scale]] = []  # with how many more
        for pool, text in change.counts.items():
            if pool not in known:
                raise ConfigError(f"{shown(pool)} is not one of {', '.join(known)}", param=pool)
            role, phase, now = self._pool(pool)
            wanted = count_of(pool, now, text)
            scales.append((wanted - now, Scale(role, wanted, phase)))
        self._controller.membership.wishes.check_scales(scale for _, scale in scales)
        more = Counter[Role]()
        for number, each in scales:
            more[each.role] += number
        self._check_room(more)

        def scale() -> None:
            for _, each in sorted(scales, key=lambda one: -one[0]):  # none has to go before another comes
                self._controller.obey(each)

        return self._changed(scale)

    def _pool(self, pool: str) -> tuple[Role, AttentionPhase | None, int]:
        """Whose number it is, and how many there are."""
        deployment, membership = self._controller.deployment, self._controller.membership
        if pool in PHASE_POOLS:
            return Role.ATTENTION, PHASE_POOLS[pool], len(membership.wishes.nodes_in_phase(PHASE_POOLS[pool]))
        if POOLS[pool] is Role.ATTENTION and deployment.phases:
            both = AttentionPhase.BOTH
            return Role.ATTENTION, both, len(membership.wishes.nodes_in_phase(both))
        return POOLS[pool], None, deployment.count(POOLS[pool])

    def _new_phase(self, change: NewPhase) -> Changed:
        if change.phase not in tuple(AttentionPhase):
            raise ConfigError(
                f"phase: {shown(change.phase)} is not one of {', '.join(AttentionPhase)}", param="phase"
            )
        node, phase = self._named(change.node), AttentionPhase(change.phase)
        return self._changed(lambda: self._controller.obey(ChangePhase(node, phase)))

    def _restart(self, names: tuple[str, ...]) -> Changed:
        membership = self._controller.membership
        notes: list[str] = []
        if names:
            nodes = tuple(self._named(name) for name in names)
            for node in nodes:
                if not self._can_start(node):
                    raise ConfigError(f"restart: {self._elsewhere(node)}", param="node")
        else:
            staying = membership.state.staying()
            nodes = tuple(node for node in staying if self._can_start(node))
            notes += [self._elsewhere(node) for node in staying if node not in nodes]
        notes += [note for node in nodes if (note := membership.wishes.waits_for(node))]
        self._controller.obey(RestartNodes(nodes))
        told = tuple(map(str, nodes))
        return Changed(self._counts(), told, told, tuple(notes))

    def _new_role(self, node: NodeId, name: str) -> Changed:
        if name not in MODEL_ROLES:
            roles = " and ".join(MODEL_ROLES)
            raise ConfigError(
                f"role: {shown(name)} is not one that a node can change to; those are {roles}", param="role"
            )
        if not self._can_start(node):
            raise ConfigError(f"role: {self._elsewhere(node)}, with --role {name}", param="node")
        self._controller.membership.wishes.check_role(node, Role(name))
        self._check_role(node.role, Role(name))
        return self._changed(lambda: self._controller.obey(ChangeRole(node, Role(name))))

    def _broken(self, fault: Fault) -> Changed:
        kinds = [str(kind) for kind in FaultKind]
        if fault.fault not in kinds:
            raise ConfigError(f"fault: {shown(fault.fault)} is not one of {', '.join(kinds)}", param="fault")
        kind, node = FaultKind(fault.fault), self._named(fault.node)
        lasts = kind is not FaultKind.KILL
        if lasts and not 0 < fault.seconds <= MOST_FAULT_SECONDS:
            raise ConfigError(
                f"seconds: {fault.seconds:g} is not in (0, {MOST_FAULT_SECONDS:g}]; say how long to {kind} {node}",
                param="seconds",
            )
        pid = self._break_node(node, kind, fault.seconds)
        self._controller.obey(Broken(node))
        lasting = f" for {fault.seconds:g} s" if lasts else ""
        return Changed(self._counts(), notes=(f"{kind} {node}{lasting}, pid {pid}",))

    def _elsewhere(self, node: NodeId) -> str:
        return f"{node} is on another host, which no `afserve host` carries: end it there and start it again"

    def _changed(self, obey: Callable[[], None]) -> Changed:
        before = self._controller.membership.state.staying()
        obey()
        after = self._controller.membership.state.staying()
        coming = tuple(str(node) for node in after if node not in before)
        return Changed(self._counts(), coming, tuple(str(node) for node in before if node not in after))

    def _counts(self) -> dict[str, int]:
        phases = PHASE_POOLS if self._controller.deployment.phases else ()
        return {pool: self._pool(pool)[2] for pool in (*POOLS, *phases)}

    def _named(self, name: str) -> NodeId:
        members = self._controller.members
        places = [node for role in Role for node in members.places(role)]
        for node in places:
            if str(node) == name:
                return node
        raise NotFoundError(
            f"node: {shown(name)} is none of this run's, which are {', '.join(map(str, places))}",
            param="node",
        )
